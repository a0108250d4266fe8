"""The attributes of a value that determine its sharding, independently of any layout."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spanax.trace.analysis.moe_routing import Labels
from spanax.trace.jaxpr.dim_rules import ELEMENTWISE
from spanax.trace.jaxpr.provenance import Origin, feeds
from spanax.trace.rewrites.chunked_loss.chunked import CHUNKS

if TYPE_CHECKING:
    from spanax.trace.axes.axes import Axes
    from spanax.trace.jaxpr.graph import Graph, Op

MOVEMENT = frozenset({"reshape", "transpose", "squeeze", "broadcast_in_dim", "rev", "copy"})
"""Operations that only put numbers elsewhere: on the way to activations, a weight is gathered before them, once."""


@dataclass(frozen=True, slots=True)
class ShardingKey:
    """Values of one role are placed alike under any layout.

    Attributes:
      labels: the class of each dim.
      shape: its size.
      origin: what it was computed from (`Origin`).
      is_computed: it is an activation, or goes into one where it is: not kept, but computed with.
      whole: dims along which the operation that makes it works, so that it is not free to split.
      is_routed: it has a dim of experts, and is nothing that experts keep or compute: it says which are chosen.
    """

    labels: tuple[int | None, ...]
    shape: tuple[int, ...]
    origin: int
    is_computed: bool
    whole: frozenset[int]
    is_routed: bool


def sharding_keys(graph: "Graph", axes: "Axes", routed: Collection[Labels]) -> list[ShardingKey]:
    """The role of every value, by its number; equal roles are one object."""
    whole: dict[int, set[int]] = {}
    for value, dim in axes.kept_whole:
        whole.setdefault(value, set()).add(dim)
    is_activation = [
        any(axes.names.get(label) == "batch" for label in labels if label is not None) for labels in axes.classes
    ]
    feeding = feeds(graph, is_activation)
    moved, at_once = _moved(graph), _in_chunks(graph)
    found: list[ShardingKey] = []
    known: dict[ShardingKey, ShardingKey] = {}
    for value, labels in enumerate(axes.classes):
        origin = axes.origins[value]
        # What goes into activations is computed: a statistic of the batch, or a weight turned into its place.
        goes_in = feeding[value] and (value in moved or bool(origin & Origin.BATCH))
        role = ShardingKey(
            labels,
            graph.shape(value),
            int(origin),
            is_activation[value] or goes_in or value in at_once,
            frozenset(whole.get(value, ())),
            labels in routed,
        )
        found.append(known.setdefault(role, role))
    return found


def _in_chunks(graph: "Graph") -> set[int]:
    """What is in a loop over chunks of tokens, and goes in: weights lie there as they are used, gathered once."""
    found = set[int]()
    for op in graph.ops():
        if op.name == "scan" and CHUNKS in str(op.eqn.source_info.name_stack):
            found.update(op.inputs)
            for body in op.bodies:
                found.update(body.inputs, *(inner.outputs for inner in body.ops))
    return found


def _moved(graph: "Graph") -> set[int]:
    """What weights are gathered before: numbers put elsewhere, or made wider; and what is computed of those alone."""
    moved, gathered = set[int](), set[int]()
    for op in graph.ops():
        if op.name in MOVEMENT:
            moved.update(op.outputs)
        alike = [value for value in op.inputs if op.outputs and graph.shape(value) == graph.shape(op.outputs[0])]
        if _widens(graph, op) or (op.name in ELEMENTWISE and not gathered.isdisjoint(alike)):
            gathered.update(op.outputs)
    return moved | gathered


def _widens(graph: "Graph", op: "Op") -> bool:
    """Whether a change of dtype makes more bytes of a value, as where weights are kept in eight bits."""
    if op.name != "convert_element_type":
        return False
    before, after = (graph.avals[value].dtype.itemsize for value in (op.inputs[0], op.outputs[0]))
    return bool(before < after)
