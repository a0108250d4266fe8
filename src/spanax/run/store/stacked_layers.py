"""Layers on disk: arrays saved one a block and wanted stacked, or the other way.

`blocks.0.up.kernel` to `blocks.11.up.kernel`, each (64, 256), are `blocks.up.kernel` (12, 64, 256): the same bits in
the same order. Optimizer moments and counts carry the same names after their own.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax


def told(value: Any) -> str:
    """`float32[8,4]`: what an array must share with the one it was saved from."""
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"


@dataclass(frozen=True)
class Group:
    """A stacked array, the sizes of its dims of layers, and the paths of its layers in order."""

    stacked: str
    sizes: tuple[int, ...]
    layers: tuple[str, ...]


def groups(stacked: Mapping[str, str], single: Mapping[str, str]) -> list[Group]:
    """Which arrays are stacks of which others, by path, shape and dtype; one that could be two ways is none.

    Args:
      stacked: path to dtype and shape, as `told`; those that may be stacks.
      single: the same of those that may be layers.

    Example:
      >>> groups({"blocks.up": "float32[2,8]"}, {"blocks.0.up": "float32[8]", "blocks.1.up": "float32[8]"})
      [Group(stacked='blocks.up', sizes=(2,), layers=('blocks.0.up', 'blocks.1.up'))]
    """
    found: dict[str, dict[tuple[int, ...], dict[tuple[int, ...], str]]] = defaultdict(lambda: defaultdict(dict))
    for path in single:
        parts = path.split(".")
        numbers = [at for at, part in enumerate(parts) if part.isdigit()]
        for count in range(1, len(numbers) + 1):
            for taken in combinations(numbers, count):
                rest = ".".join(part for at, part in enumerate(parts) if at not in taken)
                if rest in stacked:
                    found[rest][taken][tuple(int(parts[at]) for at in taken)] = path
    result = []
    for path, ways in found.items():
        fitting = [group for members in ways.values() if (group := _fitting(path, members, stacked, single))]
        result += fitting if len(fitting) == 1 else []
    owners: dict[str, int] = defaultdict(int)
    for group in result:
        for layer in group.layers:
            owners[layer] += 1
    return [group for group in result if all(owners[layer] == 1 for layer in group.layers)]


def _fitting(
    path: str, members: Mapping[tuple[int, ...], str], stacked: Mapping[str, str], single: Mapping[str, str]
) -> Group | None:
    """The group, if the layers are all there, and alike, and the stack has their shape behind their numbers."""
    sizes = tuple(max(index) + 1 for index in zip(*members, strict=True))
    dtype, _, dims = stacked[path].rpartition("[")
    shape = [int(size) for size in dims.rstrip("]").split(",") if size]
    layer = f"{dtype}[{','.join(map(str, shape[len(sizes) :]))}]"
    is_whole = len(members) == math.prod(sizes) and tuple(shape[: len(sizes)]) == sizes
    if not is_whole or any(single[member] != layer for member in members.values()):
        return None
    return Group(path, sizes, tuple(members[index] for index in sorted(members)))


@dataclass(frozen=True)
class Regrouped:
    """What to read for what is wanted: `reads` are the targets as they were saved."""

    targets: Mapping[str, jax.ShapeDtypeStruct]
    reads: dict[str, jax.ShapeDtypeStruct]
    to_stack: list[Group]
    to_take_apart: list[Group]

    @classmethod
    def of(cls, saved: Mapping[str, str], targets: Mapping[str, jax.ShapeDtypeStruct]) -> Regrouped:
        """The targets, those that were saved stacked or single otherwise as they were saved.

        Args:
          saved: path to dtype and shape, as `told`.
          targets: dotted path to shape, dtype and sharding.
        """
        wanted = {path: told(target) for path, target in targets.items() if path not in saved}
        unwanted = {path: text for path, text in saved.items() if path not in targets}
        to_stack, to_take_apart = groups(wanted, unwanted), groups(unwanted, wanted)
        made = {group.stacked for group in to_stack} | {path for group in to_take_apart for path in group.layers}
        reads = {path: target for path, target in targets.items() if path not in made}
        for group in to_stack:
            reads |= dict.fromkeys(group.layers, _layer_of(targets[group.stacked], len(group.sizes)))
        for group in to_take_apart:
            reads[group.stacked] = _stack_of(targets[group.layers[0]], group.sizes)
        return cls(targets, reads, to_stack, to_take_apart)

    def finish(self, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The arrays that are wanted, from those that were read, one group after the other; takes `arrays` apart."""
        import jax

        for group in self.to_stack:
            target = self.targets[group.stacked]
            stack = _stacked(target.shape, target.sharding)
            arrays[group.stacked] = jax.block_until_ready(stack(*(arrays.pop(path) for path in group.layers)))
        for group in self.to_take_apart:
            layers = [self.targets[path] for path in group.layers]
            split = _taken_apart(layers[0].shape, tuple(layer.sharding for layer in layers))
            found = jax.block_until_ready(split(arrays.pop(group.stacked)))
            arrays |= dict(zip(group.layers, found, strict=True))
        return arrays


def _layer_of(target: Any, num_dims: int) -> Any:
    """One layer of a stack; what splits the dims of layers splits the first other dim that it divides."""
    import jax

    shape, sharding = target.shape[num_dims:], target.sharding
    if isinstance(sharding, jax.NamedSharding):
        entries = [_axes(entry) for entry in (*sharding.spec, *[None] * len(target.shape))][: len(target.shape)]
        outer, spec = sum(entries[:num_dims], ()), entries[num_dims:]
        for at, size in enumerate(shape):
            if outer and size % math.prod(sharding.mesh.shape[axis] for axis in (*spec[at], *outer)) == 0:
                spec[at], outer = (*spec[at], *outer), ()
        sharding = jax.NamedSharding(sharding.mesh, jax.P(*spec))
    return jax.ShapeDtypeStruct(shape, target.dtype, sharding=sharding)


def _stack_of(target: Any, sizes: tuple[int, ...]) -> Any:
    """The stack of such layers, each split as the layer is."""
    import jax

    sharding = target.sharding
    if isinstance(sharding, jax.NamedSharding):
        sharding = jax.NamedSharding(sharding.mesh, jax.P(*[None] * len(sizes), *sharding.spec))
    return jax.ShapeDtypeStruct((*sizes, *target.shape), target.dtype, sharding=sharding)


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


@functools.cache
def _stacked(shape: tuple[int, ...], sharding: Any) -> Any:
    import jax

    return jax.jit(lambda *layers: jax.numpy.stack(layers).reshape(shape), out_shardings=sharding)


@functools.cache
def _taken_apart(shape: tuple[int, ...], shardings: tuple[Any, ...]) -> Any:
    import jax

    return jax.jit(lambda stack: tuple(stack.reshape(-1, *shape)), out_shardings=shardings)
