"""Groups equal operations of a traced function, independently of any layout.

Twelve unrolled blocks repeat each operation twelve times, and an optimizer repeats its update per leaf. The cost of
each group is computed once and multiplied by its count.

Where both operands of a sum of gradients are partial sums over devices, a compiler may add first and reduce once.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from spanax.trace.analysis.fusion import ALIASES, FUSED, accesses
from spanax.trace.analysis.labels import Key, label_key
from spanax.trace.analysis.sharding_keys import ShardingKey
from spanax.trace.axes.axes import Axes, Traced
from spanax.trace.jaxpr.dim_maps.relations import Equation
from spanax.trace.jaxpr.dim_maps.windows import num_products
from spanax.trace.jaxpr.graph import RAGGED, Body, Graph, Op
from spanax.trace.jaxpr.loops import loop_of
from spanax.trace.jaxpr.provenance import Origin, feeds


class Phase(IntEnum):
    """The part of a step in which an operation runs: forward pass, backward pass, or optimizer update."""

    FORWARD = 0
    BACKWARD = 1
    UPDATE = 2


@dataclass(frozen=True, eq=False, slots=True)
class OpGroup:
    """Operations that have the same cost under any layout.

    Attributes:
      op: the first operation of the group.
      ops: all operations, each with its number of runs per step.
      runs: total number of runs per step, with loop lengths multiplied.
      phase: when they run.
      in_layers: inside the loop over stacked layers, which a pipeline can partition.
    """

    op: Op
    runs: int
    phase: Phase
    in_layers: bool
    ops: tuple[tuple[Op, int], ...]


def op_groups(
    traced: Traced, keys: Sequence[ShardingKey], layers: Collection[int | None], *, is_joined: bool = False
) -> list[OpGroup]:
    """Returns the groups of equal operations of a traced function, in order of first appearance.

    If `is_joined`, values with different classes have equal keys: operations are equal if they relate them equally.
    """
    groups: dict[tuple[Any, ...], list[tuple[Op, int]]] = {}
    forward = ancestors_of_loss(traced)
    for op, runs, in_layers in _visit(traced, layers, traced.graph.body, 1, False):
        phase = phase_of_values(traced.axes, (*op.outputs, *op.inputs), forward, num_results=len(op.outputs))
        related = _related(traced.axes, op) if is_joined else ()
        groups.setdefault(((_signature(traced.graph, keys, op), related), phase, in_layers), []).append((op, runs))
    return [
        OpGroup(ops[0][0], sum(runs for _, runs in ops), phase, in_layers, tuple(ops))
        for (_, phase, in_layers), ops in groups.items()
    ]


@dataclass(frozen=True, eq=False)
class Traffic:
    """The memory accesses of fused kernels in one step.

    `touched` has a row per sharding key, dtype, phase and position: a value with that key, the phase, whether it is
    inside the loop over layers, and the number of reads and writes. `kernels` counts kernels by (phase, in layers).
    """

    touched: list[tuple[int, int, bool, float]]
    kernels: list[list[float]]


def traffic(
    traced: Traced,
    keys: Sequence[ShardingKey],
    groups: Iterable[OpGroup],
    batch: frozenset[int | None],
    layers: frozenset[int | None],
) -> Traffic:
    """Returns the memory traffic of a traced function outside its matmuls, grouped by sharding key and dtype."""
    graph = traced.graph
    axes = traced.axes
    forward = ancestors_of_loss(traced)
    rows: dict[tuple[Any, ...], list[Any]] = {}
    kernels = [[0.0, 0.0] for _ in Phase]

    def visit(body: Body, runs: int, in_layers: bool) -> None:
        body_phase = phase_of_values(axes, [value for op in body.ops for value in op.outputs], forward)
        body_accesses, num_kernels = accesses(graph, body)
        for access in body_accesses:
            labels = axes.classes[access.value]
            phase = phase_of_values(axes, [access.value], forward)
            if not in_layers and not batch.intersection(labels):
                phase = Phase.UPDATE  # independent of the batch: once per step for any number of microbatches
            is_layer = in_layers or not layers.isdisjoint(labels)
            key = (keys[access.value].number, getattr(graph.avals[access.value], "dtype", None))
            row = rows.setdefault((key, phase, is_layer), [access.value, int(phase), is_layer, 0.0])
            row[3] += runs * (access.writes + access.reads)
        kernels[body_phase][in_layers] += runs * num_kernels
        for op in body.ops:
            is_inner_layer = in_layers or is_layers(traced, layers, op)
            for inner in op.bodies:
                visit(inner, runs * trips(op), is_inner_layer)

    visit(graph.body, 1, False)
    for group in groups:
        if not group.op.bodies and group.op.family not in FUSED:
            kernels[group.phase][group.in_layers] += group.runs
    return Traffic([tuple(row) for row in rows.values()], kernels)


def ancestors_of_loss(traced: Traced) -> list[bool]:
    """Returns, for every value by index, whether it is the loss or one of its ancestors."""
    graph = traced.graph
    targets = [False] * len(graph.avals)
    targets[_loss(traced)] = True
    is_feeding = feeds(graph, targets)
    return [feeding or target for feeding, target in zip(is_feeding, targets, strict=True)]


def phase_of_values(axes: Axes, values: Sequence[int], forward: list[bool], num_results: int | None = None) -> Phase:
    """Returns the phase in which values are computed; the first `num_results` determine if it is the forward pass."""
    if any(forward[value] for value in values[:num_results]):
        return Phase.FORWARD
    origin = 0
    for value in values:
        origin |= axes.origins[value]
    return Phase.UPDATE if origin & Origin.OPTIMIZER else Phase.BACKWARD


def trips(op: Op) -> int:
    """Returns how often the bodies of an operation run; a `while` counts once, since its length is unknown."""
    return int(op.params["length"]) if op.name == "scan" else 1


def contraction_flops(graph: Graph, op: Op) -> int:
    """Returns the FLOPs that a matmul or convolution requires: two per product.

    Every row of a ragged matmul is multiplied by the matrix of its own group only.

    Source: each element of the result is a sum of one product per element of the contracted dims.
    """
    lhs, rhs = (graph.shape(value) for value in op.inputs[:2])
    out = graph.shape(op.outputs[0])
    if op.name == "conv_general_dilated":
        numbers = op.params["dimension_numbers"]
        out_batch, out_channels, *_ = numbers.out_spec
        return 2 * out[out_batch] * out[out_channels] * rhs[numbers.rhs_spec[1]] * num_products(Equation(op.eqn))
    summed, passed = op.dim_map.contraction
    if op.name == RAGGED:
        free = math.prod(size for dim, size in enumerate(rhs) if dim in op.dim_map.free_dims[1])
        return 2 * math.prod(lhs) * free
    return 2 * math.prod(out) * math.prod(lhs[dim] for dim, _ in summed)


def executed_flops(graph: Graph, op: Op) -> int:
    """Returns the FLOPs that XLA executes for a matmul or convolution: a ragged matmul is one masked matmul per group.

    Source: JAX 0.10 and 0.12 lower it so for CPUs, and libtpu 0.0.52 states the FLOPs of all groups for v5e and v6e
    (`spanax check --level 3`); openxla/xla xla/service/ragged_dot_rewriter.cc (`RaggedDotRewriter`) does for GPUs.
    """
    return contraction_flops(graph, op) * num_groups(graph, op)


def num_groups(graph: Graph, op: Op) -> int:
    """Returns the number of groups of a ragged matmul; 1 for any other operation."""
    return graph.shape(op.inputs[2])[-1] if op.name == RAGGED else 1


def _visit(
    traced: Traced, layers: Collection[int | None], body: Body, runs: int, in_layers: bool
) -> Iterator[tuple[Op, int, bool]]:
    for op in body.ops:
        yield op, runs, in_layers
        for inner in op.bodies:
            yield from _visit(traced, layers, inner, runs * trips(op), in_layers or is_layers(traced, layers, op))


def is_layers(traced: Traced, layers: Collection[int | None], op: Op) -> bool:
    """Returns whether an operation is a scan over stacked layers."""
    return op.name == "scan" and any(label in layers for label in _iterated(traced, op))


def _iterated(traced: Traced, op: Op) -> Iterator[int]:
    """Yields the classes of the dims that a scan iterates along."""
    loop = loop_of(traced.graph, op)
    labels = (label for value in (*loop.scanned, *loop.stacked) for label in traced.axes.classes[value][:1])
    return (label for label in labels if label is not None)


def inert_ops(graph: Graph, keys: Sequence[ShardingKey]) -> frozenset[Op]:
    """Returns elementwise operations whose operands and results, except scalars, have one sharding key up to origin.

    Of the origin only the bits that determine where a value is stored count: optimizer and batch.
    """
    ops = set()
    storage_origin = int(Origin.OPTIMIZER | Origin.BATCH)
    for op in graph.ops():
        if op.is_elementwise:
            distinct = {
                (key.labels, key.shape, key.origin & storage_origin, key.is_computed, key.replicated)
                for key in (keys[value] for value in (*op.inputs, *op.outputs))
                if key.shape
            }
            if len(distinct) <= 1:
                ops.add(op)
    return frozenset(ops)


def score_keys(traced: Traced, groups: Iterable[OpGroup], batch: frozenset[int | None]) -> frozenset[Key]:
    """Returns the labels of attention scores, independently of their names.

    Scores are the result of a contraction of two activations that is larger than both together. A fused attention
    kernel keeps every value with those labels on the chip.
    """
    keys = set()
    for op in (group.op for group in groups):
        if op.name == "dot_general" and all(batch.intersection(traced.axes.classes[value]) for value in op.inputs[:2]):
            sizes = [math.prod(traced.graph.shape(value)) for value in (*op.inputs[:2], op.outputs[0])]
            if sizes[2] > sizes[0] + sizes[1]:
                keys.add(label_key(traced.axes.classes[op.outputs[0]]))
    return frozenset(keys)


def layer_carry(traced: Traced, groups: Iterable[OpGroup], layers: Collection[int | None]) -> tuple[int | None, int]:
    """Returns the largest carry of the longest scan over layers in the forward pass, and the number of layers.

    A partial remat policy partitions the layers into two scans; their dims are limited by the number of all layers.
    """
    largest = None
    longest = 0
    num_layers = 0
    for group in groups:
        if is_layers(traced, layers, group.op) and group.phase == Phase.FORWARD and trips(group.op) > longest:
            carries = [operand for operand, _ in traced.graph.wires(group.op).carried]
            if carries:
                largest = max(carries, key=lambda value: math.prod(traced.graph.shape(value)))
                longest = trips(group.op)
                limits = (traced.axes.ways[label] for label in _iterated(traced, group.op) if label in layers)
                num_layers = max(longest, *limits)
    return largest, num_layers


def _signature(graph: Graph, keys: Sequence[ShardingKey], op: Op) -> tuple[Any, ...]:
    if op.bodies:
        return (op,)
    params = tuple((key, value) for key, value in op.params.items() if _is_plain(value))
    ins = tuple((keys[value].number, getattr(graph.avals[value], "dtype", None)) for value in op.inputs)
    outs = tuple((keys[value].number, getattr(graph.avals[value], "dtype", None)) for value in op.outputs)
    return (op.name, params, ins, outs)


def _related(axes: Axes, op: Op) -> tuple[int, ...]:
    """Returns which dims of an operation's values have one class."""
    order: dict[int | None, int] = {}
    labels = (label for value in (*op.inputs, *op.outputs) for label in axes.classes[value])
    return tuple(order.setdefault(label, len(order)) for label in labels)


def _is_plain(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return not hasattr(value, "eqns") and not callable(value)


def _loss(traced: Traced) -> int:
    """Returns the result named `loss`, or else the first result that depends on batch and parameters."""
    tree = traced.results
    if isinstance(tree, Mapping) and isinstance(tree.get("loss"), int):
        return int(tree["loss"])
    outputs = traced.graph.body.outputs
    results = outputs[traced.num_state :]
    both = Origin.BATCH | Origin.PARAM
    candidates = [value for value in results if traced.axes.origins[value] & both == both]
    return (*candidates, *results, *outputs)[0]


ADDITIONS = frozenset({"add", "add_any"})
PASSING = (ALIASES - {"broadcast_in_dim", "expand_dims"}) | {"convert_element_type"}
"""Operations that do not change the elements of a sum, except by rounding."""


@dataclass(frozen=True, eq=False)
class GradientSum:
    """A sum of results that have no other consumer.

    Attributes:
      sums: the sum in postfix order: the group of each operand, and None for an addition of two preceding operands.
      occurrences: for each occurrence of the sum, its operands in this order, and the number of runs.
    """

    sums: tuple[OpGroup | None, ...]
    occurrences: tuple[tuple[tuple[int, ...], int], ...]


def gradient_sums(graph: Graph, bodies: Iterable[Body], op_groups: Iterable[OpGroup]) -> list[GradientSum]:
    """Returns the sums of results that have no other consumer, grouped by the op groups of their operands."""
    groups = {op: (group, runs) for group in op_groups for op, runs in group.ops}
    occurrences: dict[tuple[OpGroup | None, ...], list[tuple[tuple[int, ...], int]]] = defaultdict(list)
    for body in bodies:
        for sums in _sums(graph, body):
            leaves = [op for op in sums if op is not None]
            key = tuple(None if op is None else groups[op][0] for op in sums)
            occurrences[key].append((tuple(op.outputs[0] for op in leaves), groups[leaves[0]][1]))
    return [GradientSum(sums, tuple(values)) for sums, values in occurrences.items()]


def _sums(graph: Graph, body: Body) -> Iterator[list[Op | None]]:
    """Yields the sums of a body that are not part of a larger sum."""
    outputs = Counter(body.outputs)
    added: dict[Op, tuple[Op, Op]] = {}
    nested = set[Op]()
    for op in body.ops:
        if op.name in ADDITIONS:
            left, right = (_source(graph, value, outputs) for value in op.inputs)
            if left and right and all(operand.name not in ADDITIONS or operand in added for operand in (left, right)):
                added[op] = left, right
                nested.update((left, right))
    yield from (_flat(op, added) for op in added if op not in nested)


def _source(graph: Graph, value: int, outputs: Mapping[int, int]) -> Op | None:
    """Returns the producer of a value that is read once, through views and casts."""
    while (op := graph.producers.get(value)) is not None and len(graph.readers[value]) + outputs[value] == 1:
        if op.name not in PASSING:
            return op if len(op.outputs) == 1 and not op.bodies else None
        value = op.inputs[0]
    return None


def _flat(root: Op, added: Mapping[Op, tuple[Op, Op]]) -> list[Op | None]:
    """Returns a sum in postfix order, without recursion: a sum over all parameters is as deep as their number."""
    postfix = list[Op | None]()
    stack = [root]
    while stack:
        op = stack.pop()
        postfix.append(None if op in added else op)
        stack += added.get(op, ())
    return postfix[::-1]
