"""Reads samples.jsonl: what the model of a run generated while it was trained."""

from collections import deque
from dataclasses import dataclass
from pathlib import Path

from spanax.entries.folder import Folder
from spanax.entries.names import SAMPLES
from spanax.schema import Count, SchemaError, parsed

MAX_SAMPLES = 1000
"""The number of samples, the last ones, that are read."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The text that the model generated after a prompt, at a step."""

    step: Count
    prompt: str
    text: str


def read_samples(folder: Path) -> tuple[list[Sample], int]:
    """Returns the last samples of a run in the order in which they were written, and the number of damaged lines.

    Raises:
      EntryError: samples.jsonl is not a regular file.
    """
    samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
    num_damaged = 0
    for record in Folder.of(folder).lines(SAMPLES):
        try:
            samples.append(parsed(Sample, record, is_open=True, is_strict=False))
        except SchemaError:
            num_damaged += 1
    return list(samples), num_damaged
