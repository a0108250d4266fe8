"""What the sizes of a mesh decide about the sharding of a step: where all decisions are equal, so is the sharding."""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from spanax.plan.sharding.assign import expert_axes, is_staying
from spanax.plan.sharding.attention import attention_kernels, unit_of
from spanax.plan.sharding.lookups import LOOKUPS, lookup_of, strategies
from spanax.plan.sharding.operands import is_kept, kept_specs
from spanax.plan.sharding.resolve import Resolver
from spanax.trace.analysis.labels import label_key
from spanax.trace.jaxpr.dim_maps.relations import Kind

Array = np.ndarray


def size_decisions(resolver: Resolver, sizes: Array) -> Array:
    """Returns the decisions of a layout that depend on the sizes of a mesh: a row for each, a column for each mesh.

    Args:
      resolver: the layout, on a mesh with several devices along the same axes as all others.
      sizes: a row per axis of the resolver's mesh, a column per mesh.
    """
    by_axis = dict(zip(resolver.mesh.names, sizes, strict=True))

    @functools.cache
    def ways(axes: tuple[str, ...]) -> Array:
        return np.asarray(np.prod([by_axis[axis] for axis in axes], axis=0, initial=1) * np.ones(sizes.shape[1], int))

    parts = (_divided, _stored, _moved, _exchanged, _in_groups, _windowed, _looked_up, _kept, _stayed)
    rows = [row for part in parts for row in part(resolver, lambda axes: ways(tuple(sorted(axes))))]
    return np.asarray(rows, int).reshape(-1, sizes.shape[1])


Ways = Callable[[Sequence[str]], Array]
"""Returns the number of shards over mesh axes on every mesh."""


def _divided(resolver: Resolver, ways: Ways) -> Iterator[Array]:
    """Yields whether the mesh axes that may shard a dim divide it, for each class and size and any of these axes."""
    axes_of_class = defaultdict[int, list[str]](list)
    for axis, ranks in resolver.assignment.ranks.items():
        for label in ranks:
            axes_of_class[label].append(axis)
    dims = {
        (label, size)
        for key in resolver.program.step.distinct_keys
        for label, size in zip(key.labels, key.shape, strict=True)
        if label is not None and label in axes_of_class
    }
    pairs = ((size, some) for label, size in sorted(dims) for some in _subsets(axes_of_class[label]))
    for size, some in dict.fromkeys(pairs):
        yield size % ways(some) == 0


def _stored(resolver: Resolver, ways: Ways) -> Iterator[Array]:
    """Yields the dim along which an array is sharded in storage, -1 for none.

    Arrays whose dims differ in order only, or in classes of the same order, have equal decisions, yielded once.
    """
    program = resolver.program
    step = resolver.program.step
    axes = dict.fromkeys(axis for kind in ("param", "gradient", "optimizer") for axis in resolver.layout.stored(kind))
    stored = [axis for axis in axes if resolver.mesh.ways([axis]) > 1]
    known = set[object]()
    if not stored:
        return
    for labels, shape, is_routed in dict.fromkeys((key.labels, key.shape, key.is_routed) for key in step.distinct_keys):
        if label_key(labels) not in program.param_keys:
            continue
        used = resolver.computed(labels, shape, is_routed=is_routed)
        padded = resolver.padded_shape(labels, shape)
        classes = sorted({_order(label) for label in labels})
        dims = [
            (*resolver.reluctance(label), used[dim], padded[dim], classes.index(_order(label)))
            for dim, label in enumerate(labels)
        ]
        if (alike := tuple(sorted(dims))) in known:
            continue
        known.add(alike)
        rows = []
        for dim, (is_scanned, is_looked_up, by, size, _) in enumerate(dims):
            local = size // ways(by)
            place = 4 * is_scanned + 2 * is_looked_up + bool(by)
            # Of equal places the dim with the most elements, as in `Resolver.stored`.
            order = place * 1e15 - local + _order(labels[dim]) * 1e-6 + dim * 1e-9
            rows.append(np.where(local % ways(stored) == 0, order, np.inf))
        yield np.where(np.isinf(np.min(rows, axis=0, initial=np.inf)), -1, np.argmin(rows, axis=0))


def _moved(resolver: Resolver, ways: Ways) -> Iterator[Array]:
    """Yields what decides where weights with pieces are stored: whether axes divide their other dims, and the largest.

    Only their stored axes and the axes that shard the pieces matter.
    """
    step = resolver.program.step
    wholes = step.axes.wholes
    stored = {axis for kind in ("param", "gradient", "optimizer") for axis in resolver.layout.stored(kind)}
    axes = [axis for axis, size in resolver.mesh.axes if size > 1 and axis in {*stored, *resolver.layout.exclusive}]
    keys = ((key.labels, key.shape) for key in step.distinct_keys if not wholes.keys().isdisjoint(key.labels))
    sizes = {size for labels, shape in keys if label_key(labels) in resolver.program.param_keys for size in shape}
    for size in sorted(sizes):
        yield from (size % ways(some) == 0 for some in _subsets(axes))
    for first, second in itertools.combinations(sorted(sizes), 2):
        yield from (first * ways(some) < second for some in _subsets(axes))
        yield from (second * ways(some) < first for some in _subsets(axes))


def _order(label: int | None) -> int:
    """Returns the position of a class among those of equal dims, as in `Resolver.stored`."""
    return -1 if label is None else label


def _exchanged(resolver: Resolver, ways: Ways) -> Iterator[Array]:
    """Yields for each dim of each attention kernel whether any axes of the sequence also divide it."""
    step = resolver.program.step
    known = set[object]()
    for op in attention_kernels(step):
        form = op.params["form"]
        queries = op.inputs[0]
        spec = resolver.used(step.axes.classes[queries], step.graph.shape(queries))
        if form in known:
            continue
        known.add(form)
        unit = unit_of(op.params["kernel"])
        for some in _subsets(spec[form.queries]):
            yield from (size % ways((*spec[dim], *some)) == 0 for dim, size in enumerate(form.sizes[: form.queries]))
            yield from (form.sizes[label] % (unit * ways(some)) == 0 for label in (form.queries, form.keys))


def _in_groups(resolver: Resolver, ways: Ways) -> Iterator[Array]:
    """Yields whether mesh axes divide the number of groups of a convolution."""
    axes = [axis for axis, size in resolver.mesh.axes if size > 1]
    ops = resolver.program.step.first_ops.get("conv_general_dilated", ())
    relations = [next(op.dim_map.of_kind(Kind.GROUPS), None) for op in ops]
    for factor in sorted({relation.factor for relation in relations if relation is not None and relation.factor}):
        yield from (factor % ways(some) == 0 for some in _subsets(axes))


def _windowed(resolver: Resolver, ways: Ways) -> Iterator[Array]:
    """Yields the number of shards of dims under windows: what of a shard is a halo depends on it."""
    spatial = resolver.program.step.spatial_labels
    for axis, labels in resolver.assignment.ranks.items():
        if not spatial.isdisjoint(labels):
            yield ways([axis])


def _looked_up(resolver: Resolver, ways: Ways) -> Iterator[Array]:
    """Yields the strategy of each lookup in a table that moves the fewest bytes."""
    step = resolver.program.step
    constraints = resolver.constraints(resolver.program.step)
    for op in (op for op in step.keys_of if op.name in LOOKUPS):
        lookup = lookup_of(op, constraints, step)
        if lookup is not None:
            moved = [numbers for *_, numbers in strategies(lookup, step, ways)]
            yield np.argmin(np.stack([numbers * np.ones_like(ways(()), float) for numbers in moved]), axis=0)


def _kept(resolver: Resolver, ways: Ways) -> Iterator[Array]:
    """Yields whether the activations of a matmul move instead of its weight."""
    step = resolver.program.step
    constraints = resolver.constraints(step)
    for op in step.first_ops.get("dot_general", ()):
        found = kept_specs(op, constraints)
        if found is not None:
            yield is_kept(resolver, step, op, constraints, found, ways) * np.ones_like(ways(()))


def _stayed(resolver: Resolver, ways: Ways) -> Iterator[Array]:
    """Yields whether experts stay on their devices, and which part of all rows may be theirs."""
    ranks = resolver.assignment.ranks
    step = resolver.program.step
    if axes := expert_axes(resolver.program, ranks):
        yield is_staying(resolver.program, ranks, ways) * np.ones_like(ways(()))
        yield (step.sorted_rows.share(ways(axes)) * 1e6).astype(int)
        sent = [op.is_sent(ways(axes)) for op in step.sorted_rows.ops.values()]
        yield np.any(sent, axis=0) * ways(axes)  # every device sends addresses to all others
        yield from sent


def _subsets(axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yields the subsets of some mesh axes but the empty one."""
    return itertools.chain.from_iterable(itertools.combinations(axes, count) for count in range(1, len(axes) + 1))
