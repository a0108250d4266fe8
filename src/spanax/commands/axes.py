"""`spanax axes`: prints the named axes of a workload."""

import time
from dataclasses import dataclass
from functools import partial

from tyro.conf import Positional

from spanax.commands.answer import Answer
from spanax.train.flags import BatchSizeFlags, BatchSizes


@dataclass(frozen=True)
class AxesCommand:
    """Print the named axes of a workload: sizes, maximum numbers of shards, and arrays.

    Attributes:
      workload: a name, or file.py:name.
      json: print one JSON object, with every array.
      traceback: show the full traceback of an error.
    """

    workload: Positional[str]
    sizes: BatchSizeFlags = BatchSizes()
    json: bool = False
    traceback: bool = False


def answer(command: AxesCommand) -> Answer:
    """Returns the axes of the traced workload."""
    from spanax.models.workloads import load
    from spanax.show.axes import axes_json, axes_text

    began = time.perf_counter()
    workload = command.sizes.load(partial(load, command.workload))
    program = workload.trace(learning_rate=workload.learning_rate, num_steps=workload.num_steps)
    seconds = time.perf_counter() - began
    return Answer(axes_text(program), {"workload": command.workload, **axes_json(program), "trace_seconds": seconds})
