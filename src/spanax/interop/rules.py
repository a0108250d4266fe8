"""Rules: a plan as logical axis names and rules, the way MaxText and Flax say where arrays lie."""

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
      rules: name and mesh axes, None where it is not split; no name is there twice.
      names: for every path a name by dim, None where a dim has none.
    """

    layout: str
    mesh: Mapping[str, int]
    rules: tuple[tuple[str, Split | None], ...]
    names: Mapping[str, tuple[str | None, ...]]

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        rules = [[name, None if axes is None else list(axes)] for name, axes in self.rules]
        names = {path: list(dims) for path, dims in self.names.items()}
        return {"layout": self.layout, "mesh": dict(self.mesh), "rules": rules, "names": names}

    def __str__(self) -> str:
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        width = max(map(len, self.names), default=0)
        return "\n".join([
            f"# {self.layout} on {mesh}",
            "logical_axis_rules: [",
            *(f"  {json.dumps([name, axes])}," for name, axes in self.rules),
            "]",
            *(f"{path.ljust(width)}  {json.dumps(dims)}" for path, dims in self.names.items()),
        ])  # fmt: skip


def export_rules(plan: Plan) -> Rules:
    """The logical axis names and rules that give a plan's PartitionSpecs, of its parameters and its batch.

    A rule is one for all arrays. Where a plan splits an axis of one name in two ways, the rarer way gets a name of its
    own: `embed_whole` beside `embed`. What is stored otherwise than it is computed in (the optimizer of `zero1`) is
    more than such rules can say.

    Example:
      >>> import jax, optax, spanax
      >>> from flax import nnx
      >>> program = spanax.trace(
      ...     build=lambda rngs: nnx.Linear(16, 32, rngs=rngs),
      ...     optimizer=optax.sgd(0.1),
      ...     batch=jax.ShapeDtypeStruct((8, 16), "float32"),
      ...     loss=lambda model, x: (model(x) ** 2).mean(),
      ... )
      >>> found = export_rules(spanax.plan(program, spanax.cluster("cpu:8"), layout="fsdp"))
      >>> found.names["kernel"], dict(found.rules)[found.names["kernel"][1]]
      (('features_whole', 'features'), ('fsdp',))
    """
    leaves = [leaf for leaf in (*plan.leaves, *plan.batch) if leaf.kind in ("param", "batch")]
    counts = Counter(pair for leaf in leaves for pair in _dims(leaf))
    called = _called(counts)
    names = {leaf.path: tuple(_once([called.get(pair) for pair in _dims(leaf)])) for leaf in leaves}
    rules = tuple((name, axes or None) for (_, axes), name in called.items())
    return Rules(plan.layout.name, dict(plan.mesh.axes), rules, names)


def _dims(leaf: Placement) -> list[tuple[str | None, Split]]:
    """Name and mesh axes of every dim of an array."""
    return list(zip(leaf.axes, leaf.spec, strict=True))


def _called(counts: Counter[tuple[str | None, Split]]) -> dict[tuple[str | None, Split], str]:
    """What every pair of an axis and a way to split it is called; an unnamed dim that is whole needs no name."""
    names_by_split: dict[tuple[str | None, Split], str] = {}
    for axis, by in sorted(counts, key=lambda pair: -counts[pair]):
        if axis is None and not by:
            continue
        name = axis or "dim"
        if name in names_by_split.values() or axis is None:
            name += "_" + ("_".join(by) or "whole")
        while name in names_by_split.values():
            name += "_"
        names_by_split[axis, by] = name
    return names_by_split


def _once(names: list[str | None]) -> list[str | None]:
    """Without those that repeat: Flax takes a name once an array, and only a dim that is whole can repeat."""
    return [name if name not in names[:at] else None for at, name in enumerate(names)]
