"""Names of the values of a step: parameters by path, others by their axes and the line that computes them."""

import re
from collections.abc import Iterable

from spanax.plan.plan import path_pattern
from spanax.plan.spmd.sharded_program import ShardedProgram

COLUMN = re.compile(r"(:\d+):\d+\b")


def value_names(step: ShardedProgram, values: Iterable[int]) -> dict[int, str]:
    """Returns the names of some values."""
    of_param = {
        value: path_pattern(leaf.path)
        for index, leaf in enumerate(step.resolver.program.leaves)
        if leaf.kind == "param"
        for value in step.traced.leaf_aliases(index)
    }
    return {value: of_param.get(value) or _at_line(step, value) for value in values}


def axes_text(step: ShardedProgram, value: int) -> str:
    """Returns the axes of a value, such as `batch,seq,embed`."""
    return ",".join(name or "?" for name in step.traced.axes.of(value)) or "scalar"


def _at_line(step: ShardedProgram, value: int) -> str:
    producer = step.traced.graph.producers.get(value)
    line = "" if producer is None else COLUMN.sub(r"\1", producer.where.rpartition("/")[2])
    return f"{axes_text(step, value)} at {line}" if line else axes_text(step, value)
