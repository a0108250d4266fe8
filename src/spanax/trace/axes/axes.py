"""The named axes of a program. An axis is a class of dims that are sharded together."""

import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from spanax.batch_dims import ExampleDims
from spanax.errors import ConflictError, UnknownNameError, nearest
from spanax.trace.axes.discover import Dims, joined
from spanax.trace.axes.example_dims import contraction_size, example_dims, scanned_dims
from spanax.trace.axes.naming import INNER, STRENGTH, name_classes
from spanax.trace.axes.pieces import Pieces
from spanax.trace.jaxpr.dim_maps.relations import Dim
from spanax.trace.jaxpr.graph import CONTRACTIONS, Graph
from spanax.trace.jaxpr.provenance import Origin, feeds, origins
from spanax.trace.variables import Leaf

RESERVED = ("batch", "seq", "layers")
"""Names that layouts depend on; they cannot be renamed."""


@dataclass(frozen=True)
class Axis:
    """All classes with one name: their sizes, the number of shards that all of them allow, and where they occur."""

    name: str
    sizes: tuple[int, ...]
    ways: int
    num_classes: int
    leaves: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Axes:
    """The result of discovery: the class of every dim of every value, and the names of the classes.

    `uses` are the names by which layouts match the classes that an annotation names differently.
    `unknown` counts primitives without a rule and `opaque` those that cannot be inspected; both leave their dims
    replicated. `other_weights` are inputs that are weights but not parameters. `coverage` is the fraction of matmul and
    convolution FLOPs that can be sharded along the batch. `examples` is the dim with the examples of each array of the
    batch. `wholes` are classes of weights that are a concatenation of pieces. `groups` are the classes that merged dims
    of a class of heads have as a factor after the heads: queries of one key.
    """

    classes: Sequence[tuple[int | None, ...]]
    names: Mapping[int, str]
    uses: Mapping[int, str]
    ways: Mapping[int, int]
    origins: Sequence[int]
    replicated: frozenset[tuple[int, int]]
    other_weights: frozenset[int]
    unknown: Mapping[str, int]
    opaque: Mapping[str, int]
    coverage: float
    examples: ExampleDims = ()
    wholes: Mapping[int, Pieces] = field(default_factory=dict)
    groups: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def of(self, value: int) -> tuple[str | None, ...]:
        """Returns the names of a value's dims; None for a dim without a name or of size 1."""
        return tuple(None if label is None else self.names.get(label) for label in self.classes[value])

    def renamed(self, names: Mapping[str, str]) -> "Axes":
        """Returns the same axes under other names.

        Raises:
          SpanaxError: an axis does not exist, or cannot be renamed.
        """
        known = set(self.names.values())
        for old in names:
            if old in RESERVED:
                raise ConflictError(
                    f"'{old}' cannot be renamed: layouts refer to it by name.",
                    fix=f"rename others; known: {', '.join(sorted(known))}",
                )
            if old not in known:
                raise UnknownNameError(f"the program has no axis '{old}' to rename.", fix=nearest(old, sorted(known)))
        renamed = {label: names.get(name, name) for label, name in self.names.items()}
        uses = {label: use for label, use in self.uses.items() if renamed[label] not in STRENGTH}
        return replace(self, names=renamed, uses=uses)


def discover(
    graph: Graph,
    leaves: Sequence[Leaf],
    batch: Sequence[Leaf],
    grown: Sequence[tuple[int, int]] = (),
    examples: ExampleDims | None = None,
) -> Axes:
    """Returns the axes of a step whose inputs are the leaves of the state, then those of the batch.

    The first outputs are the new values of the leaves, so each is sharded like the leaf it replaces.

    Args:
      graph: the step.
      leaves: the leaves of the state.
      batch: the leaves of the batch.
      grown: dims that are known to scale with the batch.
      examples: the dim with the examples of each array of the batch; by default, as the step uses them.
    """
    looped = scanned_dims(graph)
    dims = joined(graph, looped)
    batch_values = graph.body.inputs[len(leaves) :]
    examples = example_dims(dims, leaves, batch) if examples is None else examples
    outer = [(value, dim) for value, end in zip(batch_values, examples, strict=True) for dim in range(end or 0)]
    if majors := dims.majors({dims.find(*dim) for dim in outer}):
        looped = looped | majors  # examples are along the minor dim of what a reshape merges
        dims = joined(graph, looped)
    with_examples = [(value, dim) for value, dim in zip(batch_values, examples, strict=True) if dim is not None]
    dims = _all_joined(dims, len(leaves), with_examples, grown)
    is_weight = other_weights(graph, leaves)
    pairs = zip(graph.body.inputs, leaves, strict=False)
    leaves = [replace(leaf, kind="param") if value in is_weight else leaf for value, leaf in pairs]
    origin_of_kind = {"param": Origin.PARAM, "optimizer": Origin.OPTIMIZER, "other": Origin.NONE, "batch": Origin.BATCH}
    inputs = (*leaves, *batch)
    # A step count is optimizer state too, but the values that it scales are not.
    seeds = {
        value: origin_of_kind[leaf.kind] if leaf.shape or leaf.kind != "optimizer" else Origin.NONE
        for value, leaf in zip(graph.body.inputs, inputs, strict=True)
    }
    value_origins = origins(graph, seeds)
    names, uses = name_classes(dims, value_origins, leaves, batch, examples)
    weights = [value for value, leaf in zip(graph.body.inputs, leaves, strict=False) if leaf.kind == "param"]
    inner = [
        (value, dim)
        for value in weights
        for dim, label in enumerate(dims.classes(value))
        if label is not None and uses.get(label, names[label]) in INNER
    ]
    inner = [dim for dim in inner if dims.find(*dim) not in dims.labels(batch_values)]
    labels = {dims.find(*dim) for dim in inner}
    if dims.has_parts(labels):
        parted = joined(graph, looped, dims.apart(labels))
        dims = _all_joined(parted, len(leaves), with_examples, grown, inner, weights)
        names, uses = name_classes(dims, value_origins, leaves, batch, examples)
    classes = [dims.classes(value) for value in range(len(graph.avals))]
    return Axes(
        classes=classes,
        names=names,
        uses=uses,
        ways={label: dims.ways(label) for label in {c for labels in classes for c in labels if c is not None}},
        origins=value_origins,
        replicated=frozenset(dims.replicated),
        other_weights=is_weight,
        unknown=dict(dims.unknown),
        opaque=dict(dims.opaque),
        coverage=_coverage(graph, classes, names),
        examples=examples,
        wholes=dims.wholes(),
        groups=dims.groups({label for label, name in names.items() if uses.get(label, name) == "heads"}),
    )


def _all_joined(
    dims: Dims,
    num_leaves: int,
    examples: Sequence[Dim],
    grown: Sequence[Dim],
    inner: Sequence[Dim] = (),
    weights: Sequence[int] = (),
) -> Dims:
    """Returns the classes of a step, joined by what is no operation too; dims `inner` of weights may have pieces."""
    for before, after in zip(dims.graph.body.inputs[:num_leaves], dims.graph.body.outputs, strict=False):
        dims.same(before, after)
    for dim in grown:
        dims.join(*examples[0], *dim, factor=dims.size(*examples[0]))
    dims.join_turns(examples)
    dims.find_pieces({dims.find(*dim) for dim in inner}, dims.labels(weights))
    dims.join_pieces()
    dims.join_padded()
    return dims


def aligned(axes: Axes, inputs: Sequence[int], other: Axes, other_inputs: Sequence[int]) -> Axes:
    """Returns the axes of a function under the class numbers of another one that takes the same inputs.

    Classes that no input has are matched by name; unmatched classes get new numbers.
    """
    mapping = _matched(axes, inputs, other, other_inputs)
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
        wholes={
            mapping[label]: replace(
                whole, main=mapping[whole.main], others=tuple(mapping[other] for other in whole.others)
            )
            for label, whole in axes.wholes.items()
        },
        groups={mapping[label]: tuple(map(mapping.__getitem__, found)) for label, found in axes.groups.items()},
    )


def named_like(axes: Axes, inputs: Sequence[int], other: Axes, other_inputs: Sequence[int]) -> Axes:
    """Returns the axes of a function with the names that the dims of its inputs have in another variant of it."""
    matched = _matched(axes, inputs, other, other_inputs)
    names = {label: other.names[match] for label, match in matched.items() if match in other.names}
    uses = {label: other.uses[match] for label, match in matched.items() if match in other.uses}
    own = {label: use for label, use in axes.uses.items() if label not in matched}
    return replace(axes, names={**axes.names, **names}, uses=own | uses)


def _matched(axes: Axes, inputs: Sequence[int], other: Axes, other_inputs: Sequence[int]) -> dict[int, int]:
    """Returns the class of the same dim of the same input in the other axes, for each class of an input."""
    return {
        source: target
        for value, other_value in zip(inputs, other_inputs, strict=True)
        for source, target in zip(axes.classes[value], other.classes[other_value], strict=True)
        if source is not None and target is not None
    }


def table(axes: Axes, leaves: Iterable[tuple[Leaf, int]]) -> list[Axis]:
    """Returns the axes of the leaves, one row per name, the most frequent first.

    Args:
      axes: the discovered axes.
      leaves: each leaf with the number of its value.
    """
    paths: dict[str, list[str]] = defaultdict(list)
    labels: dict[str, set[int]] = defaultdict(set)
    sizes: dict[str, Counter[int]] = defaultdict(Counter)
    for leaf, value in leaves:
        for dim, label in enumerate(axes.classes[value]):
            name = None if label is None else axes.names.get(label)
            if name is not None and label is not None:
                paths[name].append(f"{leaf.path}[{dim}]")
                labels[name].add(label)
                sizes[name][leaf.shape[dim]] += 1
    rows = [
        Axis(
            name,
            tuple(sorted(sizes[name])),
            math.gcd(*(axes.ways[label] for label in labels[name])),
            len(labels[name]),
            tuple(paths[name]),
        )
        for name in paths
    ]
    return sorted(rows, key=lambda row: (-len(row.leaves), row.name))


def _coverage(graph: Graph, classes: Sequence[tuple[int | None, ...]], names: Mapping[int, str]) -> float:
    total = covered = 0
    for op in graph.ops():
        if op.name in CONTRACTIONS:
            size = contraction_size(graph, op)
            labels = {label for value in (*op.inputs, *op.outputs) for label in classes[value]}
            total += size
            covered += size if any(names.get(label) == "batch" for label in labels if label is not None) else 0
    return covered / total if total else 1.0


def warn_of_unknown(axes: Axes) -> None:
    """Warns about primitives without a sharding rule: their dims are replicated, which is correct and may be slow."""
    if axes.unknown:
        listed = ", ".join(f"'{name}' ({count} times)" for name, count in sorted(axes.unknown.items()))
        warnings.warn(
            f"no rule for the primitives {listed}: their dims stay replicated, which is correct but may be slow; "
            "add rules with spanax.rule",
            stacklevel=4,
        )


def other_weights(graph: Graph, leaves: Sequence[Leaf]) -> frozenset[int]:
    """Returns the inputs in other state that are weights: 2D or larger, and factors of products with activations.

    Example:
      >>> import jax, numpy as np
      >>> from spanax.trace.jaxpr.graph import from_jaxpr
      >>> shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 4), (16, 4), (16, 8))]
      >>> graph = from_jaxpr(jax.make_jaxpr(lambda base, mask, x: x @ (2 * base) + mask)(*shapes))
      >>> base, mask = (Leaf(name, (8, 4), np.dtype("float32"), "other") for name in ("base", "mask"))
      >>> other_weights(graph, [base, mask]) == {graph.body.inputs[0]}
      True
    """
    pairs = list(zip(graph.body.inputs, leaves, strict=False))
    candidates = [value for value, leaf in pairs if leaf.kind == "other" and sum(size > 1 for size in leaf.shape) > 1]
    if not candidates:
        return frozenset()
    of_batch = origins(graph, {value: Origin.BATCH for value in graph.body.inputs[len(leaves) :]})
    targets = [False] * len(graph.avals)
    for op in graph.ops():
        if op.name in CONTRACTIONS and of_batch[op.inputs[0]] != of_batch[op.inputs[1]]:
            for value in op.inputs[:2]:
                targets[value] = not of_batch[value]
    feeding = feeds(graph, targets)
    return frozenset(value for value in candidates if feeding[value] or targets[value])


@dataclass(frozen=True, eq=False)
class Traced:
    """A traced function of (state, batch) with its axes: the train step, or the evaluation."""

    graph: Graph
    axes: Axes
    result: Any
    has_remat: bool = False

    @property
    def num_results(self) -> int:
        """Returns the number of outputs after the new state."""
        return self.result.num_leaves

    @property
    def num_state(self) -> int:
        """Returns the number of outputs that are the new state; the others are results."""
        return len(self.graph.body.outputs) - self.num_results

    @property
    def results(self) -> Any:
        """Returns the values after the new state, in their structure."""
        return jax.tree.unflatten(self.result, self.graph.body.outputs[self.num_state :])
