"""Rules on single arrays: what lies whole, what does not divide, what was wished for and did not come."""

import math
from collections.abc import Iterator

from spanax.check.lint.message import Said
from spanax.check.lint.subject import Checked
from spanax.hardware.mesh import CANONICAL_AXES
from spanax.plan.plan import Placement
from spanax.plan.reason import Code, Reason
from spanax.trace.axes.naming import STRENGTH

LARGE = 0.01
"""The share of a device's bytes of one kind from which on an array counts."""

PADDED = 0.125
"""By how much a size may grow to divide."""

MISSED = 0.05
"""The share of them from which on it counts that a size does not divide; all arrays with that dim together."""


def left_whole(checked: Checked) -> Iterator[Said]:
    """An array is whole on every device, and the layout stores its kind split."""
    for leaf in checked.plan.leaves:
        asked = checked.plan.layout.stored(leaf.kind)
        is_whole = leaf.local_shape == leaf.shape and checked.ways(asked) > 1
        if is_whole and leaf.local_bytes >= _large(checked, leaf.kind):
            yield Said(
                leaf.path,
                f"`{leaf.path}` {list(leaf.shape)} lies whole on all {checked.plan.mesh.size} devices: "
                f"{leaf.reason or 'nothing splits it'}.",
                _padding(leaf, checked.ways(asked), "+".join(asked)),
                leaf.local_bytes,
            )


def does_not_divide(checked: Checked) -> Iterator[Said]:
    """A mesh axis does not split a dim that it was meant to split, in arrays that count; a size near it would do."""
    by_reason: dict[tuple[str, Reason], list[Placement]] = {}
    for leaf, reason in _uneven(checked):
        if not _is_served(checked, leaf, reason.name):
            by_reason.setdefault((leaf.kind, reason), []).append(leaf)
    seen = set[Reason]()
    for (kind, reason), leaves in by_reason.items():
        if reason not in seen and sum(leaf.local_bytes for leaf in leaves) >= MISSED * checked.plan.state_bytes(kind):
            seen.add(reason)
            leaf = max(leaves, key=lambda one: one.local_bytes)
            if fix := _dividing(reason):
                yield Said(leaf.path, f"`{leaf.path}` {list(leaf.shape)}: {reason}.", fix, leaf.local_bytes)


def _uneven(checked: Checked) -> Iterator[tuple[Placement, Reason]]:
    """Yields every placement with each of its dims that is not sharded because its size does not divide."""
    program = checked.program
    rows = zip(program.leaves, program.step.graph.body.inputs, checked.plan.leaves, strict=False)
    for leaf, value, placement in rows:
        for reason in checked.resolver.not_sharded(leaf, program.step.axes.classes[value]):
            if reason.code is Code.NOT_DIVISIBLE:
                yield placement, reason


def _dividing(reason: Reason) -> str:
    """The nearest that works: a little more, or fewer ways; empty where it takes much more, as of three colours."""
    size, ways = reason.size, reason.num_shards
    more, fewer = -(-size // ways) * ways, math.gcd(size, ways)
    near = [f"{reason.name} {more}"] if more <= (1 + PADDED) * size else []
    near += [f"{fewer} ways"] if fewer > 1 else []
    return ", or ".join(near)


def _is_served(checked: Checked, leaf: Placement, name: str) -> bool:
    """Whether every mesh axis that was to split a dim of a name splits another dim of the same array."""
    wanted = {
        axis for axis, _ in checked.plan.mesh.axes if name in checked.names_for(axis) and checked.ways((axis,)) > 1
    }
    return bool(wanted) and wanted <= {axis for by in leaf.spec for axis in by}


def optimizer_unlike_parameter(checked: Checked) -> Iterator[Said]:
    """The optimizer's copy of a parameter takes more of a device than the parameter's own share would."""
    params = {leaf.path: leaf for leaf in checked.plan.leaves if leaf.kind == "param"}
    for leaf in checked.plan.leaves:
        param = next((params[path] for path in params if leaf.path.endswith(f".{path}")), None)
        if leaf.kind != "optimizer" or param is None or param.shape != leaf.shape:
            continue
        share = leaf.local_bytes / max(1, _whole_bytes(leaf))
        if share > param.local_bytes / max(1, _whole_bytes(param)) and leaf.local_bytes >= _large(checked, leaf.kind):
            yield Said(
                leaf.path,
                f"`{leaf.path}` is stored {leaf.partition_spec}, and its parameter {param.partition_spec}.",
                f"stored_optimizer={checked.plan.layout.stored_params!r} in the layout",
                leaf.local_bytes,
            )


def never_matched(checked: Checked) -> Iterator[Said]:
    """A pin, the wish to split the sequence, or a name that the model's author wrote, splits nothing."""
    everything = (*checked.plan.leaves, *checked.plan.batch)
    for name, wanted in checked.plan.pins:
        dims = [by for leaf in everything for axis, by in zip(leaf.axes, leaf.spec, strict=True) if axis == name]
        for axis in wanted:
            if checked.ways((axis,)) > 1 and dims and not any(axis in by for by in dims):
                yield Said(
                    name, f"'{name}' is pinned to '{axis}', and no array is split so.",
                    f"another axis than '{axis}', or no pin",
                )  # fmt: skip
    over = checked.plan.layout.sequence_axis
    if over is not None and checked.ways((over,)) > 1 and not checked.splits_sequence(over):
        yield Said(
            over, f"'{over}' ({checked.ways((over,))}) is to split the sequence too, and no sequence here divides so.",
            "a sequence that divides, or a layout without +seq",
        )  # fmt: skip
    known = {*checked.plan.mesh.names, *(name for leaf in everything for name in leaf.axes if name in STRENGTH)}
    for name, path in _unknown_names(checked).items():
        yield Said(path, f"`{path}` is annotated with '{name}': no axis of the mesh, and nothing that is split.",
                   f"a name of {', '.join(sorted(map(str, known)))}")  # fmt: skip


def _unknown_names(checked: Checked) -> dict[str, str]:
    """Names in annotations that mean nothing here, each with an array that has it.

    Somebody who names one axis of a mesh means axes of a mesh by the others. A name for a dim may be anybody's own; but
    if an array that counts has only such names, they were to do something.
    """
    mesh, plan = checked.plan.mesh.names, checked.plan
    meant = {
        *STRENGTH,
        *(name for name, _ in plan.pins),
        *(name for _, names in plan.layout.computed for name in names),
    }
    odd: dict[str, str] = {}
    for annotated, leaf in zip(checked.program.leaves, plan.leaves, strict=True):
        entries = [(one,) if isinstance(one, str) else one or () for one in annotated.annotation or ()]
        names = {axis for entry in entries for axis in entry}
        of_mesh = names & {*mesh, *CANONICAL_AXES}
        if of_mesh or (not names & meant and leaf.local_bytes >= _large(checked, leaf.kind)):
            for axis in sorted(names - meant - {*mesh}):
                odd.setdefault(axis, annotated.path)
    return odd


def _large(checked: Checked, kind: str) -> float:
    return LARGE * checked.plan.state_bytes(kind)


def _whole_bytes(leaf: Placement) -> int:
    return leaf.item_bytes * math.prod(leaf.shape)


def _padding(leaf: Placement, ways: int, axes: str) -> str:
    if not leaf.shape:
        return ""
    size = max(leaf.shape)
    return f"{-(-size // ways) * ways} instead of {size} divides {axes} ({ways} ways)"
