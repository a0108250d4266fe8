"""Cases of a folder, stored in a file: tracing every program takes most of the time of a run."""

import hashlib
import pickle
from pathlib import Path
from typing import Any

CODE = Path(__file__).resolve().parent
LIBRARY = CODE.parent.parent / "src" / "spanax"
PRICES = (
    "calibration", "roofline", "kernel_rates", "step_time", "collectives", "bubble", "links", "prediction", "constants",
    "fit", "accuracy",
)  # fmt: skip
"""Modules that prices depend on, but terms do not; a change of them leaves stored cases valid."""


def digest(folder: Path) -> str:
    """Returns a digest of the rows, and of the code that reads and traces them."""
    result = hashlib.sha256()
    code = [path for root in (CODE, LIBRARY) for path in root.rglob("*") if path.suffix in (".py", ".toml")]
    for path in sorted([*folder.glob("*.csv"), *(path for path in code if path.stem not in PRICES)]):
        result.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return result.hexdigest()


def load(file: Path, key: str) -> Any:
    """Returns the value that `store` wrote with an equal digest, or None.

    The file is a pickle: read only what this program wrote on this machine.
    """
    if not file.exists():
        return None
    stored_key, value = pickle.loads(file.read_bytes())
    return value if stored_key == key else None


def store(file: Path, key: str, value: Any) -> None:
    """Writes a value with the digest of what it was computed from."""
    file.write_bytes(pickle.dumps((key, value)))
