"""The logical axes of hand-written models, and which mesh axes they mean under each preset.

As MaxText, T5X and the Flax guides have it: the model names the dims of its activations and of its parameters, and a
table says what of the mesh splits a name. A preset is one table, so one model serves them all.

    batch     examples                    stored   the dim by which ZeRO-3 and FSDP keep a parameter split
    rows      examples inside an expert   split    heads, mlp and vocab: what Megatron splits
    seq       positions between layers    queries  positions inside attention, the MLP and the head
    experts   whole experts
"""

import dataclasses
import re
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Tree = Any
Names = tuple[Any, ...]
Rules = list[tuple[str, Names]]

NAMES = ("batch", "rows", "seq", "queries", "stored", "split", "experts")


@dataclasses.dataclass(frozen=True)
class Preset:
    """A mesh, and the mesh axes that each name means; a name that is not here splits nothing."""

    sizes: dict[str, int]
    means: dict[str, tuple[str, ...]]

    def ways(self, name: str) -> int:
        """How many parts a dim of this name is split into."""
        product = 1
        for axis in self.means.get(name, ()):
            product *= self.sizes[axis]
        return product

    def spec(self, *names: Any) -> P:
        """The spec of dims by their names, each a name, several or None; a mesh axis splits the first that wants it."""
        taken: set[str] = set()
        dims = []
        for name in names:
            several = () if name is None else (name,) if isinstance(name, str) else name
            assert set(several) <= set(NAMES), several
            axes = [axis for one in several for axis in self.means.get(one, ()) if axis not in taken]
            taken.update(axes)
            dims.append(tuple(axes) or None)
        return P(*dims)


def preset(sizes: dict[str, int], **means: str) -> Preset:
    return Preset(sizes, {name: tuple(axes.split()) for name, axes in means.items()})


PRESETS = {  # a name before a slash is that of a layout
    "data": preset({"data": 8}, batch="data", rows="data"),
    "fsdp": preset({"fsdp": 8}, batch="fsdp", rows="fsdp", stored="fsdp"),
    "hsdp": preset({"data": 2, "fsdp": 4}, batch="data fsdp", rows="data fsdp", stored="fsdp"),
    "tensor": preset({"model": 8}, split="model"),
    "tensor+seq": preset({"model": 8}, split="model", seq="model"),
    "context": preset({"data": 4, "context": 2}, batch="data", rows="data", seq="context", queries="context"),
    "expert": preset({"data": 4, "expert": 2}, batch="data expert", rows="data", experts="expert"),
    "expert/8": preset({"data": 1, "expert": 8}, batch="data expert", rows="data", experts="expert"),
    "data+tensor": preset({"data": 4, "model": 2}, batch="data", rows="data", split="model"),
    "fsdp+tensor": preset({"fsdp": 4, "model": 2}, batch="fsdp", rows="fsdp", stored="fsdp", split="model"),
    "fsdp+tensor+seq": preset(
        {"fsdp": 4, "model": 2}, batch="fsdp", rows="fsdp", stored="fsdp", split="model", seq="model"
    ),
}

DENSE = ("data", "fsdp", "hsdp", "tensor", "data+tensor", "fsdp+tensor")
SEQUENCES = (*DENSE, "tensor+seq", "fsdp+tensor+seq", "context")
EXPERTS = (*DENSE, "expert", "expert/8")
"""Presets that a model has the dims for."""


def several(name: Any) -> tuple[str, ...]:
    """A dim's names, of which there may be none."""
    return () if name is None else (name,) if isinstance(name, str) else name


def path_text(path: tuple) -> str:
    """A path in a tree, as the rules match it."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def spec_for(name: str, rules: Rules) -> Names:
    """The dims of the first rule that the path `name` matches; every leaf must have one."""
    for pattern, names in rules:
        if re.fullmatch(pattern, name):
            return names
    raise KeyError(f"no rule for {name}")


class Constrain:
    """Pins values to a mesh as a preset says; without one, does nothing."""

    def __init__(self, mesh: Mesh | AbstractMesh | None, rules: Preset):
        self.mesh, self.rules = mesh, rules

    def __call__(self, x: jax.Array, *names: Any) -> jax.Array:
        if self.mesh is None:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, self.rules.spec(*names)))

    def top_k(self, x: jax.Array, k: int) -> list[jax.Array]:
        """XLA gathers the whole operand of a top-k, whatever its other dims are split over: run it by hand."""
        if self.mesh is None or self.rules.ways("batch") == 1:
            return jax.lax.top_k(x, k)
        split = self.rules.spec("batch")
        return jax.shard_map(lambda x: jax.lax.top_k(x, k), mesh=self.mesh, in_specs=split, out_specs=split)(x)

    def look_up(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        """Rows of a table. Where it is stored by columns, what moves is the result, and not the table's gradient."""
        if self.rules.ways("stored") == 1:
            return table[tokens]
        return self(table[self(tokens)], None, None, "stored")

    def gathered(self, params: Tree, rules: Rules, stacked: str = "") -> Tree:
        """Parameters where they are used: whole over what stores them, still split over the rest.

        Inside a loop over the stack of layers under the path `stacked`, they come without its dimension.
        """

        def gather(path: tuple, leaf: jax.Array) -> jax.Array:
            names = spec_for(stacked + path_text(path), rules)[1 if stacked else 0 :]
            return self(leaf, *(tuple(one for one in several(name) if one != "stored") for name in names))

        return jax.tree.map_with_path(gather, params)
