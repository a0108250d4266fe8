"""Export of a plan as logical axis names and rules, the format of MaxText and Flax."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spanax import Placement, Plan

Split = tuple[str, ...]


@dataclass(frozen=True)
class Rules:
    """Names for the dims of every parameter and batch array, and rules from those names to mesh axes.

    Attributes:
      layout: the plan's layout.
      mesh: sizes by mesh axis, slowest first.
      rules: pairs of a name and its mesh axes, None if it is not sharded; names are unique.
      names: path -> name of each dim, None for unnamed dims.
    """

    layout: str
    mesh: Mapping[str, int]
    rules: tuple[tuple[str, Split | None], ...]
    names: Mapping[str, tuple[str | None, ...]]

    def to_json(self) -> dict[str, Any]:
        """Returns the rules as JSON values."""
        rules = [[name, None if axes is None else list(axes)] for name, axes in self.rules]
        names = {path: list(dims) for path, dims in self.names.items()}
        return {"layout": self.layout, "mesh": dict(self.mesh), "rules": rules, "names": names}

    def __str__(self) -> str:
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        width = max(map(len, self.names), default=0)
        return "\n".join(
            [
                f"# {self.layout} on {mesh}",
                "logical_axis_rules: [",
                *(f"  {json.dumps([name, axes])}," for name, axes in self.rules),
                "]",
                *(f"{path.ljust(width)}  {json.dumps(dims)}" for path, dims in self.names.items()),
            ]
        )


def export_rules(plan: Plan) -> Rules:
    """Returns the logical axis names and rules that define the PartitionSpecs of a plan's parameters and batch.

    A rule applies to all arrays. If a plan shards an axis in two ways, the less frequent sharding has another name,
    such as `embed_whole` in addition to `embed`. Rules cannot express arrays that are stored and computed with
    different shardings, such as the optimizer state of `zero1`.

    Example:
      >>> import jax, optax, spanax
      >>> from flax import nnx
      >>> program = spanax.trace(
      ...     build=lambda rngs: nnx.Linear(16, 32, rngs=rngs),
      ...     optimizer=optax.sgd(0.1),
      ...     batch=jax.ShapeDtypeStruct((8, 16), "float32"),
      ...     loss=lambda model, x: (model(x) ** 2).mean(),
      ... )
      >>> exported = export_rules(spanax.plan(program, spanax.cluster("cpu:8"), layout="fsdp"))
      >>> exported.names["kernel"], dict(exported.rules)[exported.names["kernel"][1]]
      (('features_whole', 'features'), ('fsdp',))
    """
    leaves = [leaf for leaf in (*plan.leaves, *plan.batch) if leaf.kind in ("param", "batch")]
    counts = Counter(pair for leaf in leaves for pair in _dims(leaf))
    name_by_pair = _named(counts)
    names = {leaf.path: tuple(_without_repeats([name_by_pair.get(pair) for pair in _dims(leaf)])) for leaf in leaves}
    rules = tuple((name, axes or None) for (_, axes), name in name_by_pair.items())
    return Rules(plan.layout.name, dict(plan.mesh.axes), rules, names)


def _dims(leaf: Placement) -> list[tuple[str | None, Split]]:
    """Returns the name and mesh axes of each dim of an array."""
    return list(zip(leaf.axes, leaf.spec, strict=True))


def _named(counts: Counter[tuple[str | None, Split]]) -> dict[tuple[str | None, Split], str]:
    """Assigns a name to each pair of an axis and its sharding; unnamed dims that are not sharded have none."""
    name_by_pair: dict[tuple[str | None, Split], str] = {}
    for axis, mesh_axes in sorted(counts, key=lambda pair: -counts[pair]):
        if axis is None and not mesh_axes:
            continue
        name = axis or "dim"
        if name in name_by_pair.values() or axis is None:
            name += "_" + ("_".join(mesh_axes) or "whole")
        while name in name_by_pair.values():
            name += "_"
        name_by_pair[axis, mesh_axes] = name
    return name_by_pair


def _without_repeats(names: list[str | None]) -> list[str | None]:
    """Replaces repeated names by None: Flax allows a name once per array, and a repeated dim is not sharded."""
    return [name if name not in names[:dim] else None for dim, name in enumerate(names)]
