"""Ranks that do not train: `rank.py` in the place of python, and what became of it."""

import sys
from pathlib import Path

RANK = Path(__file__).with_name("rank.py")


def interpreter(folder: Path, mode: str) -> str:
    """A python that runs `rank.py` wherever a rank would train."""
    file = folder / "python"
    file.write_text(f'#!/bin/sh\n[ "$3" = train ] && set -- {RANK} {mode} "$@"\nexec {sys.executable} "$@"\n')
    file.chmod(0o755)
    return str(file)


def attempts(folder: Path) -> list[str]:
    """Every start of a rank: the attempt, its number and whether it was to resume."""
    file = folder / "attempts.txt"
    return sorted(file.read_text().splitlines()) if file.exists() else []
