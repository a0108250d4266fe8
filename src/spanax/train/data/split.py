"""The splits of a source, and the files that may be in it."""

import os
from collections.abc import Iterable
from pathlib import Path

from spanax.errors import FileError, UnknownNameError, nearest

SPLITS = ("train", "validation")

HELD_OUT = 20
"""One in this many parts is held out for validation."""


def check_inside(folder: Path, paths: Iterable[Path]) -> None:
    """Checks that no file is a link out of the folder, which could expose any file of this machine."""
    root = Path(os.path.realpath(folder))
    for path in paths:
        target = Path(os.path.realpath(path))
        if not target.is_relative_to(root):
            raise FileError(
                f"'{path}' is a link out of the data folder.",
                where=f"to {target}",
                fix="the folder that contains both, the files (--data 'folder/*.jsonl'), or a copy of the file",
            )


def check_split(split: str) -> str:
    """Returns `split`; raises SpanaxError if it is not in `SPLITS`."""
    if split not in SPLITS:
        raise UnknownNameError(f"unknown split '{split}'.", fix=nearest(split, SPLITS))
    return split
