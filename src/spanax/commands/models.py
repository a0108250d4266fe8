"""`spanax models` and `spanax axes`: lists the named workloads, and the axes of one."""

import math
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from tyro.conf import Positional

from spanax.commands.answer import Answer
from spanax.errors import UnknownNameError, nearest
from spanax.train.flags import SizeFlags, Sizes


@dataclass(frozen=True)
class ModelsCommand:
    """List the named workloads: parameters, and the shapes of a batch.

    Attributes:
      name: list only names that contain this text.
      json: print one JSON object.
    """

    name: Positional[str] = ""
    json: bool = False


def answer(command: ModelsCommand) -> Answer:
    """Returns a row per workload. Models are traced, so nothing is allocated.

    Raises:
      SpanaxError: no name contains the text.
    """
    from spanax.models.workloads import WORKLOADS
    from spanax.show.tables import table_text

    names = [name for name in WORKLOADS if command.name in name]
    if not names:
        raise UnknownNameError(f"no workload's name contains '{command.name}'.", fix=nearest(command.name, WORKLOADS))
    rows = [_row(name) for name in names]
    lines = [(row["name"], f"{row['parameters']:,}", _shapes(row["batch"]), row["data"] or "none") for row in rows]
    return Answer(table_text(("name", "parameters", "batch", "data"), lines), {"models": rows})


def _row(name: str) -> dict[str, Any]:
    import jax
    from flax import nnx

    from spanax.models.workloads import load
    from spanax.trace.batch import abstract_batch

    workload = load(name)
    state = nnx.state(nnx.eval_shape(lambda: workload.build(nnx.Rngs(0))), nnx.Param)
    _, leaves, _ = abstract_batch(workload.batch)
    source = workload.source
    return {
        "name": name,
        "parameters": sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state)),
        "batch": {leaf.path: list(leaf.shape) for leaf in leaves},
        "data": source if source is None or isinstance(source, str) else "synthetic",
    }


def _shapes(batch: dict[str, list[int]]) -> str:
    return ", ".join(f"{name} {' x '.join(map(str, shape))}" for name, shape in batch.items())


@dataclass(frozen=True)
class AxesCommand:
    """Print the named axes of a workload: sizes, maximum numbers of shards, and arrays.

    Attributes:
      workload: a name, or file.py:name.
      json: print one JSON object, with every array.
      traceback: show the full traceback of an error.
    """

    workload: Positional[str]
    sizes: SizeFlags = Sizes()
    json: bool = False
    traceback: bool = False


def axes_answer(command: AxesCommand) -> Answer:
    """Returns the axes of the traced workload."""
    from spanax.models.workloads import load
    from spanax.show.placement import axes_json, axes_text

    began = time.perf_counter()
    program = command.sizes.load(partial(load, command.workload)).trace()
    seconds = time.perf_counter() - began
    return Answer(axes_text(program), {"workload": command.workload, **axes_json(program), "trace_seconds": seconds})
