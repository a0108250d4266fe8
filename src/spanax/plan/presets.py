"""Named layouts. Each mesh axis has a fixed meaning, and a preset is a set of mesh axes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from spanax.errors import MeshError, UnknownNameError, nearest
from spanax.hardware.mesh import CANONICAL_AXES, MeshShape
from spanax.plan.layout import LAST_RESORT_AXES, TENSOR_AXES, Layout
from spanax.trace.jaxpr.remat_policies import RING

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
    "context": ("seq", "slots"),
    "model": TENSOR_AXES + LAST_RESORT_AXES,
}
"""The axes that each canonical mesh axis shards in computation; `fsdp` also shards storage; `pipe` has a schedule."""

STORED: dict[str, tuple[str, ...]] = {
    "zero1": ("optimizer",),
    "zero2": ("optimizer", "gradient"),
}
"""The arrays that ZeRO stages 1 and 2 shard in storage; every other preset with `fsdp` shards all of them."""

BY_AXES = {frozenset(axes): name for name, axes in PRESETS.items() if name not in STORED and name != RING}
"""The presets by their mesh axes."""


def layout_named(name: str, mesh: MeshShape, *, sequence_parallel: bool = False) -> Layout:
    """Returns the preset of a name on a mesh, whatever the names of the mesh axes.

    Roles match mesh axes by name; the remaining roles match the remaining axes in order, so that `fsdp` on the mesh
    `data=8` is FSDP over `data`. A `data` axis that is not in the preset also shards the batch. `+seq` after a tensor
    preset is sequence parallelism. `ring` is the layout that a mesh with `context` implies; the schedule selects ring
    attention.

    Raises:
      SpanaxError: unknown preset, or mesh and preset are incompatible.

    Example:
      >>> layout_named("fsdp", MeshShape.of("data=8")).stored_params
      ('data',)
    """
    base, plus, option = name.partition("+seq")
    if base == RING and MEANING.keys() >= set(mesh.names) and mesh.ways(["context"]) > 1:
        return replace(layout_for(mesh), name=as_ring(layout_for(mesh).name))
    if base not in PRESETS or option or (plus and "model" not in PRESETS[base]):
        raise UnknownNameError(f"unknown layout '{name}'.", fix=nearest(name, PRESETS))
    roles = _roles(base, PRESETS[base], mesh)
    layout = _layout(name, roles, STORED.get(base, ("param", "gradient", "optimizer")))
    wants_sequence = sequence_parallel or bool(plus)
    if wants_sequence and "model" not in PRESETS[base]:
        raise MeshError(f"layout '{base}' has no model axis to shard the sequence over.", fix="fsdp+tensor+seq")
    return replace(layout, sequence_axis=roles["model"] if wants_sequence else None)


def check_names(layout: str | Layout | None, mesh: MeshShape | None) -> None:
    """Checks the names of a requested layout or, without one, those of the mesh axes.

    Raises:
      SpanaxError: no preset has a part of this name, or a mesh axis has no meaning by name.
    """
    parts = {"seq", *(part for name in PRESETS for part in name.split("+"))}
    if isinstance(layout, str) and not parts.issuperset(layout.split("+")):
        raise UnknownNameError(f"unknown layout '{layout}'.", fix=nearest(layout, PRESETS))
    if layout is None and mesh is not None:
        layout_for(mesh)


def as_ring(name: str) -> str:
    """Returns the name of a layout with ring attention instead of gathered keys.

    Example:
      >>> as_ring("fsdp+context")
      'fsdp+ring'
    """
    return "+".join(RING if part == "context" else part for part in name.split("+"))


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
    words = {
        "pipe": "pipeline",
        "data": "data",
        "fsdp": "fsdp",
        "model": "tensor",
        "context": "context",
        "expert": "expert",
    }
    name = BY_AXES.get(frozenset(roles)) or "+".join(words[axis] for axis in MEANING if axis in roles) or "data"
    return _layout(name, roles, stored)


def default_mesh(name: str, num_devices: int) -> MeshShape:
    """Returns a mesh for a preset: two devices on its last axis, the rest on the first.

    Example:
      >>> default_mesh("fsdp+tensor", 8)
      fsdp=4,model=2
    """
    base = name.partition("+seq")[0]
    if base not in PRESETS:
        raise UnknownNameError(f"unknown layout '{name}'.", fix=nearest(name, PRESETS))
    axes = PRESETS[base]
    if len(axes) == 1:
        return MeshShape(((axes[0], num_devices),))
    second = 2 if num_devices % 2 == 0 else 1
    if len(axes) == 3:
        rest = num_devices // second
        third = 2 if rest % 2 == 0 else 1
        return MeshShape(((axes[0], second), (axes[1], rest // third), (axes[2], third)))
    # HSDP limits all-gathers to the small, fast domain, and a pipeline has the fewest stages possible; the other
    # presets shard the batch over the large axis.
    sizes = (second, num_devices // second) if axes[0] == "pipe" or name == "hsdp" else (num_devices // second, second)
    return MeshShape(tuple(zip(axes, sizes, strict=True)))


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
    fsdp = (roles["fsdp"],) if "fsdp" in roles else ()
    return Layout(
        name,
        computed=tuple((axis, MEANING[part]) for part, axis in roles.items()),
        stored_params=fsdp if "param" in stored else (),
        stored_gradients=fsdp if "gradient" in stored else (),
        stored_optimizer=fsdp if "optimizer" in stored else (),
        exclusive=(roles["model"],) if "model" in roles else (),
    )
