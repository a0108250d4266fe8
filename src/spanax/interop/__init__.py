"""Import and export of Hugging Face weights, and export of logical axis rules for MaxText and Flax."""

from spanax.interop.hf_export import Exported, export_weights
from spanax.interop.hf_import import Imported, import_weights
from spanax.interop.rules import Rules, export_rules

__all__ = ["Exported", "Imported", "Rules", "export_rules", "export_weights", "import_weights"]
