"""The source of a workload, where comments may allow what rules find."""

from pathlib import Path


def source_text(workload: str) -> str:
    """The text of the file that a workload is in; empty for one that has a name instead.

    Example:
      >>> source_text("gpt2")
      ''
    """
    path = Path(workload.partition(":")[0])
    return path.read_text() if path.suffix == ".py" and path.is_file() else ""
