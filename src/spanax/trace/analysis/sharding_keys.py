"""The attributes of a value that determine its sharding, independently of any layout."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax

from spanax.trace.analysis.labels import Key, Labels, label_key
from spanax.trace.analysis.sorted_rows import SortedRows
from spanax.trace.axes.axes import Axes
from spanax.trace.jaxpr.dim_maps.relations import Family
from spanax.trace.jaxpr.graph import LOSS_CHUNKS, Graph, Op
from spanax.trace.jaxpr.provenance import Origin, feeds

MOVEMENT = frozenset({Family.VIEW, Family.REORDER})
"""Operations that only move data: a weight consumed by activations is all-gathered before them, once."""

SPREADING = MOVEMENT | {Family.ELEMENTWISE}
"""Operations whose result is uniform if all operands are uniform."""


@dataclass(frozen=True, slots=True)
class ShardingKey:
    """Values with equal keys have the same sharding under any layout.

    Attributes:
      labels: the class of each dim.
      shape: the size of each dim.
      origin: what it was computed from (`Origin`).
      is_computed: it is an activation, an operand of one at its point of use, or an index: computed, not stored.
      replicated: dims that its operation works along, so that they cannot be sharded freely.
      rows: dims of rows sorted by expert, which each device may sort for itself.
      is_routed: it has a dim of experts, but selects experts instead of being stored or computed by them.
      number: its index among the distinct keys of a traced function, for caches.
    """

    labels: tuple[int | None, ...]
    shape: tuple[int, ...]
    origin: int
    is_computed: bool
    replicated: frozenset[int]
    rows: frozenset[int]
    is_routed: bool
    number: int = field(compare=False)


def sharding_keys(
    graph: Graph,
    axes: Axes,
    routed: Collection[Labels],
    once: Collection[int],
    rows: SortedRows,
    uniform: Collection[int],
) -> list[ShardingKey]:
    """Returns the sharding key of every value, by index; equal keys are one object.

    Args:
      graph: the program.
      axes: the classes of its dims.
      routed: the classes of values that select experts.
      once: values in loops that are gathered once, before the loop, or reduced once, after it.
      rows: the rows of ragged matmuls.
      uniform: values whose elements are all equal.
    """
    unsharded_dims: dict[int, set[int]] = {}
    for value, dim in (axes.replicated | rows.ragged) - rows.dims:
        unsharded_dims.setdefault(value, set()).add(dim)
    sorted_dims: dict[int, set[int]] = {}
    for value, dim in rows.dims:
        sorted_dims.setdefault(value, set()).add(dim)
    is_activation = [
        any(axes.names.get(label) == "batch" for label in labels if label is not None) for labels in axes.classes
    ]
    feeding = feeds(graph, is_activation)
    is_moved = _moved(graph)
    in_loops = _in_chunks(graph).union(once)
    keys: list[ShardingKey] = []
    known: dict[ShardingKey, ShardingKey] = {}
    for value, labels in enumerate(axes.classes):
        origin = axes.origins[value]
        # Operands of activations are computed: a statistic of the batch, or a transposed weight.
        is_operand = feeding[value] and (value in is_moved or bool(origin & Origin.BATCH))
        is_integer = jax.numpy.issubdtype(graph.avals[value].dtype, jax.numpy.integer)
        is_index = is_integer and not origin and value not in uniform
        key = ShardingKey(
            labels,
            graph.shape(value),
            int(origin),
            is_activation[value] or is_operand or is_index or value in in_loops,
            frozenset(unsharded_dims.get(value, ())),
            frozenset(sorted_dims.get(value, ())),
            labels in routed,
            len(known),
        )
        keys.append(known.setdefault(key, key))
    return keys


def joined_keys(
    keys: Sequence[ShardingKey],
    colors: Mapping[int, int],
    weights: Collection[Key],
    marked: Sequence[Collection[Labels]],
) -> list[ShardingKey]:
    """Returns the sharding key of every value, with one number for keys that differ only in classes of one color.

    Args:
      keys: the sharding key of every value, by index.
      colors: the color of each class.
      weights: the sorted classes of parameters, which are stored; no key of one is joined with any other.
      marked: classes of values that are priced in another way; likewise.
    """
    numbers: dict[object, int] = {}
    known: dict[int, ShardingKey] = {}
    for key in keys:
        if key.number not in known:
            labels = key.labels
            is_marked = label_key(labels) in weights, *(labels in some for some in marked)
            others = key.shape, key.origin, key.is_computed, key.replicated, key.rows, key.is_routed
            color = (in_colors(labels, colors), others, is_marked)
            known[key.number] = replace(key, number=numbers.setdefault(color, len(numbers)))
    return [known[key.number] for key in keys]


def in_colors(labels: Labels, colors: Mapping[int, object]) -> tuple[object, ...]:
    """Returns the colors of the dims of a value, and the order of its classes, which decides between equal dims."""
    order = sorted({label for label in labels if label is not None})
    return tuple(None if label is None else (colors[label], order.index(label)) for label in labels)


def uniform_values(graph: Graph) -> frozenset[int]:
    """Returns the values whose elements are all equal: each device computes its shard without communication.

    A loop's constants are uniform inside of it too: JAX computes the zeros of a scatter once, before the loop.
    """
    values = set[int]()
    for op in graph.ops():
        if op.bodies:
            wires = graph.wires(op)
            carried = {first for first, _ in wires.carried}
            values.update(inner for outer, inner in wires.inputs if outer in values and inner not in carried)
            continue
        is_spread = op.family in SPREADING and bool(op.inputs)
        if is_spread and all(value in values or not graph.shape(value) for value in op.inputs):
            values.update(op.outputs)
    return frozenset(values)


def _in_chunks(graph: Graph) -> set[int]:
    """Returns the values and operands of a scan over chunks of tokens, where weights are already gathered, once."""
    values = set[int]()
    for op in graph.ops():
        if op.name == "scan" and LOSS_CHUNKS in str(op.eqn.source_info.name_stack):
            values.update(op.inputs)
            for body in op.bodies:
                values.update(body.inputs, *(inner.outputs for inner in body.ops))
    return values


def _moved(graph: Graph) -> set[int]:
    """Returns the results before which weights are gathered: moved or widened values, and elementwise uses of these."""
    moved = set[int]()
    widened = set[int]()
    for op in graph.ops():
        is_move = only_moves(op)
        if is_move:
            moved.update(op.outputs)
        if is_move and not widened.isdisjoint(op.inputs):
            widened.update(op.outputs)
        same_shape = [value for value in op.inputs if op.outputs and graph.shape(value) == graph.shape(op.outputs[0])]
        if _widens(graph, op) or (op.is_elementwise and not widened.isdisjoint(same_shape)):
            widened.update(op.outputs)
    return moved | widened


def only_moves(op: Op) -> bool:
    """Returns whether an operation only moves data: a weight consumed by activations is all-gathered before, once."""
    return op.family in MOVEMENT or op.name == "copy"


def _widens(graph: Graph, op: Op) -> bool:
    """Returns whether a cast or a repeat of integers increases the bytes of a value, as with weights in few bits."""
    if op.name != "convert_element_type" and op.name != "broadcast_in_dim":
        return False
    before, after = (graph.avals[value] for value in (op.inputs[0], op.outputs[0]))
    if op.name == "broadcast_in_dim":
        return bool(before.size < after.size and before.ndim and jax.numpy.issubdtype(before.dtype, jax.numpy.integer))
    return bool(before.dtype.itemsize < after.dtype.itemsize)
