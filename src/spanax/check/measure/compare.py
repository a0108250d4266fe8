"""Runs layouts in turn on the available devices and compares their step times with the predictions."""

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from spanax.check.hlo.collectives import collectives, totals
from spanax.check.parity.example_batches import example_batch
from spanax.check.parity.shrink import free_bytes
from spanax.displays import doing
from spanax.errors import CapacityError, ConflictError, NoLayoutError, RangeError
from spanax.hardware.cluster import Cluster
from spanax.hardware.mesh import MeshShape
from spanax.plan.candidate import Candidate, Search, plan_of
from spanax.plan.candidates.request import Request
from spanax.plan.choose import searched
from spanax.plan.evaluate import evaluated
from spanax.plan.plan import Plan
from spanax.plan.presets import PRESETS
from spanax.plan.reason import Code, Reason
from spanax.plan.search import search
from spanax.step.placement import assert_placed
from spanax.trace.program import Program
from spanax.train.run import Run
from spanax.train.state.start import start
from spanax.units import bytes_text

Moved = Mapping[str, Mapping[str, int]]
"""Bytes of collectives by mesh axes and kind."""

EVERY = 1_000_000

CHEAPEST = 5
"""The number of cheapest layouts that are compared by default."""

PRUNED = Reason(Code.NOT_COMPARED)

WARM_UP = 1
"""The number of untimed steps before the timed steps."""


@dataclass(frozen=True)
class Compared:
    """The predicted and measured figures of a layout.

    Attributes:
      candidate: the layout with its predicted cost.
      state_bytes: the predicted bytes of the state per device.
      seconds: the wall time of each timed step.
      core_seconds: the CPU time of each timed step, summed over cores; unaffected by other processes.
      ratio: the step time relative to the fastest layout: the median over rounds.
      compiled_state_bytes: the bytes of the compiled program's arguments, state and batch, per device.
      compiled_peak_bytes: the peak memory of the compiled program per device; on simulated devices, of XLA for CPU.
      moved: bytes of the compiled program's collectives, by mesh axes and kind.
      collectives: the predicted bytes.
    """

    candidate: Candidate
    state_bytes: int
    seconds: tuple[float, ...]
    core_seconds: tuple[float, ...]
    ratio: float
    compiled_state_bytes: int
    compiled_peak_bytes: int
    moved: Moved
    collectives: Moved

    @property
    def step_seconds(self) -> float:
        """The median wall time of a step."""
        return statistics.median(self.seconds)

    @property
    def step_core_seconds(self) -> float:
        """The median CPU time of a step."""
        return statistics.median(self.core_seconds)


@dataclass(frozen=True)
class Comparison:
    """Measured layouts, fastest first, and how well their predictions rank them.

    Attributes:
      search: the result of `layouts`.
      rows: the measured layouts.
      device_kind: what JAX calls the devices.
    """

    search: Search
    rows: tuple[Compared, ...]
    device_kind: str = ""

    @property
    def choice(self) -> Compared:
        """The planner's choice; its `ratio` is relative to the fastest layout."""
        return min(self.rows, key=lambda row: row.candidate.step_seconds)

    @property
    def choice_core_ratio(self) -> float | None:
        """The CPU time of the choice relative to the least; None where devices do not share cores."""
        least = min(row.step_core_seconds for row in self.rows) or 1.0
        return self.choice.step_core_seconds / least if self.search.cluster.chip.shared else None

    @property
    def rank_correlation(self) -> float | None:
        """Spearman's rank correlation of predicted and measured step times; None for one layout.

        Source: Spearman, 1904.
        """
        if len(self.rows) < 2:
            return None
        predicted = [row.candidate.step_seconds for row in self.rows]
        measured = [row.ratio for row in self.rows]
        return float(np.corrcoef(np.argsort(np.argsort(predicted)), np.argsort(np.argsort(measured)))[0, 1])


def layouts(
    program: Program,
    machine: Cluster,
    *,
    mesh: MeshShape | None = None,
    top: int | None = None,
    every: bool = False,
    remat: str | None = None,
) -> Search:
    """Returns the layouts to compare with their predicted costs, cheapest first, with one stage and one microbatch.

    These are the `CHEAPEST` and the cheapest of each single strategy (`data`, `fsdp`, `tensor`, ...); `rejected` counts
    the rest as `PRUNED`.

    Args:
      program: the traced program.
      machine: the devices.
      mesh: restricts the comparison to all layouts on this mesh.
      top: the number of cheapest layouts to compare instead.
      every: whether to compare all layouts instead.
      remat: the policy of all layouts. Default: that of the planner's choice.

    Raises:
      SpanaxError: no layout can run, the mesh is invalid, or both `top` and `every` are requested.
    """
    check_pruning(top, every)
    planner_search = searched(program, machine, Request(pipeline=False, pad="none", offload=()))
    planned = next(iter(planner_search.programs.values()))
    remat = remat or (planned.remat if planner_search.best is None else planner_search.best.remat)
    searched_layouts = search(
        planned,
        machine,
        remat=(remat,),
        pipeline=False,
        mesh=mesh,
        microbatches=1,
        top=EVERY,
        attention="plain",
        assign=False,
    )
    if not searched_layouts.candidates:
        raise NoLayoutError(
            f"no layout of this workload can run on {machine}" + (f" as {mesh}." if mesh else "."),
            where=f"a batch of {searched_layouts.batch_size}; "
            + "; ".join(
                f"left out {count}: {reason}"
                for reason, count in sorted((str(reason), count) for reason, count in searched_layouts.rejected.items())
            ),
            fix="another --mesh or --global-batch-size",
        )
    if top is not None:
        chosen = searched_layouts.candidates[:top]
    elif every or mesh is not None:
        chosen = searched_layouts.candidates
    else:
        chosen = pruned(searched_layouts.candidates)
    num_pruned = len(searched_layouts.candidates) - len(chosen)
    rejected = {**searched_layouts.rejected, PRUNED: num_pruned} if num_pruned else searched_layouts.rejected
    return replace(searched_layouts, candidates=chosen, rejected=rejected)


def check_pruning(top: int | None, every: bool) -> None:
    """Raises SpanaxError if both `top` and `every` of `layouts` are requested."""
    if top is not None and every:
        raise ConflictError(f"--top {top} compares the cheapest layouts, and --all compares all.", fix="one of the two")


def pruned(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Returns the `CHEAPEST` of some candidates and the first of each single strategy, in their order.

    A single strategy is a preset without `+` in its name.
    """
    selected = []
    singles = {name for name in PRESETS if "+" not in name}
    for rank, candidate in enumerate(candidates):
        if rank < CHEAPEST or candidate.layout in singles:
            selected.append(candidate)
        singles.discard(candidate.layout)
    return tuple(selected)


def compare(
    search_result: Search,
    *,
    steps: int = 10,
    devices: Sequence[Any] | None = None,
    seed: int = 0,
) -> tuple[Compared, ...]:
    """Runs all candidates of a search in rounds of one step each, and returns them fastest first.

    All runs start from the same parameters and use the same batch. The order changes in each round, so that temporary
    slowdowns of the machine affect all layouts alike.

    Args:
      search_result: the result of `layouts`.
      steps: the number of timed steps per layout.
      devices: the devices; by default, all devices of this process.
      seed: the seed of the parameters, the batch and the order.

    Raises:
      SpanaxError: `steps` is less than 1, or the layouts do not fit in memory at the same time.

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
        raise RangeError(f"--steps is {steps}; expected an integer >= 1.", fix="--steps 10")
    program = next(iter(search_result.programs.values()))
    plans = [plan_of(search_result, candidate) for candidate in search_result.candidates]
    _check_memory(plans)
    batch = example_batch(program, seed)
    runs, compiled = _started_runs(program, plans, devices, seed, batch)
    seconds, core_seconds = ([list[float]() for _ in runs] for _ in range(2))
    order = list(range(len(runs)))
    for step in range(1, steps + 1):
        doing(f"step {step} of {steps}")
        random.Random(seed + step).shuffle(order)
        for index in order:
            start = time.process_time()
            seconds[index].append(_step_seconds(runs[index], batch))
            core_seconds[index].append(time.process_time() - start)
    best = min(range(len(runs)), key=lambda index: statistics.median(seconds[index]))
    rows = []
    for index, candidate in enumerate(search_result.candidates):
        memory = compiled[index].memory_analysis()
        ratio = statistics.median(
            current / fastest for current, fastest in zip(seconds[index], seconds[best], strict=True)
        )
        rows.append(
            Compared(
                candidate=candidate,
                state_bytes=plans[index].state_bytes(),
                seconds=tuple(seconds[index]),
                core_seconds=tuple(core_seconds[index]),
                ratio=ratio,
                compiled_state_bytes=memory.argument_size_in_bytes,
                compiled_peak_bytes=_peak_bytes(memory),
                moved=_moved(compiled[index], plans[index].mesh),
                collectives=evaluated(search_result, candidate).collectives,
            )
        )
    return tuple(sorted(rows, key=lambda row: (row.ratio, row.step_seconds)))


def _moved(compiled: Any, mesh: MeshShape) -> Moved:
    (module,) = compiled.runtime_executable().hlo_modules()
    return totals(collectives(module.as_serialized_hlo_module_proto(), mesh))


def _started_runs(
    program: Program,
    plans: Sequence[Plan],
    devices: Sequence[Any] | None,
    seed: int,
    batch: Any,
) -> tuple[list[Run], list[Any]]:
    """Returns the runs of all plans, with the same initial parameters and after `WARM_UP` steps, and their programs."""
    runs: list[Run] = []
    compiled = []
    initial: list[Any] = []
    for count, plan in enumerate(plans, 1):
        doing(f"compiling {count} of {len(plans)}: {plan.title}")
        if not runs:
            run = start(program, plan, seed=seed, devices=devices)
            initial = [array.copy() for array in run.state]
        else:
            mesh = plan.mesh.build(devices)
            pairs = zip(initial, plan.leaves, strict=True)
            # Copies, because `device_put` to an equal sharding would share arrays that a step then donates.
            run = Run(program, plan, mesh, [jax.device_put(a, leaf.sharding(mesh)).copy() for a, leaf in pairs])
            assert_placed(plan, run.state, mesh)
        compiled.append(run.compile())
        for _ in range(WARM_UP):
            _step_seconds(run, batch)
        runs.append(run)
    return runs, compiled


def _step_seconds(run: Run, batch: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run.step(batch))
    jax.block_until_ready(run.state)
    return time.perf_counter() - start


def _peak_bytes(memory: Any) -> int:
    """Returns the bytes per device of a step's arguments, outputs and temporaries; donated arrays count once."""
    num_bytes = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(num_bytes + memory.temp_size_in_bytes)


def _check_memory(plans: Sequence[Plan]) -> None:
    """Raises SpanaxError if the states of all layouts do not fit in the memory that simulated devices share."""
    if jax.devices()[0].platform != "cpu":
        return
    needed = sum(plan.mesh.size * plan.state_bytes() for plan in plans)
    free = free_bytes()
    if needed > free / 2:
        raise CapacityError(
            f"{len(plans)} layouts need {bytes_text(needed)} at once, but {bytes_text(free)} are available.",
            fix=f"--top {max(1, int(len(plans) * free / 2 / needed))}, or one --mesh",
        )
