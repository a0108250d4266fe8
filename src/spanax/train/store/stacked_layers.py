"""Converts between stacked arrays and one array for each layer when a checkpoint uses the other form.

`blocks.0.up.kernel` to `blocks.11.up.kernel`, each of shape (64, 256), correspond to `blocks.up.kernel` of shape
(12, 64, 256), with identical bytes. Optimizer moments and counts have the same names with a prefix.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax


def dtype_and_shape(value: Any) -> str:
    """Returns dtype and shape, such as `float32[8,4]`, which must match between an array and its checkpoint."""
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"


@dataclass(frozen=True)
class Group:
    """A stacked array, the sizes of its layer dims, and the paths of its layers in order."""

    stacked: str
    sizes: tuple[int, ...]
    layers: tuple[str, ...]


def groups(stacked: Mapping[str, str], single: Mapping[str, str]) -> list[Group]:
    """Returns which arrays are stacks of which others, by path, shape and dtype; ambiguous matches are omitted.

    Args:
      stacked: candidates for stacks, path to dtype and shape as `dtype_and_shape` returns them.
      single: candidates for layers, likewise.

    Example:
      >>> groups({"blocks.up": "float32[2,8]"}, {"blocks.0.up": "float32[8]", "blocks.1.up": "float32[8]"})
      [Group(stacked='blocks.up', sizes=(2,), layers=('blocks.0.up', 'blocks.1.up'))]
    """
    candidates: dict[str, dict[tuple[int, ...], dict[tuple[int, ...], str]]] = defaultdict(lambda: defaultdict(dict))
    for path in single:
        parts = path.split(".")
        numbers = [index for index, part in enumerate(parts) if part.isdecimal()]
        for count in range(1, len(numbers) + 1):
            for layer_dims in combinations(numbers, count):
                stacked_path = ".".join(part for index, part in enumerate(parts) if index not in layer_dims)
                if stacked_path in stacked:
                    candidates[stacked_path][layer_dims][tuple(int(parts[index]) for index in layer_dims)] = path
    result = []
    for path, by_layer_dims in candidates.items():
        matches = [group for members in by_layer_dims.values() if (group := _match(path, members, stacked, single))]
        result += matches if len(matches) == 1 else []
    owners: dict[str, int] = defaultdict(int)
    for group in result:
        for layer in group.layers:
            owners[layer] += 1
    return [group for group in result if all(owners[layer] == 1 for layer in group.layers)]


def _match(
    path: str, members: Mapping[tuple[int, ...], str], stacked: Mapping[str, str], single: Mapping[str, str]
) -> Group | None:
    """Returns the group if all layers exist and have the same shape as the stack without its layer dims."""
    sizes = tuple(max(index) + 1 for index in zip(*members, strict=True))
    dtype, _, dims = stacked[path].rpartition("[")
    shape = [int(size) for size in dims.rstrip("]").split(",") if size]
    layer = f"{dtype}[{','.join(map(str, shape[len(sizes) :]))}]"
    is_complete = len(members) == math.prod(sizes) and tuple(shape[: len(sizes)]) == sizes
    if not is_complete or any(single[member] != layer for member in members.values()):
        return None
    return Group(path, sizes, tuple(members[index] for index in sorted(members)))


@dataclass(frozen=True)
class Regrouped:
    """A plan for reading arrays: `reads` are the targets in the form in which they were saved."""

    targets: Mapping[str, jax.ShapeDtypeStruct]
    reads: dict[str, jax.ShapeDtypeStruct]
    to_stack: list[Group]
    to_unstack: list[Group]

    @classmethod
    def of(cls, saved: Mapping[str, str], targets: Mapping[str, jax.ShapeDtypeStruct]) -> Regrouped:
        """Returns the targets in the form in which they were saved: as stacks or as single layers.

        Args:
          saved: path to dtype and shape as `dtype_and_shape` returns them.
          targets: dotted path to shape, dtype and sharding.
        """
        missing = {path: dtype_and_shape(target) for path, target in targets.items() if path not in saved}
        unused = {path: text for path, text in saved.items() if path not in targets}
        to_stack = groups(missing, unused)
        to_unstack = groups(unused, missing)
        regrouped = {group.stacked for group in to_stack} | {path for group in to_unstack for path in group.layers}
        reads = {path: target for path, target in targets.items() if path not in regrouped}
        for group in to_stack:
            reads |= dict.fromkeys(group.layers, _layer_of(targets[group.stacked], len(group.sizes)))
        for group in to_unstack:
            reads[group.stacked] = _stack_of(targets[group.layers[0]], group.sizes)
        return cls(targets, reads, to_stack, to_unstack)

    def matching(self, saved: Mapping[str, str]) -> Regrouped:
        """Returns the reads that the checkpoint has with the same dtype and shape; all groups are among them."""
        reads = {path: target for path, target in self.reads.items() if saved.get(path) == dtype_and_shape(target)}
        return replace(self, reads=reads)

    def finish(self, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns the target arrays, regrouped one group at a time; consumes `arrays` to limit memory."""
        import jax

        for group in self.to_stack:
            target = self.targets[group.stacked]
            stack = _stacked(target.shape, target.sharding)
            arrays[group.stacked] = jax.block_until_ready(stack(*(arrays.pop(path) for path in group.layers)))
        for group in self.to_unstack:
            layers = [self.targets[path] for path in group.layers]
            unstack = _unstacked(layers[0].shape, tuple(layer.sharding for layer in layers))
            layer_arrays = jax.block_until_ready(unstack(arrays.pop(group.stacked)))
            arrays |= dict(zip(group.layers, layer_arrays, strict=True))
        return arrays


def _layer_of(target: Any, num_dims: int) -> Any:
    """Returns the target of one layer of a stack.

    The mesh axes that shard the layer dims shard the first other dim that they divide.
    """
    import jax

    shape = target.shape[num_dims:]
    sharding = target.sharding
    if isinstance(sharding, jax.NamedSharding):
        entries = [_axes(entry) for entry in (*sharding.spec, *[None] * len(target.shape))][: len(target.shape)]
        outer = sum(entries[:num_dims], ())
        spec = entries[num_dims:]
        for dim, size in enumerate(shape):
            if outer and size % math.prod(sharding.mesh.shape[axis] for axis in (*spec[dim], *outer)) == 0:
                spec[dim], outer = (*spec[dim], *outer), ()
        sharding = jax.NamedSharding(sharding.mesh, jax.P(*spec))
    return jax.ShapeDtypeStruct(shape, target.dtype, sharding=sharding)


def _stack_of(target: Any, sizes: tuple[int, ...]) -> Any:
    """Returns the target of the stack of such layers, each sharded like the layer."""
    import jax

    sharding = target.sharding
    if isinstance(sharding, jax.NamedSharding):
        sharding = jax.NamedSharding(sharding.mesh, jax.P(*[None] * len(sizes), *sharding.spec))
    return jax.ShapeDtypeStruct((*sizes, *target.shape), target.dtype, sharding=sharding)


def _axes(entry: Any) -> tuple[str, ...]:
    if isinstance(entry, str):
        return (entry,)
    return () if entry is None else tuple(entry)


@functools.cache
def _stacked(shape: tuple[int, ...], sharding: Any) -> Any:
    import jax

    return jax.jit(lambda *layers: jax.numpy.stack(layers).reshape(shape), out_shardings=sharding)


@functools.cache
def _unstacked(shape: tuple[int, ...], shardings: tuple[Any, ...]) -> Any:
    import jax

    return jax.jit(lambda stack: tuple(stack.reshape(-1, *shape)), out_shardings=shardings)
