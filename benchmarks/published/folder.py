"""A folder of published measurements: every row is expressed, or skipped with a reason."""

from dataclasses import dataclass
from pathlib import Path

from published.cases import Case, cases
from published.memory import Measured, compiled, is_compiled, stated
from published.rows import Row, Skipped, files, is_runs, read


@dataclass(frozen=True)
class Folder:
    """What the files of a folder state: runs ready to be priced, memory, and why each other row was skipped."""

    cases: list[Case]
    memory: list[Measured]
    skipped: dict[str, str]
    memory_skipped: dict[str, str]


def read_folder(folder: Path) -> Folder:
    """Returns the cases and the memory of a folder; a row that cannot be expressed is skipped with its reason."""
    runs: list[Row] = []
    measured: list[Measured] = []
    skipped: dict[str, str] = {}
    memory_skipped: dict[str, str] = {}
    for file, texts in files(folder):
        for number, text in enumerate(texts):
            id = text.get("id") or f"{file}-{number:04d}"
            if is_compiled(texts):
                try:
                    measured += compiled(text, id)
                except Skipped as reason:
                    memory_skipped[id] = str(reason)
            elif is_runs(texts):
                try:
                    runs.append(read(file, text, number))
                except Skipped as reason:
                    skipped[id] = str(reason)
                if text.get("mem_gib"):
                    try:
                        measured.append(stated(text, file, number))
                    except Skipped as reason:
                        memory_skipped[id] = str(reason)
            else:
                skipped[id] = "a file of another kind"
    expressed, refused = cases(runs)
    return Folder(expressed, measured, skipped | refused, memory_skipped)
