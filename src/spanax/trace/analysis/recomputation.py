"""Which values of a layer to save for its backward pass, and what it then computes again.

Of the values that a backward pass reads, each is saved, or computed again from those that are, and so on down to the
inputs of the layer. At a price per byte, the choice with the least sum of recomputed seconds and paid bytes is a
minimum cut of the graph of operations. The price at which the saved bytes just fit is found by bisection.

Source: Jain et al., "Checkmate", arXiv 1910.02653, for the problem; the partitioner of `torch.compile` for the cut.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from spanax.trace.analysis.op_groups import ancestors_of_loss, trips
from spanax.trace.axes.axes import Traced
from spanax.trace.jaxpr.graph import CANDIDATE, NAME, Body, Op
from spanax.trace.jaxpr.remat_policies import INPUT, ROWS

STEPS = 32
"""The number of prices of a byte that are tried."""

RESOLUTION = 1 << 28
"""The sum of all capacities of a cut, which are integers."""

UNLIMITED = (1 << 31) - 1


@dataclass(frozen=True, eq=False)
class Recomputation:
    """The operations whose results a backward pass reads, directly or to compute others again.

    Attributes:
      ops: the operations of the forward pass, each with its number of runs.
      needed: the values that the backward pass reads.
      names: the values that can be saved, with their names.
      inputs: those that a layer takes from the one before it and saves in any case, with their names.
    """

    ops: dict[Op, int]
    needed: frozenset[int]
    names: dict[int, str]
    inputs: dict[int, str]
    producers: dict[int, Op] = field(repr=False)

    def repeated(self, saved: Collection[int]) -> set[Op]:
        """Returns the operations that run again if these values are saved."""
        repeated = set[Op]()
        stack = [*self.needed]
        while stack:
            value = stack.pop()
            op = self.producers.get(value)
            if op is not None and op not in repeated and value not in saved:
                repeated.add(op)
                stack += op.inputs
        return repeated


def recomputation(traced: Traced) -> Recomputation:
    """Returns the operations that the backward pass of a step may repeat; it was traced under `NAMED`."""
    graph = traced.graph
    forward = ancestors_of_loss(traced)
    ops = dict[Op, int]()
    needed = set[int]()
    names = dict[int, str]()
    for body, runs, op in _layers(graph.body, 1, None):
        names |= {each.outputs[0]: name for each in body.ops if (name := _candidate(each))}
        if op is None:
            # Of a loss without layers. What the backward pass computes first is no ancestor of the loss.
            inside = [each for each in body.ops if any(forward[value] for value in each.outputs)]
            others = (each for each in body.ops if not any(forward[value] for value in each.outputs))
            needed.update(value for each in others for value in each.inputs)
        else:
            inside = [*body.ops]
            readers = {inner: graph.readers[outer] for outer, inner in graph.wires(op).outputs}
            needed.update(value for value, each in readers.items() if any(reader.bodies for reader in each))
        ops |= dict.fromkeys(inside, runs)
    producers = {value: op for op in ops for value in op.outputs}
    inputs = {value: name for value, name in names.items() if value in producers and name.startswith(INPUT)}
    names = {value: name for value, name in names.items() if value in producers and value not in inputs}
    carried = {last for op in ops if op.bodies for _, last in graph.wires(op).carried}
    read = needed.intersection(producers) - carried
    return Recomputation(ops, frozenset(read.difference(inputs)), names, inputs, producers)


def _layers(body: Body, runs: int, op: Op | None) -> list[tuple[Body, int, Op | None]]:
    """Returns the innermost bodies that name values, each with its number of runs and the operation that runs it.

    What is the same in every iteration of a loop is computed, and named, outside of it.
    """
    inner = [layer for each in body.ops for inner in each.bodies for layer in _layers(inner, runs * trips(each), each)]
    return inner or [(body, runs, op)] * any(_candidate(each) for each in body.ops)


def _candidate(op: Op) -> str:
    name = str(op.params["name"]) if op.name == NAME else ""
    return name.removeprefix(CANDIDATE).removesuffix(ROWS) if name.startswith(CANDIDATE) else ""


def values_around(
    choices: Recomputation,
    seconds: Mapping[Op, float],
    num_bytes: Mapping[int, float],
    limit: float,
    least: float,
    most: float | None = None,
) -> tuple[frozenset[int], frozenset[int]]:
    """Returns the best values to save at the lowest price of a byte at which they fit, and at a little lower one.

    Some layers with the first and the others with the second repeat the least of all choices of the same total bytes.

    Args:
      choices: the operations and values.
      seconds: of all runs of an operation.
      num_bytes: of every value that has a name, over all runs.
      limit: the bytes that may be saved.
      least: the lowest price of a byte: the seconds that it takes to write and read one.
      most: the highest price, at which values need not fit: the seconds that it takes to copy one to the host and back.
    """
    fitting = frozenset[int]() if most is None else _cut(choices, seconds, num_bytes, most)
    larger = _cut(choices, seconds, num_bytes, least)
    low = least
    high = most or max(2 * least, sum(seconds.values()) / min(num_bytes.values(), default=1.0))
    for _ in range(STEPS):
        price = (low + high) / 2
        chosen = _cut(choices, seconds, num_bytes, price)
        if sum(num_bytes[value] for value in chosen) <= limit:
            fitting = chosen
            high = price
        else:
            larger = chosen
            low = price
    return fitting, larger


def _cut(
    choices: Recomputation, seconds: Mapping[Op, float], num_bytes: Mapping[int, float], price: float
) -> frozenset[int]:
    """Returns the values to save at a price of a byte."""
    index = {op: number for number, op in enumerate(choices.ops)}
    source = len(index)
    sink = source + 1
    total = sum(seconds.values()) + price * sum(num_bytes.values())
    scale = RESOLUTION / total if total else 0.0
    edges = dict[tuple[int, int], int]()
    for op, number in index.items():
        edges[number, sink] = round(scale * seconds.get(op, 0.0))
        size = num_bytes.get(op.outputs[0]) if op.outputs else None
        paid = UNLIMITED if size is None else round(scale * price * size)
        for value in op.inputs:
            if value in choices.producers:
                edges[number, index[choices.producers[value]]] = paid
    edges |= {(source, index[choices.producers[value]]): UNLIMITED for value in choices.needed}
    rows, columns = np.asarray([*edges]).T
    capacities = csr_array((np.asarray([*edges.values()], np.int32), (rows, columns)), (sink + 1, sink + 1))
    flow = maximum_flow(capacities, source, sink).flow
    left = csr_array(capacities - flow)
    left.eliminate_zeros()
    needed = set(breadth_first_order(left, source, return_predecessors=False).tolist())
    return frozenset(
        value
        for value in num_bytes
        if index[op := choices.producers[value]] in needed and _source(choices, index, op) not in needed
    )


def _source(choices: Recomputation, index: Mapping[Op, int], op: Op) -> int | None:
    """Returns the number of the operation that computes what an operation names."""
    producer = choices.producers.get(op.inputs[0])
    return None if producer is None else index[producer]
