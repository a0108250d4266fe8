"""Reads the source file of a workload, whose comments may waive findings."""

from pathlib import Path


def source_text(workload: str) -> str:
    """Returns the text of the file that defines a workload; empty for a workload that is named.

    Example:
      >>> source_text("gpt2")
      ''
    """
    path = Path(workload.partition(":")[0])
    return path.read_text() if path.suffix == ".py" and path.is_file() else ""
