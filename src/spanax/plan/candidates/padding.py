"""Axes that are padded, so that mesh axes that do not divide them shard them: 25 heads as 32 on 8 devices."""

import math
from collections.abc import Callable, Iterator, Sequence

from spanax.errors import VariantError, nearest
from spanax.hardware.cluster import Cluster
from spanax.hardware.mesh import MeshShape
from spanax.hardware.torus import divisors
from spanax.plan.candidate import Search
from spanax.plan.layout import Layout
from spanax.plan.presets import MEANING
from spanax.plan.sharding.assign import Pins, pinned
from spanax.trace.program import Program
from spanax.trace.rewrites.padding import Multiples, padded_sizes

UNPADDED = ("batch", "layers")
"""Axes that are not padded: the examples of a step, and the layers, which stages of a pipeline divide unevenly."""

MOST = 8
"""The most devices over which a search shards padded axes if no mesh is requested: those of a node."""


def search_in_padding(
    find: Callable[[Program], Search],
    program: Program,
    cluster: Cluster,
    names: Sequence[str],
    mesh: MeshShape | None,
) -> Search:
    """Returns the search of a program with axes padded for the number of devices that suits its best candidate.

    A program whose axes every such number divides is searched as it is.

    Args:
      find: searches the layouts of a program.
      program: without padded axes.
      cluster: the devices.
      names: the axes to pad; none searches the program as it is.
      mesh: the requested mesh of one stage, if any.

    Raises:
      SpanaxError: the best layout of no number of devices shards the axes.
    """
    if not names:
        return find(program)
    check_padded(program, names)
    variants = list(padded_variants(program, cluster, names, mesh))
    is_sharded = mesh is None or all(_ways(mesh, name) > 1 for name in names)
    if is_sharded and not variants:
        return find(program)
    results = []
    for padded in variants:
        result = find(program.variant(padded=padded))
        if result.best is None or is_used(result, padded):
            results.append(result)
    if not results:
        axes = ", ".join(names)
        shape = f"mesh {mesh}" if mesh is not None else f"{cluster.num_devices} devices"
        raise VariantError(
            f"the fastest layout shards no padded axis of {axes}.", where=shape, fix="a layout and a mesh with `model`"
        )
    return min(results, key=_step_seconds)


def is_used(result: Search, padded: Multiples) -> bool:
    """Returns whether the best candidate of a search shards each padded axis over the number that it is padded for."""
    best = result.best
    return best is not None and all(_ways(best.mesh, name) == number for name, number in padded)


def _step_seconds(result: Search) -> float:
    return math.inf if result.best is None else result.best.step_seconds


def _ways(mesh: MeshShape, name: str) -> int:
    """Returns the number of devices over which presets shard an axis."""
    return mesh.ways([axis for axis, names in MEANING.items() if name in names])


def padded_variants(
    program: Program, cluster: Cluster, names: Sequence[str], mesh: MeshShape | None
) -> Iterator[Multiples]:
    """Yields the uneven axes for each number of devices that may shard them, the largest first."""
    numbers = [size for size in divisors(cluster.num_devices) if 1 < size <= MOST][::-1]
    for number in numbers if mesh is None else [1]:
        pairs = [(name, number if mesh is None else _ways(mesh, name)) for name in names]
        if padded := tuple(pair for pair in pairs if padded_sizes(program.step, (pair,))):
            yield padded


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
