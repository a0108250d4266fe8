"""Axes that are padded, so that mesh axes that do not divide them shard them: 25 heads as 32 on 8 devices."""

from collections.abc import Sequence

from spanax.errors import VariantError, nearest
from spanax.hardware.mesh import MeshShape
from spanax.plan.layout import Layout
from spanax.plan.sharding.assign import Pins, pinned
from spanax.trace.program import Program
from spanax.trace.rewrites.padding import Multiples, padded_sizes

UNPADDED = ("batch", "layers")
"""Axes that are not padded: the examples of a step, and the layers, which stages of a pipeline divide unevenly."""


def padded_axes(program: Program, layout: Layout, mesh: MeshShape, pins: Pins, names: Sequence[str]) -> Multiples:
    """Returns the requested axes that a layout shards unevenly, each with the number of shards.

    Args:
      program: the program, without padding.
      layout: what each mesh axis shards.
      mesh: the devices.
      pins: the user's pins for single axes.
      names: the axes to pad.

    Raises:
      SpanaxError: the program has no such axis, or no mesh axis of several devices shards it.
    """
    check_padded(program, names)
    layout = pinned(layout, pins, program, mesh)
    multiples = []
    for name in names:
        ways = mesh.ways([axis for axis, sharded in layout.computed if name in sharded])
        if ways == 1:
            shared = {each for axis, sharded in layout.computed if mesh.ways([axis]) > 1 for each in sharded}
            others = [each for each in _known(program) if each in shared]
            raise VariantError(
                f"no mesh axis shards '{name}', so that padding it has no effect.",
                where=f"mesh {mesh}, layout '{layout.name}'",
                fix=nearest(name, others) if others else "pad='none' (--pad none)",
            )
        multiples.append((name, ways))
    return tuple(pair for pair in multiples if padded_sizes(program.step, (pair,)))


def check_padded(program: Program, names: Sequence[str]) -> None:
    """Checks that axes can be padded.

    Raises:
      SpanaxError: the program has no such axis, or it has the examples or the layers.
    """
    known = _known(program)
    for name in names:
        if name not in known:
            raise VariantError(f"cannot pad axis '{name}'.", fix=nearest(name, known))


def _known(program: Program) -> list[str]:
    """Returns the axes of a program that can be padded."""
    return sorted({*program.step.axes.names.values()} - {*UNPADDED})


def padding_text(program: Program, mesh: MeshShape, layout: Layout) -> str:
    """Returns the padded axes of a program as text: `25 heads padded to 32 over model=8`; empty without padding."""
    step = program.unpadded.step
    texts = dict[str, None]()
    for name, number in program.options.padded:
        over = ",".join(f"{axis}={mesh.ways([axis])}" for axis, names in layout.computed if name in names)
        for old, new in padded_sizes(step, ((name, number),)).values():
            texts[f"{old:,} {name} padded to {new:,} over {over}"] = None
    return "; ".join(texts)
