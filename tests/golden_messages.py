"""Golden files of messages, one section per name: `[name] message`, then an empty line.

Each test compares its own section, so that tests of one file may run in different processes.
"""

import os
from collections.abc import Iterable
from pathlib import Path


def sections(path: Path) -> dict[str, str]:
    """Returns the sections of a golden file by name."""
    texts = (text.strip() for text in path.read_text().split("\n\n"))
    return {text.partition("]")[0].removeprefix("["): text for text in texts if text}


def compare(path: Path, names: Iterable[str], name: str, text: str) -> None:
    """Asserts that a message is the golden one, or writes it; `names` is the order of the sections."""
    text = f"[{name}] {text}".strip()
    if os.environ.get("SPANAX_GOLDEN") == "update":
        golden = sections(path) | {name: text}
        path.write_text("".join(f"{golden[key]}\n\n" for key in names if key in golden))
    assert text == sections(path).get(name), "a message changed: `make golden`, then read the diff"
