"""Named layouts. Each mesh axis has a fixed meaning, and a preset is a set of mesh axes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from spanax.errors import MeshError, UnknownNameError, nearest
from spanax.hardware.mesh import CANONICAL_AXES, MeshShape
from spanax.plan.layout import LAST_RESORT_AXES, PIPE, SPATIAL_AXES, TENSOR_AXES, Layout
from spanax.trace.jaxpr.remat_policies import RING, ULYSSES

if TYPE_CHECKING:
    from spanax.trace.program import Program

PRESETS: dict[str, tuple[str, ...]] = {
    "data": ("data",),
    "zero1": ("fsdp",),
    "zero2": ("fsdp",),
    "fsdp": ("fsdp",),
    "hsdp": ("data", "fsdp"),
    "tensor": ("model",),
    "data+tensor": ("data", "model"),
    "fsdp+tensor": ("fsdp", "model"),
    "context": ("data", "context"),
    "ring": ("data", "context"),
    "ulysses": ("data", "context"),
    "spatial": ("data", "context"),
    "expert": ("data", "expert"),
    "pipeline": ("pipe", "data"),
    "pipeline+tensor": ("pipe", "model"),
    "3d": ("pipe", "data", "model"),
}
"""The mesh axes of each preset, slowest first."""

MEANING: dict[str, tuple[str, ...]] = {
    "pipe": ("layers",),
    "data": ("batch",),
    "fsdp": ("batch",),
    "expert": ("experts", "batch"),
    "context": ("seq", "slots", *SPATIAL_AXES),
    "model": TENSOR_AXES + LAST_RESORT_AXES,
    "groups": TENSOR_AXES + LAST_RESORT_AXES,
}
"""The axes that each canonical mesh axis shards in computation; `fsdp` also shards storage; `pipe` has a schedule.

`groups` shards further what `model` shards: where each device has one key, the queries of that key.
"""

STORED: dict[str, tuple[str, ...]] = {
    "zero1": ("optimizer",),
    "zero2": ("optimizer", "gradient"),
}
"""The arrays that ZeRO stages 1 and 2 shard in storage; every other preset with `fsdp` shards all of them."""

SPATIAL = "spatial"

FORMS = (RING, ULYSSES)
"""Forms of attention on a sharded sequence that the name of a layout requests."""

CONTEXT_WORDS = (*FORMS, SPATIAL)
"""What `context` is called with one form of attention, and where it shards images."""

WORDS = {
    "pipe": "pipeline",
    "data": "data",
    "fsdp": "fsdp",
    "expert": "expert",
    "context": "context",
    "model": "tensor",
}
"""The part of a layout's name for each mesh axis, slowest first."""

PARTS = {word: (axis,) for axis, word in WORDS.items()} | dict.fromkeys(STORED, ("fsdp",))
PARTS |= dict.fromkeys(CONTEXT_WORDS, ("context",))
"""The mesh axes of each part of a name such as `pipeline+zero1+tensor`, which is not that of a preset."""

BY_AXES = {frozenset(axes): name for name, axes in PRESETS.items() if name not in STORED and name not in CONTEXT_WORDS}
"""The presets by their mesh axes."""


def layout_named(name: str, mesh: MeshShape, *, sequence_parallel: bool = False) -> Layout:
    """Returns the preset of a name on a mesh, whatever the names of the mesh axes.

    Roles match mesh axes by name; the remaining roles match the remaining axes in order, so that `fsdp` on the mesh
    `data=8` is FSDP over `data`. A `data` axis that is not in the preset also shards the batch. `+seq` after a tensor
    preset is sequence parallelism. `ring` and `ulysses` are the layout that a mesh with `context` implies; the schedule
    selects the attention.

    Raises:
      SpanaxError: unknown preset, or mesh and preset are incompatible.

    Example:
      >>> layout_named("fsdp", MeshShape.of("data=8")).stored_params
      ('data',)
    """
    base = name.removesuffix("+seq")
    if base in FORMS and MEANING.keys() >= set(mesh.names) and mesh.ways(["context"]) > 1:
        return replace(layout_for(mesh), name=in_words(layout_for(mesh).name, base))
    axes = axes_named(name)
    roles = _roles(base, axes, mesh)
    stored = (STORED[part] for part in base.split("+") if part in STORED)
    layout = _layout(name, roles, next(stored, ("param", "gradient", "optimizer")))
    wants_sequence = sequence_parallel or base != name
    if wants_sequence and "model" not in axes:
        raise MeshError(f"layout '{base}' has no model axis to shard the sequence over.", fix="fsdp+tensor+seq")
    return replace(layout, sequence_axis=roles["model"] if wants_sequence else None)


def axes_named(name: str) -> tuple[str, ...]:
    """Returns the mesh axes of the name of a preset, or of a layout that a search ranks, slowest first.

    Raises:
      SpanaxError: no layout has this name.

    Example:
      >>> axes_named("3d"), axes_named("pipeline+fsdp")
      (('pipe', 'data', 'model'), ('pipe', 'fsdp'))
    """
    base = name.removesuffix("+seq")
    inside = base.removeprefix(f"{WORDS[PIPE]}+")
    axes = PRESETS.get(base) or tuple(axis for part in base.split("+") for axis in PARTS.get(part, ("",)))
    axes = axes if inside == base else (PIPE, *axes_named(inside))
    usual = BY_AXES.get(frozenset(axes), base)
    known = {*PRESETS, usual, *(in_words(usual, word) for word in CONTEXT_WORDS)}
    is_usual = base in known or not STORED.keys().isdisjoint(base.split("+"))
    is_ordered = axes == tuple(axis for axis in MEANING if axis in axes)
    if not (is_usual and is_ordered and (base == name or "model" in axes)):
        raise UnknownNameError(f"unknown layout '{name}'.", fix=nearest(name, PRESETS))
    return axes


def requests_stages(layout: str | None, mesh: str | None) -> bool:
    """Returns whether a layout or a mesh has stages.

    Example:
      >>> requests_stages("pipeline+fsdp", None), requests_stages("pipeline", "data=8")
      (True, False)
    """
    return PIPE in (MeshShape.of(mesh).names if mesh is not None else axes_named(layout or "data"))


def name_in_stages(name: str) -> str:
    """Returns the name of a layout whose layers are partitioned into stages; that of one with stages is the same.

    Example:
      >>> name_in_stages("data"), name_in_stages("data+tensor+seq"), name_in_stages("zero1")
      ('pipeline', '3d+seq', 'pipeline+zero1')
    """
    base, *options = name.partition("+seq")
    axes = {*PRESETS.get(base, ()), *(axis for part in base.split("+") for axis in PARTS.get(part, ()))}
    if PIPE in axes:
        return name
    return "".join([BY_AXES.get(frozenset({PIPE, *axes})) or f"{WORDS[PIPE]}+{base}", *options])


def check_names(layout: str | Layout | None, mesh: MeshShape | None) -> None:
    """Checks the names of a requested layout or, without one, those of the mesh axes.

    Raises:
      SpanaxError: a part of the name is unknown, or a mesh axis has no meaning by name.
    """
    if isinstance(layout, str):
        axes_named(layout)
    if layout is None and mesh is not None:
        layout_for(mesh)


def in_words(name: str, word: str) -> str:
    """Returns the name of a layout with a more exact word for `context`.

    Example:
      >>> in_words("fsdp+context", "ring")
      'fsdp+ring'
    """
    return "+".join(word if part == "context" else part for part in name.split("+"))


def form_of(layout: str | Layout | None) -> str | None:
    """Returns which of the `FORMS` the name of a layout requests; None for another."""
    parts = layout.split("+") if isinstance(layout, str) else ()
    return next((form for form in FORMS if form in parts), None)


def check_ring(layout: Layout, mesh: MeshShape) -> None:
    """Checks that a mesh supports ring attention.

    Raises:
      SpanaxError: no mesh axis of several devices shards sequences.
    """
    if not any("seq" in names and mesh.ways([axis]) > 1 for axis, names in layout.computed):
        raise MeshError(
            "ring attention needs a mesh axis that shards sequences.",
            where=f"mesh {mesh}, layout '{layout.name}'",
            fix=f"mesh {default_mesh(RING, mesh.size)}" if mesh.size > 1 else "several devices, or no ring",
        )


def layout_for(mesh: MeshShape) -> Layout:
    """Returns the layout that the names of the axes of a mesh imply.

    Raises:
      SpanaxError: an axis has no meaning by name.

    Example:
      >>> layout_for(MeshShape.of("fsdp=4,model=2")).name
      'fsdp+tensor'
    """
    for axis, size in mesh.axes:
        if axis not in MEANING and size > 1:
            raise MeshError(
                f"mesh axis '{axis}' has no default meaning.",
                where=f"mesh {mesh}",
                fix=f"name a layout for it, or use {', '.join(a for a in CANONICAL_AXES if a in MEANING)}",
            )
    return layout_of(mesh, ("param", "gradient", "optimizer"))


def layout_of(mesh: MeshShape, stored: Sequence[str]) -> Layout:
    """Returns the layout of a mesh of canonical axes that shards these kinds of arrays over `fsdp` in storage."""
    roles = {axis: axis for axis, size in mesh.axes if axis in MEANING and size > 1}
    inside = [axis for axis in WORDS if axis in roles and axis != PIPE]
    name = BY_AXES.get(frozenset(inside)) or "+".join(WORDS[axis] for axis in inside) or "data"
    return _layout(name_in_stages(name) if PIPE in roles else name, roles, stored)


def grouped(mesh: MeshShape, groups: int) -> MeshShape:
    """Returns a mesh with a part of `model` as the axis `groups`.

    Example:
      >>> grouped(MeshShape.of("data=2,model=8"), 2)
      data=2,model=4,groups=2
    """
    sizes = dict(mesh.axes)
    return MeshShape(tuple({**sizes, "model": sizes["model"] // groups, "groups": groups}.items()))


def default_mesh(name: str, num_devices: int) -> MeshShape:
    """Returns a mesh for a layout's name: two devices on each axis, the rest on the one that shards the batch.

    HSDP limits all-gathers to the small, fast domain, and a pipeline has the fewest stages possible.

    Example:
      >>> default_mesh("fsdp+tensor", 8), default_mesh("pipeline+fsdp", 8)
      (fsdp=4,model=2, pipe=2,fsdp=4)
    """
    axes = axes_named(name)
    large = next(axis for axis in ("fsdp", "data", *axes) if axis in axes and axis != PIPE)
    sizes = dict.fromkeys(axes, 1) | {large: num_devices}
    for axis in axes:
        if axis != large and sizes[large] % 2 == 0:
            sizes[axis] = 2
            sizes[large] //= 2
    return MeshShape(tuple(sizes.items()))


def _roles(name: str, parts: Sequence[str], mesh: MeshShape) -> dict[str, str]:
    """Returns the mesh axis of each role of a preset."""
    roles = {part: part for part in parts if part in mesh.names}
    left = [axis for axis in mesh.names if axis not in roles.values()]
    for part in parts:
        # A canonical axis can replace another only where its meaning is preserved: data for fsdp.
        fitting = [axis for axis in left if axis not in MEANING or {axis, part} <= {"data", "fsdp"}]
        if part not in roles and fitting:
            roles[part] = fitting[0]
            left.remove(fitting[0])
    if "data" in left:
        # `data` always shards the batch, and does not change the storage of a preset: tensor on data=4,model=2.
        roles = {"data": "data", **roles}
        left.remove("data")
    if "groups" in left and "model" in roles:
        roles["groups"] = "groups"
        left.remove("groups")
    missing = [part for part in parts if part not in roles]
    # A role of one device has no effect: data+tensor on a mesh of model=8 is tensor.
    idle = [axis for axis in left if dict(mesh.axes)[axis] > 1]
    if missing == list(parts) or (missing and len(parts) == 1):
        raise MeshError(
            f"layout '{name}' needs the mesh axis {missing[0]}.",
            where=f"mesh {mesh}",
            fix=f"mesh {','.join(f'{a}={s}' for a, s in default_mesh(name, mesh.size).axes)}",
        )
    if idle:
        wider = next((p for p, axes in PRESETS.items() if {*parts, *idle} == set(axes)), None)
        raise MeshError(
            f"layout '{name}' leaves mesh axis '{idle[0]}' idle: every device on it would repeat the same work.",
            where=f"mesh {mesh}",
            fix=f"layout '{wider}'" if wider else f"mesh {default_mesh(name, mesh.size)}",
        )
    return roles


def _layout(name: str, roles: Mapping[str, str], stored: Sequence[str]) -> Layout:
    if "groups" in roles and "model" not in roles:
        raise MeshError(
            "mesh axis 'groups' shards further what 'model' shards: the queries of one key.",
            fix="a mesh axis model as large as the number of keys, before groups",
        )
    fsdp = (roles["fsdp"],) if "fsdp" in roles else ()
    return Layout(
        name,
        computed=tuple((axis, MEANING[part]) for part, axis in roles.items()),
        stored_params=fsdp if "param" in stored else (),
        stored_gradients=fsdp if "gradient" in stored else (),
        stored_optimizer=fsdp if "optimizer" in stored else (),
        exclusive=tuple(roles[part] for part in ("model", "groups") if part in roles),
    )


def context_word(program: "Program") -> str:
    """Returns what a layout's name calls the mesh axis `context` for a program."""
    names = {axis.name for axis in program.axes}
    if program.context == RING:
        return RING
    return SPATIAL if names.isdisjoint(["seq"]) and not names.isdisjoint(SPATIAL_AXES) else "context"


def check_word(program: "Program", layout: str | None) -> None:
    """Checks that a program has the images that a layout of this name shards.

    Raises:
      SpanaxError: it has sequences, or neither.
    """
    names = dict.fromkeys(name for leaf in program.batch for name in leaf.axes if name)
    if layout is not None and SPATIAL in layout.split("+") and context_word(program) != SPATIAL:
        raise MeshError(
            f"layout '{layout}' shards images and videos, and this program has none, or sequences too.",
            where=f"the batch has {', '.join(names) or 'no axes'}",
            fix=f"layout '{layout.replace(SPATIAL, 'context')}'",
        )
