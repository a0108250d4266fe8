"""Compare: layouts run on the devices present, in turn, beside what was predicted of them."""

import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import numpy as np

from spanax.check.hlo.collectives import collectives, totals
from spanax.check.parity.example_batches import made_up
from spanax.errors import SpanaxError
from spanax.hardware.cluster import Cluster
from spanax.hardware.mesh import MeshShape
from spanax.plan.candidate import Candidate, Search, plan_of
from spanax.plan.choose import Request, searched
from spanax.plan.plan import Plan
from spanax.plan.presets import PRESETS
from spanax.plan.reason import Code, Reason
from spanax.plan.search import search
from spanax.run.run import Run, start
from spanax.run.state.placement import assert_placed
from spanax.trace.program import Program
from spanax.units import bytes_text

Moved = Mapping[str, Mapping[str, int]]
"""Bytes of collectives by mesh axes and kind, as `collectives_of` predicts them."""

EVERY = 1_000_000

CHEAPEST = 5
"""So many layouts are compared whatever their names, unless another number is requested."""

PRUNED = Reason(Code.NOT_COMPARED)

WARM_UP = 1
"""Steps that are not counted: the first one of a program."""


@dataclass(frozen=True)
class Progress:
    """How far a comparison is.

    Attributes:
      phase: what has ended: a layout was compiled and took its first step, or all layouts took a step.
      done: how many of them.
      total: of how many.
      layout: the layout that was compiled last.
      seconds_left: estimate of the remaining seconds, from the mean time per layout and step so far.
    """

    phase: Literal["compiled", "step"]
    done: int
    total: int
    layout: str
    seconds_left: float


@dataclass(frozen=True)
class Compared:
    """One layout, as predicted and as it ran.

    Attributes:
      candidate: the layout with its price.
      state_bytes: what its plan says one device holds between steps.
      seconds: of each step that was counted.
      core_seconds: of each step, on all cores together: what this process computed, whoever else had the machine.
      ratio: how many times as long as the fastest layout it takes: the median of the steps taken in turn.
      compiled_state_bytes: what XLA's program takes in of the state and the batch, on one device.
      compiled_peak_bytes: that, and the temporaries beside it; on simulated devices those of XLA for the CPU.
      moved: bytes of the compiled program's collectives, by mesh axes and kind.
    """

    candidate: Candidate
    state_bytes: int
    seconds: tuple[float, ...]
    core_seconds: tuple[float, ...]
    ratio: float
    compiled_state_bytes: int
    compiled_peak_bytes: int
    moved: Moved

    @property
    def step_seconds(self) -> float:
        """The median of its steps."""
        return statistics.median(self.seconds)

    @property
    def step_core_seconds(self) -> float:
        """The median of its steps on all cores together."""
        return statistics.median(self.core_seconds)


def layouts(
    program: Program, here: Cluster, *, mesh: MeshShape | None = None, top: int | None = None, every: bool = False
) -> Search:
    """Returns the priced layouts to compare, the cheapest first: no stages, one microbatch, otherwise as planned.

    These are the `CHEAPEST` and the cheapest of each single strategy (`data`, `fsdp`, `tensor`, ...); `rejected` counts
    the rest as `PRUNED`.

    Args:
      program: what `spanax.trace` returned.
      here: the devices.
      mesh: all layouts on this mesh, and no others.
      top: so many of the cheapest instead.
      every: all layouts instead.

    Raises:
      SpanaxError: no layout can be run, there is no such mesh, or both `top` and `every` are requested.
    """
    check_pruning(top, every)
    first = searched(program, here, Request(pipeline=False))
    planned = next(iter(first.programs.values()))
    remat = planned.remat if first.best is None else first.best.remat
    found = search(planned, here, remat=(remat,), pipeline=False, mesh=mesh, microbatches=1, top=EVERY)
    if not found.candidates:
        raise SpanaxError(
            f"no layout of this workload can be run on {here}" + (f" as {mesh}." if mesh else "."),
            where=f"a batch of {found.batch_size}; "
            + "; ".join(
                f"left out {count}: {reason}"
                for reason, count in sorted((str(reason), count) for reason, count in found.rejected.items())
            ),
            fix="another --mesh or --batch",
        )
    if top is not None:
        chosen = found.candidates[:top]
    elif every or mesh is not None:
        chosen = found.candidates
    else:
        chosen = pruned(found.candidates)
    num_pruned = len(found.candidates) - len(chosen)
    rejected = {**found.rejected, PRUNED: num_pruned} if num_pruned else found.rejected
    return replace(found, candidates=chosen, rejected=rejected)


def check_pruning(top: int | None, every: bool) -> None:
    """Raises SpanaxError if both `top` and `every` of `layouts` are requested."""
    if top is not None and every:
        raise SpanaxError(f"--top {top} compares the cheapest layouts, and --all compares all.", fix="one of the two")


def pruned(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Returns the `CHEAPEST` of some candidates and the first of each single strategy, in their order.

    A single strategy is a preset without `+` in its name.
    """
    kept, singles = [], {name for name in PRESETS if "+" not in name}
    for rank, one in enumerate(candidates):
        if rank < CHEAPEST or one.layout in singles:
            kept.append(one)
        singles.discard(one.layout)
    return tuple(kept)


def compare(
    found: Search,
    *,
    steps: int = 10,
    devices: Sequence[Any] | None = None,
    seed: int = 0,
    tell: Callable[[Progress], None] = lambda progress: None,
) -> tuple[Compared, ...]:
    """Runs every candidate of a search, each step of all of them before the next; the fastest first.

    They are born with the same numbers and see the same batch. The order is another in each round, so that what slows
    the machine down for a while slows all of them down alike.

    Args:
      found: what `layouts` returned.
      steps: how many are counted of each.
      devices: the devices; all of this process by default.
      seed: of the parameters, the batch and the order.
      tell: is called after each compilation and after each round of steps.

    Raises:
      SpanaxError: no steps, or not all of the layouts can be held at once.

    Example:
      >>> import optax, spanax
      >>> from flax import nnx
      >>> program = spanax.trace(
      ...     build=lambda rngs: nnx.Linear(16, 32, rngs=rngs),
      ...     optimizer=optax.sgd(0.1),
      ...     batch=jax.ShapeDtypeStruct((8, 16), "float32"),
      ...     loss=lambda model, x: (model(x) ** 2).mean(),
      ... )
      >>> rows = compare(layouts(program, spanax.cluster("cpu:8"), mesh=spanax.MeshShape.of("fsdp=8")), steps=2)
      >>> sorted(row.candidate.layout for row in rows), rows[0].ratio
      (['fsdp'], 1.0)
    """
    if steps < 1:
        raise SpanaxError(f"--steps is {steps}; it takes a whole number from 1.", fix="--steps 10")
    program = next(iter(found.programs.values()))
    plans = [plan_of(found, one) for one in found.candidates]
    _check_held(plans)
    batch = made_up(program, seed)
    runs, compiled = _brought_up(program, plans, devices, seed, batch, steps, tell)
    taken, cores = ([list[float]() for _ in runs] for _ in range(2))
    order, started = list(range(len(runs))), time.monotonic()
    for step in range(1, steps + 1):
        random.Random(seed + step).shuffle(order)
        for at in order:
            began = time.process_time()
            taken[at].append(_step_seconds(runs[at], batch))
            cores[at].append(time.process_time() - began)
        left = (time.monotonic() - started) / step * (steps - step)
        tell(Progress("step", step, steps, plans[-1].layout.name, left))
    best = min(range(len(runs)), key=lambda at: statistics.median(taken[at]))
    rows = []
    for at, one in enumerate(found.candidates):
        memory = compiled[at].memory_analysis()
        ratio = statistics.median(mine / theirs for mine, theirs in zip(taken[at], taken[best], strict=True))
        rows.append(
            Compared(
                candidate=one,
                state_bytes=plans[at].state_bytes(),
                seconds=tuple(taken[at]),
                core_seconds=tuple(cores[at]),
                ratio=ratio,
                compiled_state_bytes=memory.argument_size_in_bytes,
                compiled_peak_bytes=_peak_bytes(memory),
                moved=_moved(compiled[at], plans[at].mesh),
            )
        )
    return tuple(sorted(rows, key=lambda row: (row.ratio, row.step_seconds)))


def _moved(compiled: Any, mesh: MeshShape) -> Moved:
    (module,) = compiled.runtime_executable().hlo_modules()
    return totals(collectives(module.as_serialized_hlo_module_proto(), mesh))


def _brought_up(
    program: Program,
    plans: Sequence[Plan],
    devices: Sequence[Any] | None,
    seed: int,
    batch: Any,
    steps: int,
    tell: Callable[[Progress], None],
) -> tuple[list[Run], list[Any]]:
    """A run of each plan, from the numbers of the first one at birth, after `WARM_UP` steps; and its compiled step."""
    runs: list[Run] = []
    compiled = []
    born: list[Any] = []
    started, stepping = time.monotonic(), 0.0
    for number, plan in enumerate(plans, 1):
        if not runs:
            run = start(program, plan, seed=seed, devices=devices)
            born = [array.copy() for array in run.state]
        else:
            mesh = plan.mesh.build(devices)
            pairs = zip(born, plan.leaves, strict=True)
            # A copy: where both lie alike, the step of one would take the other's array away.
            run = Run(program, plan, mesh, [jax.device_put(a, leaf.sharding(mesh)).copy() for a, leaf in pairs])
            assert_placed(plan, run.state, mesh)
        compiled.append(run.compile())
        stepping += sum(_step_seconds(run, batch) for _ in range(WARM_UP))
        runs.append(run)
        mean = (time.monotonic() - started) / number
        left = mean * (len(plans) - number) + stepping / number / WARM_UP * len(plans) * steps
        tell(Progress("compiled", number, len(plans), f"{plan.layout.name} on {plan.mesh}", left))
    return runs, compiled


def _step_seconds(run: Run, batch: Any) -> float:
    began = time.perf_counter()
    jax.block_until_ready(run.step(batch))
    jax.block_until_ready(run.state)
    return time.perf_counter() - began


def _peak_bytes(memory: Any) -> int:
    """What one device holds of a step's arguments, results and temporaries; what is given away counts once."""
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(held + memory.temp_size_in_bytes)


def _check_held(plans: Sequence[Plan]) -> None:
    """Simulated devices share the host's memory, and all of the layouts are there at once."""
    if jax.devices()[0].platform != "cpu":
        return
    needed = sum(plan.mesh.size * plan.state_bytes() for plan in plans)
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if needed > free / 2:
        raise SpanaxError(
            f"{len(plans)} layouts hold {bytes_text(needed)} at once, and {bytes_text(free)} are free.",
            fix=f"--top {max(1, int(len(plans) * free / 2 / needed))}, or one --mesh",
        )


def distance(rows: Sequence[Compared]) -> float:
    """How many times as long as the fastest the planner's choice takes: the first by its own price."""
    return min(rows, key=lambda row: row.candidate.step_seconds).ratio


def core_distance(rows: Sequence[Compared]) -> float:
    """The same by time on all cores together: what simulated devices can be told apart by on a busy machine."""
    choice = min(rows, key=lambda row: row.candidate.step_seconds)
    return choice.step_core_seconds / (min(row.step_core_seconds for row in rows) or 1.0)


def rank_correlation(rows: Sequence[Compared]) -> float | None:
    """Spearman's: 1 where the predicted order is the measured one, -1 where it is the reverse; None of one layout.

    Source: Spearman, 1904: the correlation of the ranks.
    """
    if len(rows) < 2:
        return None
    priced, measured = [row.candidate.step_seconds for row in rows], [row.ratio for row in rows]
    return float(np.corrcoef(np.argsort(np.argsort(priced)), np.argsort(np.argsort(measured)))[0, 1])
