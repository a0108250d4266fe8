"""Import and export of Hugging Face weights, and export of logical axis rules for MaxText and Flax."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spanax.interop.hf_export import Exported, export_weights
    from spanax.interop.hf_import import Imported, import_weights
    from spanax.interop.rules import Rules, export_rules

_HOME = {
    "Exported": "hf_export",
    "Imported": "hf_import",
    "Rules": "rules",
    "export_rules": "rules",
    "export_weights": "hf_export",
    "import_weights": "hf_import",
}

__all__ = ["Exported", "Imported", "Rules", "export_rules", "export_weights", "import_weights"]


def __getattr__(name: str) -> Any:
    # Imported on first use: the command line reads its flags from here without JAX.
    if name in _HOME:
        return getattr(import_module(f"spanax.interop.{_HOME[name]}"), name)
    raise AttributeError(f"module 'spanax.interop' has no attribute '{name}'")
