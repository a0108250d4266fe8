"""Lint rules on single arrays: large replicated arrays, dims that do not divide, and annotations without effect."""

import math
from collections.abc import Iterator, Sequence

from spanax.check.lint.subject import LintSubject, Message
from spanax.hardware.mesh import CANONICAL_AXES
from spanax.plan.presets import grouped
from spanax.plan.reason import Code, Reason
from spanax.plan.sharding.placement import Placement
from spanax.plan.space import num_groups
from spanax.trace.axes.naming import STRENGTH

LARGE_SHARE = 0.01
"""An array is reported from this share of the bytes per device of its kind."""

MAX_PADDING = 0.125
"""The largest relative growth of a dim that is suggested as a fix."""

UNEVEN = 0.05
"""Arrays with the same indivisible dim are reported from this share of the bytes per device of their kind."""


def large_replicated_array(subject: LintSubject) -> Iterator[Message]:
    """A large array is replicated on every device, although the layout shards arrays of its kind."""
    for leaf in subject.plan.leaves:
        axes = subject.plan.layout.stored(leaf.kind)
        is_replicated = leaf.local_shape == leaf.shape and subject.num_shards(axes) > 1
        if is_replicated and leaf.local_bytes >= _large(subject, leaf.kind):
            yield Message(
                leaf.path,
                f"`{leaf.path}` {list(leaf.shape)} is replicated on all {subject.plan.mesh.size} devices: "
                f"{leaf.reason or 'no mesh axis shards it'}.",
                _padding(leaf, subject.num_shards(axes), "+".join(axes)),
                leaf.local_bytes,
            )


def indivisible_dim(subject: LintSubject) -> Iterator[Message]:
    """A dim of a large array is not divisible by the mesh axis that should shard it."""
    by_reason: dict[tuple[str, Reason], list[Placement]] = {}
    for leaf, reason in _uneven(subject):
        if not _is_sharded_elsewhere(subject, leaf, reason.name):
            by_reason.setdefault((leaf.kind, reason), []).append(leaf)
    seen = set[Reason]()
    for (kind, reason), leaves in by_reason.items():
        if reason not in seen and sum(leaf.local_bytes for leaf in leaves) >= UNEVEN * _kind_bytes(subject, kind):
            seen.add(reason)
            leaf = max(leaves, key=lambda placement: placement.local_bytes)
            if fix := _divisible(reason, _grouped_mesh(subject, reason)):
                yield Message(leaf.path, f"`{leaf.path}` {list(leaf.shape)}: {reason}.", fix, leaf.local_bytes)


def _uneven(subject: LintSubject) -> Iterator[tuple[Placement, Reason]]:
    """Yields every placement with each of its dims that is not sharded because its size does not divide."""
    program = subject.program
    rows = zip(program.leaves, program.step.graph.body.inputs, subject.plan.leaves, strict=False)
    for leaf, value, placement in rows:
        for reason in subject.resolver.not_sharded(leaf, program.step.axes.classes[value]):
            if reason.code is Code.NOT_DIVISIBLE:
                yield placement, reason


def _grouped_mesh(subject: LintSubject, reason: Reason) -> list[str]:
    """Returns a mesh with `groups`, for heads with fewer keys and values than devices along `model`."""
    mesh = subject.plan.mesh
    groups = num_groups(subject.program, mesh.ways(["model"])) if reason.num_shards == mesh.ways(["model"]) else 0
    return [f"mesh {grouped(mesh, groups)}"] if groups and reason.name == "heads" else []


def _divisible(reason: Reason, meshes: Sequence[str]) -> str:
    """Returns the nearest size and number of shards that divide, and meshes on which they do.

    Empty if all are far off, as for 3 color channels.
    """
    size = reason.size
    num_shards = reason.num_shards
    padded = -(-size // num_shards) * num_shards
    divisor = math.gcd(size, num_shards)
    fixes = [*meshes, *([f"{reason.name} {padded}"] if padded <= (1 + MAX_PADDING) * size else [])]
    fixes += [f"{divisor} shards"] if divisor > 1 else []
    return ", or ".join(fixes)


def _is_sharded_elsewhere(subject: LintSubject, leaf: Placement, name: str) -> bool:
    """Returns whether every mesh axis that should shard a named dim shards another dim of the same array."""
    requested = {
        axis for axis, _ in subject.plan.mesh.axes if name in subject.dims_of(axis) and subject.num_shards((axis,)) > 1
    }
    return bool(requested) and requested <= {axis for axes in leaf.spec for axis in axes}


def optimizer_less_sharded(subject: LintSubject) -> Iterator[Message]:
    """A large optimizer array is sharded over fewer devices than its parameter."""
    params = {leaf.path: leaf for leaf in subject.plan.leaves if leaf.kind == "param"}
    for leaf in subject.plan.leaves:
        param = next((params[path] for path in params if leaf.path.endswith(f".{path}")), None)
        if leaf.kind != "optimizer" or param is None or param.shape != leaf.shape:
            continue
        share = leaf.local_bytes / max(1, _global_bytes(leaf))
        if share > param.local_bytes / max(1, _global_bytes(param)) and leaf.local_bytes >= _large(subject, leaf.kind):
            yield Message(
                leaf.path,
                f"`{leaf.path}` has the sharding {leaf.partition_spec}, but its parameter {param.partition_spec}.",
                f"stored_optimizer={subject.plan.layout.stored_params!r} in the layout",
                leaf.local_bytes,
            )


def ineffective_annotation(subject: LintSubject) -> Iterator[Message]:
    """A pin, a sequence axis, or an axis name in the model's sharding annotations has no effect."""
    arrays = (*subject.plan.leaves, *subject.plan.batch)
    for name, pinned in subject.plan.pins:
        dims = [by for leaf in arrays for axis, by in zip(leaf.axes, leaf.spec, strict=True) if axis == name]
        for axis in pinned:
            if subject.num_shards((axis,)) > 1 and dims and not any(axis in by for by in dims):
                yield Message(
                    name,
                    f"'{name}' is pinned to '{axis}', but '{axis}' shards no dim of that name.",
                    f"another mesh axis than '{axis}', or no pin",
                )
    seq_axis = subject.plan.layout.sequence_axis
    if seq_axis is not None and subject.num_shards((seq_axis,)) > 1 and not subject.shards_sequence(seq_axis):
        yield Message(
            seq_axis,
            f"'{seq_axis}' ({subject.num_shards((seq_axis,))}) should also shard the sequence, but no "
            "sequence is divisible by it.",
            "a divisible sequence length, or a layout without +seq",
        )
    known = {*subject.plan.mesh.names, *(name for leaf in arrays for name in leaf.axes if name in STRENGTH)}
    for name, path in _unknown_names(subject).items():
        yield Message(
            path,
            f"`{path}` is annotated with '{name}', which names neither a mesh axis nor a sharded dim.",
            f"one of {', '.join(sorted(map(str, known)))}",
        )


def _unknown_names(subject: LintSubject) -> dict[str, str]:
    """Returns the annotated axis names that have no meaning here, each with the path of an array.

    If an annotation names one axis of the mesh, its other names are taken for mesh axes as well. Other names may be
    the author's own labels; they are reported only for large arrays that have no known name at all.
    """
    mesh = subject.plan.mesh.names
    plan = subject.plan
    dims = {
        *STRENGTH,
        *(name for name, _ in plan.pins),
        *(name for _, names in plan.layout.computed for name in names),
    }
    unknown: dict[str, str] = {}
    for annotated, leaf in zip(subject.program.leaves, plan.leaves, strict=True):
        entries = [(entry,) if isinstance(entry, str) else entry or () for entry in annotated.annotation or ()]
        names = {axis for entry in entries for axis in entry}
        mesh_names = names & {*mesh, *CANONICAL_AXES}
        if mesh_names or (not names & dims and leaf.local_bytes >= _large(subject, leaf.kind)):
            for axis in sorted(names - dims - {*mesh}):
                unknown.setdefault(axis, annotated.path)
    return unknown


def _large(subject: LintSubject, kind: str) -> float:
    return LARGE_SHARE * _kind_bytes(subject, kind)


def _kind_bytes(subject: LintSubject, kind: str) -> int:
    """Returns bytes per device of the state of one kind, offloaded arrays included."""
    return sum(leaf.local_bytes for leaf in subject.plan.leaves if leaf.kind == kind)


def _global_bytes(leaf: Placement) -> int:
    return leaf.item_bytes * math.prod(leaf.shape)


def _padding(leaf: Placement, num_shards: int, axes: str) -> str:
    if not leaf.shape:
        return ""
    size = max(leaf.shape)
    return f"{-(-size // num_shards) * num_shards} instead of {size}, divisible into {num_shards} shards over {axes}"
