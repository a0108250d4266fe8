"""Groups equal operations of a traced function, independently of any layout.

Twelve unrolled blocks repeat each operation twelve times, and an optimizer repeats its update per leaf. The cost of
each group is computed once and multiplied by its count.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from spanax.trace.analysis.fusion import FUSED, REDUCTIONS, accesses
from spanax.trace.jaxpr.dim_rules import ELEMENTWISE
from spanax.trace.jaxpr.graph import Body, Graph, Op
from spanax.trace.jaxpr.loops import loop_of
from spanax.trace.jaxpr.provenance import Origin, feeds

if TYPE_CHECKING:
    from spanax.trace.traced import Traced


class Phase(IntEnum):
    """When an operation runs: on the way to the loss, on the way back from it, or once at the end of the step."""

    FORWARD = 0
    BACKWARD = 1
    UPDATE = 2


@dataclass(frozen=True, eq=False, slots=True)
class OpGroup:
    """Operations that any layout treats alike.

    Attributes:
      op: one of them.
      ops: all of them, each with how often it runs.
      runs: how often they run in one step, all together, loops multiplied out.
      phase: when.
      in_layers: inside the loop over stacked layers, which a pipeline can cut.
    """

    op: Op
    runs: int
    phase: Phase
    in_layers: bool
    ops: tuple[tuple[Op, int], ...]


def op_groups(traced: "Traced") -> list[OpGroup]:
    """Every kind of operation of a traced function, in the order of their first appearance.

    Example:
      >>> import jax, optax, spanax
      >>> from flax import nnx
      >>> program = spanax.trace(
      ...     build=lambda rngs: nnx.Linear(16, 32, rngs=rngs),
      ...     optimizer=optax.sgd(0.1),
      ...     batch=jax.ShapeDtypeStruct((8, 16), "float32"),
      ...     loss=lambda model, x: (model(x) ** 2).mean(),
      ... )
      >>> [(kind.op.name, kind.runs, kind.phase.name) for kind in op_groups(program.step)][0]
      ('dot_general', 1, 'FORWARD')
    """
    found: dict[tuple[Any, ...], list[tuple[Op, int]]] = {}
    forward = on_the_way(traced)
    for op, runs, in_layers in _visit(traced, traced.graph.body, 1, False):
        phase = phase_of(traced, op, forward)
        found.setdefault((_signature(traced, op), phase, in_layers), []).append((op, runs))
    return [
        OpGroup(ops[0][0], sum(runs for _, runs in ops), phase, in_layers, tuple(ops))
        for (_, phase, in_layers), ops in found.items()
    ]


@dataclass(frozen=True, eq=False)
class Traffic:
    """What fused kernels access in one step.

    `touched` has a row for each role, phase and place: a value of that role, the phase, whether it is in the loop over
    layers, and how many times one of its kind is read or written. `kernels` counts kernels (phase, in layers).
    """

    touched: list[tuple[int, int, bool, float]]
    kernels: list[list[float]]


def traffic(traced: "Traced") -> Traffic:
    """The memory traffic of a traced function outside of its matmuls, alike values counted together."""
    graph = traced.graph
    forward = on_the_way(traced)
    rows: dict[tuple[Any, ...], list[Any]] = {}
    kernels = [[0.0, 0.0] for _ in Phase]

    def visit(body: Body, runs: int, in_layers: bool) -> None:
        own = phase_of_values(traced, [value for op in body.ops for value in op.outputs], forward)
        found, num_kernels = accesses(graph, body)
        for access in found:
            labels = traced.axes.classes[access.value]
            phase = phase_of_values(traced, [access.value], forward)
            if not in_layers and not traced.batch_labels.intersection(labels):
                phase = Phase.UPDATE  # nothing of the batch is left in it: once a step, however many microbatches
            staged = in_layers or not traced.layer_labels.isdisjoint(labels)
            role = (id(traced.sharding_keys[access.value]), getattr(graph.avals[access.value], "dtype", None))
            row = rows.setdefault((role, phase, staged), [access.value, int(phase), staged, 0.0])
            row[3] += runs * (access.writes + access.reads)
        kernels[own][in_layers] += runs * num_kernels
        for op in body.ops:
            inside = in_layers or is_layers(traced, op)
            for inner in op.bodies:
                visit(inner, runs * trips(op), inside)

    visit(graph.body, 1, False)
    for kind in traced.op_groups:
        if not kind.op.bodies and kind.op.name not in FUSED and kind.op.name not in REDUCTIONS:
            kernels[kind.phase][kind.in_layers] += kind.runs
    return Traffic([tuple(row) for row in rows.values()], kernels)


def on_the_way(traced: "Traced") -> list[bool]:
    """Whether each value is on the way to the loss, by its number."""
    graph = traced.graph
    targets = [False] * len(graph.avals)
    targets[_loss(traced)] = True
    found = feeds(graph, targets)
    return [feeding or target for feeding, target in zip(found, targets, strict=True)]


def phase_of(traced: "Traced", op: Op, forward: list[bool]) -> Phase:
    """When an operation runs."""
    return phase_of_values(traced, (*op.outputs, *op.inputs), forward, num_made=len(op.outputs))


def phase_of_values(traced: "Traced", values: Sequence[int], forward: list[bool], num_made: int | None = None) -> Phase:
    """When values are made; the first `num_made` say whether it is on the way to the loss."""
    if any(forward[value] for value in values[:num_made]):
        return Phase.FORWARD
    origin = 0
    for value in values:
        origin |= traced.axes.origins[value]
    return Phase.UPDATE if origin & Origin.OPTIMIZER else Phase.BACKWARD


def trips(op: Op) -> int:
    """How often the bodies of an operation run; a `while` counts once, for nobody knows."""
    return int(op.params["length"]) if op.name == "scan" else 1


def contraction_dims(op: Op) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int, int], ...]]:
    """How the dims of a matmul or convolution meet: pairs (lhs, rhs) summed over, triples (lhs, rhs, out) passed on.

    In a triple, -1 stands for an operand without that dim. A convolution's window dims are in neither.
    """
    if op.name == "conv_general_dilated":
        return _convolution_dims(op)
    if op.name == "ragged_dot_general":
        (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = op.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        groups = set(op.params["ragged_dot_dimension_numbers"].rhs_group_dimensions)
    else:
        (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = op.params["dimension_numbers"]
        groups = set()
    triples = [(a, b, at) for at, (a, b) in enumerate(zip(lhs_batch, rhs_batch, strict=True))]
    ranks = [len(var.aval.shape) for var in op.eqn.invars[:2]]
    free = [dim for dim in range(ranks[0]) if dim not in (*lhs_sum, *lhs_batch)]
    triples += [(dim, -1, len(triples) + at) for at, dim in enumerate(free)]
    free = [dim for dim in range(ranks[1]) if dim not in {*rhs_sum, *rhs_batch, *groups}]
    triples += [(-1, dim, len(triples) + at) for at, dim in enumerate(free)]
    return tuple(zip(lhs_sum, rhs_sum, strict=True)), tuple(triples)


def _convolution_dims(op: Op) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int, int], ...]]:
    (lhs_n, lhs_c, *_), (rhs_o, rhs_i, *_), (out_n, out_c, *_) = op.params["dimension_numbers"]
    if op.params["feature_group_count"] > 1:  # a group of input channels is seen by a group of output channels only
        return (), ((lhs_n, -1, out_n), (lhs_c, rhs_o, out_c))
    if op.params["batch_group_count"] > 1:
        return ((lhs_c, rhs_i),), ((lhs_n, rhs_o, out_c),)
    return ((lhs_c, rhs_i),), ((lhs_n, -1, out_n), (-1, rhs_o, out_c))


def contraction_flops(graph: Graph, op: Op) -> int:
    """Floating-point operations of a matmul or convolution: two for every product summed.

    Source: each of the output's numbers is a sum of as many products as there are numbers summed over.
    """
    lhs, rhs = (graph.shape(value) for value in op.inputs[:2])
    out = graph.shape(op.outputs[0])
    if op.name == "conv_general_dilated":
        numbers = op.params["dimension_numbers"]
        out_batch, out_channels, *_ = numbers.out_spec
        return 2 * out[out_batch] * out[out_channels] * rhs[numbers.rhs_spec[1]] * _window_products(op, lhs, rhs, out)
    summed, _ = contraction_dims(op)
    if op.name == "ragged_dot_general" and len(out) > len(lhs):
        return 2 * math.prod(lhs) * out[-1]
    return 2 * math.prod(out) * math.prod(lhs[dim] for dim, _ in summed)


def _window_products(op: Op, lhs: Sequence[int], rhs: Sequence[int], out: Sequence[int]) -> int:
    """Pairs of a place in the result and one in the window that meet a number of the input: no padding, and no hole."""
    numbers, params, pairs = op.params["dimension_numbers"], op.params, 1
    for at, dims in enumerate(zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)):
        size, window, places = lhs[dims[0]], rhs[dims[1]], out[dims[2]]
        apart = params["lhs_dilation"][at]
        starts = np.arange(places) * params["window_strides"][at] - params["padding"][at][0]
        meets = starts[:, None] + np.arange(window) * params["rhs_dilation"][at]
        pairs *= int(((meets >= 0) & (meets <= (size - 1) * apart) & (meets % apart == 0)).sum())
    return pairs


def _visit(traced: "Traced", body: Body, runs: int, in_layers: bool) -> Any:
    for op in body.ops:
        yield op, runs, in_layers
        if not op.bodies:
            continue
        for inner in op.bodies:
            yield from _visit(traced, inner, runs * trips(op), in_layers or is_layers(traced, op))


def is_layers(traced: "Traced", op: Op) -> bool:
    """Whether an operation is a loop over stacked layers."""
    if op.name != "scan":
        return False
    loop = loop_of(traced.graph, op)
    scanned = {label for value in (*loop.scanned, *loop.stacked) for label in traced.axes.classes[value][:1]}
    return not traced.layer_labels.isdisjoint(scanned)


def inert_ops(traced: "Traced") -> frozenset[Op]:
    """Elementwise operations whose values, scalars aside, are of one role but for what they were computed from.

    Of that only what decides where a value is stored counts: whether it is of the optimizer, or has seen the batch.
    """
    roles, found = traced.sharding_keys, set()
    of_weights = int(Origin.OPTIMIZER | Origin.BATCH)
    for op in traced.graph.ops():
        if op.name in ELEMENTWISE:
            kinds = {
                (role.labels, role.shape, role.origin & of_weights, role.is_computed, role.whole)
                for role in (roles[value] for value in (*op.inputs, *op.outputs))
                if role.shape
            }
            if len(kinds) <= 1:
                found.add(op)
    return frozenset(found)


def score_keys(traced: "Traced") -> frozenset[tuple[int | None, ...]]:
    """The labels of what grows where activations meet activations: attention scores, whatever they are called.

    A contraction of two activations whose result is larger than both together. A fused attention kernel keeps every
    value of those labels on the chip.
    """
    found = set()
    for kind in traced.op_groups:
        op = kind.op
        if op.name == "dot_general" and all(
            traced.batch_labels.intersection(traced.axes.classes[value]) for value in op.inputs[:2]
        ):
            sizes = [math.prod(traced.graph.shape(value)) for value in (*op.inputs[:2], op.outputs[0])]
            if sizes[2] > sizes[0] + sizes[1]:
                found.add(label_key(traced.axes.classes[op.outputs[0]]))
    return frozenset(found)


def label_key(labels: Sequence[int | None]) -> tuple[int, ...]:
    """Labels in whatever order."""
    return tuple(sorted(label for label in labels if label is not None))


def layer_carry(traced: "Traced") -> tuple[int | None, int]:
    """The largest value carried by the deepest loop over layers on the way to the loss, and that loop's length."""
    best: tuple[int | None, int] = (None, 0)
    for kind in traced.op_groups:
        if is_layers(traced, kind.op) and kind.phase == Phase.FORWARD and trips(kind.op) > best[1]:
            carried = [first for first, _ in traced.graph.wires(kind.op).carried]
            if carried:
                best = (max(carried, key=lambda value: math.prod(traced.graph.shape(value))), trips(kind.op))
    return best


def _signature(traced: "Traced", op: Op) -> tuple[Any, ...]:
    if op.bodies:
        return (id(op),)
    roles, graph = traced.sharding_keys, traced.graph
    params = tuple((key, value) for key, value in op.params.items() if _is_plain(value))
    ins = tuple((id(roles[value]), getattr(graph.avals[value], "dtype", None)) for value in op.inputs)
    outs = tuple((id(roles[value]), getattr(graph.avals[value], "dtype", None)) for value in op.outputs)
    return (op.name, params, ins, outs)


def _is_plain(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return not hasattr(value, "eqns") and not callable(value)


def _loss(traced: "Traced") -> int:
    """The value that the step is about: the result called `loss`, or else the first that has seen batch and weights."""
    outputs = traced.graph.body.outputs
    results = outputs[len(outputs) - traced.num_results :]
    tree = jax.tree.unflatten(traced.result, results)
    if isinstance(tree, Mapping) and isinstance(tree.get("loss"), int):
        return tree["loss"]
    both = Origin.BATCH | Origin.PARAM
    seen = [value for value in results if traced.axes.origins[value] & both == both]
    return (*seen, *results, *outputs)[0]
