"""The named axes of a program. An axis is a class of dims that are sharded together."""

import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spanax.errors import SpanaxError, nearest
from spanax.trace.axes.discover import Dims
from spanax.trace.axes.frozen import frozen
from spanax.trace.axes.naming import STRENGTH, name_classes, with_examples
from spanax.trace.axes.scanned_dims import scanned_dims
from spanax.trace.jaxpr.dim_rules import apply
from spanax.trace.jaxpr.graph import CONTRACTIONS, Graph
from spanax.trace.jaxpr.provenance import Origin, origins
from spanax.trace.variables import Leaf

MEANT = ("batch", "seq", "layers")
"""Names that say what may be done with an axis, and not only what it is called."""


@dataclass(frozen=True)
class Axis:
    """All classes of one name: the sizes they have, into how many parts each can be split, where they occur."""

    name: str
    sizes: tuple[int, ...]
    ways: int
    num_classes: int
    leaves: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Axes:
    """What discovery found: the class of every dim of every value, and the names of the classes.

    `uses` are the names by which layouts know the classes that have other names, from an annotation.
    `unknown` counts primitives without a rule and `opaque` those that cannot be looked into; both leave their
    dims unsplit. `frozen` are inputs that are weights, though no parameters. `coverage` is the share of matmul and
    convolution FLOPs that are split along with the batch.
    """

    classes: Sequence[tuple[int | None, ...]]
    names: Mapping[int, str]
    uses: Mapping[int, str]
    ways: Mapping[int, int]
    origins: Sequence[int]
    kept_whole: frozenset[tuple[int, int]]
    frozen: frozenset[int]
    unknown: Mapping[str, int]
    opaque: Mapping[str, int]
    coverage: float

    def of(self, value: int) -> tuple[str | None, ...]:
        """The names of a value's dims; None where a dim has no name or is of size 1."""
        return tuple(None if label is None else self.names.get(label) for label in self.classes[value])

    def renamed(self, names: Mapping[str, str]) -> "Axes":
        """The same axes under other names.

        Raises:
          SpanaxError: there is no axis of that name.
        """
        known = set(self.names.values())
        for old in names:
            if old in MEANT:
                raise SpanaxError(
                    f"'{old}' cannot be renamed: layouts go by it.",
                    fix=f"rename others; known: {', '.join(sorted(known))}",
                )
            if old not in known:
                raise SpanaxError(f"there is no axis '{old}' to rename.", fix=nearest(old, sorted(known)))
        renamed = {label: names.get(name, name) for label, name in self.names.items()}
        uses = {label: use for label, use in self.uses.items() if renamed[label] not in STRENGTH}
        return replace(self, names=renamed, uses=uses)


def discover(
    graph: Graph, leaves: Sequence[Leaf], batch: Sequence[Leaf], grown: Sequence[tuple[int, int]] = ()
) -> Axes:
    """Find the axes of a step whose inputs are the state's leaves and then the batch's.

    The first outputs are the new values of the leaves, so each is split like the leaf it replaces. The dims `grown` are
    known to grow with the batch.
    """
    dims = Dims(graph, scanned_dims(graph))
    for op in graph.ops():
        apply(op, dims)
    for before, after in zip(graph.body.inputs[: len(leaves)], graph.body.outputs, strict=False):
        dims.same(before, after)
    examples = with_examples(graph.body.inputs[len(leaves) :], batch)
    for value, dim in grown:
        dims.join(examples[0], 0, value, dim, factor=dims.size(examples[0], 0))
    dims.join_turns(examples)
    dims.join_pieces()
    is_frozen = frozen(graph, leaves)
    pairs = zip(graph.body.inputs, leaves, strict=False)
    leaves = [replace(leaf, kind="param") if value in is_frozen else leaf for value, leaf in pairs]
    kinds = {"param": Origin.PARAM, "optimizer": Origin.OPTIMIZER, "other": Origin.NONE, "batch": Origin.BATCH}
    everything = (*leaves, *batch)
    # A step count is optimizer state too, but it is no reason to call everything it scales the optimizer's.
    seeds = {
        value: kinds[leaf.kind] if leaf.shape or leaf.kind != "optimizer" else Origin.NONE
        for value, leaf in zip(graph.body.inputs, everything, strict=True)
    }
    found = origins(graph, seeds)
    names, uses = name_classes(dims, found, leaves, batch)
    classes = [dims.classes(value) for value in range(len(graph.avals))]
    return Axes(
        classes=classes,
        names=names,
        uses=uses,
        ways={label: dims.ways(label) for label in {c for labels in classes for c in labels if c is not None}},
        origins=found,
        kept_whole=frozenset(dims.kept_whole),
        frozen=is_frozen,
        unknown=dict(dims.unknown),
        opaque=dict(dims.opaque),
        coverage=_coverage(graph, classes, names),
    )


def aligned(axes: Axes, inputs: Sequence[int], other: Axes, other_inputs: Sequence[int]) -> Axes:
    """The axes of a second function under the class numbers of a first one that takes the same inputs.

    Classes that no input has go by their name; those that neither knows get numbers of their own.
    """
    mapping = {
        mine: theirs
        for value, other_value in zip(inputs, other_inputs, strict=True)
        for mine, theirs in zip(axes.classes[value], other.classes[other_value], strict=True)
        if mine is not None and theirs is not None
    }
    by_name = {name: label for label, name in sorted(other.names.items(), reverse=True)}
    first_free = max(other.ways, default=0) + 1
    for label in axes.ways:
        if label not in mapping:
            mapping[label] = by_name.get(axes.names.get(label, ""), first_free + label)
    return replace(
        axes,
        classes=[tuple(None if label is None else mapping[label] for label in labels) for labels in axes.classes],
        names={mapping[label]: name for label, name in axes.names.items()} | dict(other.names),
        uses={mapping[label]: use for label, use in axes.uses.items()} | dict(other.uses),
        ways={mapping[label]: ways for label, ways in axes.ways.items()},
    )


def table(axes: Axes, leaves: Iterable[tuple[Leaf, int]]) -> list[Axis]:
    """The axes that leaves have, one row a name, the most used first.

    Args:
      axes: what was discovered.
      leaves: each leaf with the number of its value.
    """
    where: dict[str, list[str]] = defaultdict(list)
    labels: dict[str, set[int]] = defaultdict(set)
    sizes: dict[str, Counter[int]] = defaultdict(Counter)
    for leaf, value in leaves:
        for dim, label in enumerate(axes.classes[value]):
            name = None if label is None else axes.names.get(label)
            if name is not None and label is not None:
                where[name].append(f"{leaf.path}[{dim}]")
                labels[name].add(label)
                sizes[name][leaf.shape[dim]] += 1
    rows = [
        Axis(
            name,
            tuple(sorted(sizes[name])),
            math.gcd(*(axes.ways[label] for label in labels[name])),
            len(labels[name]),
            tuple(where[name]),
        )
        for name in where
    ]
    return sorted(rows, key=lambda row: (-len(row.leaves), row.name))


def _coverage(graph: Graph, classes: Sequence[tuple[int | None, ...]], names: Mapping[int, str]) -> float:
    total = covered = 0
    for op in graph.ops():
        if op.name in CONTRACTIONS:
            size = _contraction_size(graph, op.inputs, op.outputs)
            labels = {label for value in (*op.inputs, *op.outputs) for label in classes[value]}
            total += size
            covered += size if any(names.get(label) == "batch" for label in labels if label is not None) else 0
    return covered / total if total else 1.0


def _contraction_size(graph: Graph, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    shapes = [graph.shape(value) for value in (*inputs[:2], *outputs)]
    # The geometric mean of operand and result sizes has the units of multiply-adds, whatever is contracted.
    return round(math.prod(math.prod(shape) for shape in shapes) ** 0.5)


def warn_of_unknown(axes: Axes) -> None:
    """Warns of primitives without a sharding rule: their dims are replicated, which is correct and may be slow."""
    if axes.unknown:
        listed = ", ".join(f"'{name}' ({count} times)" for name, count in sorted(axes.unknown.items()))
        warnings.warn(
            f"no rule for the primitives {listed}: their dims stay unsplit, which is right and may be slow; "
            "give them one with spanax.rule",
            stacklevel=4,
        )
