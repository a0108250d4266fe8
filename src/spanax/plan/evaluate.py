"""Predicts what a layout costs: step time, peak memory and collectives, per device and per step.

`evaluate` prices one plan. `LayoutCosts` prices one layout on many meshes and schedules at once, for the search.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from spanax.hardware.cluster import Cluster
from spanax.plan.candidate import Candidate, Search, plan_of
from spanax.plan.cost.calibration import Assumptions
from spanax.plan.cost.memory.state import OFFLOADED, State, state_of
from spanax.plan.cost.memory.tiles import OnChip
from spanax.plan.cost.overlap import ONCE
from spanax.plan.cost.peak_memory import Level, MemoryUse, memory_per_device, ring_memory, walk
from spanax.plan.cost.roofline import shard_counts
from spanax.plan.cost.step_time import Costs, Grid, GridTable, Table, price, row_seconds
from spanax.plan.cost.transfers import HOST_TRANSFERS, exchange_rounds, stage_transfers
from spanax.plan.pipeline.stages import AXIS, inside_stage
from spanax.plan.pipeline.ticks import ticks_of
from spanax.plan.place import as_planned, in_variant, resolver_of
from spanax.plan.plan import Plan, Prediction, path_pattern
from spanax.plan.sharding.layer_partition import shares
from spanax.plan.space import storing_of
from spanax.plan.spmd.compiler import Compiler
from spanax.plan.spmd.count_terms import collectives_by_value, count_terms, matmuls_by_group
from spanax.plan.spmd.deferred_reductions import DeferredReductions, deferred_reductions, unreduced
from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.plan.spmd.terms import HOP, MemoryTraffic, Terms, table
from spanax.plan.spmd.value_names import axes_text, value_names
from spanax.trace.analysis.op_groups import Phase
from spanax.trace.jaxpr.graph import OWN_KERNEL
from spanax.trace.pipeline.partition import pipeline_partition
from spanax.trace.program import Program
from spanax.trace.rewrites.attention.operation import FORWARD, attention_flops

MOST = 64
"""The largest number of groups of equal parameters whose collectives are counted, by size."""

Moved = dict[str, dict[str, int]]
"""Bytes of the results of collectives, by mesh axes and kind of collective."""


@dataclass(frozen=True, eq=False)
class LayoutCosts:
    """The costs of one microbatch of a step under one layout, on any mesh on which the layout resolves equally.

    Attributes:
      sharded: the program of one microbatch under the layout.
      state: its state, sharded.
      cluster: the devices.
      assumptions: constants that are not in data sheets.
      equal: a layout of the same program with the same signature, if known: only its state may differ.
      other_ring: the same layout on a mesh with rings of another size, if known.
    """

    sharded: ShardedProgram
    state: State
    cluster: Cluster
    assumptions: Assumptions
    equal: "LayoutCosts | None" = None
    other_ring: "LayoutCosts | None" = None

    @cached_property
    def terms(self) -> Terms:
        """The cost terms."""
        if self.equal is not None:
            return self.equal.terms
        compiler = Compiler.of(self.cluster)
        late = deferred_reductions(self.sharded)
        return count_terms(self.sharded, compiler=compiler, late=late)

    @cached_property
    def level(self) -> Level:
        """The moments at which memory may peak."""
        if self.equal is not None:
            return self.equal.level
        if self.other_ring is not None and ring_memory(self.sharded) == ring_memory(self.other_ring.sharded):
            return self.other_ring.level
        return walk(self.sharded, is_tpu=self.cluster.is_torus, has_host=not self.cluster.chip.shared)

    def memory(self, grids: Sequence[Grid]) -> list[MemoryUse]:
        """Returns the peak memory per device on every mesh of some grids."""
        on_chip = OnChip.of(self.cluster.chip)
        fused = self.assumptions.fused_attention
        return memory_per_device(self.state, self.level, grids, fused_attention=fused, on_chip=on_chip)

    def costs(self, grid: Grid, table: GridTable | None = None) -> Costs:
        """Returns the step time on every mesh of a grid; `table` caches matmuls and links of many layouts."""
        table = table or Table(self.cluster, self.terms.axes, [grid], self.assumptions).select(grid)
        costs = price(self.terms, self.cluster, grid, self.assumptions, table)
        if (grid.num_stages > 1).any():
            # The first and the last stage add up their gradients of what is outside of the layers, for all stages.
            ends = self.state.local_bytes("gradient", shard_counts(grid.sizes), grid.shares, outside=True)
            rounds = np.where(grid.num_stages > 1, exchange_rounds(grid.num_stages) + 1, 0)
            costs = costs.plus(ONCE, rounds * table.hop_seconds(ends))
        chip = self.cluster.chip
        if OFFLOADED not in self.state.kind:
            return costs
        # Once per step, copied to the device and back. Compilers order both around the update: nothing hides them.
        moved = 2 * self.state.local_bytes(OFFLOADED, shard_counts(grid.sizes), grid.shares)
        return costs.plus(HOST_TRANSFERS, chip.host_seconds(moved))


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The predicted cost of one plan on a cluster; `evaluate` returns it. Each figure is computed on first access.

    Attributes:
      program: the program that the plan was made for.
      plan: the plan.
      cluster: the devices.
      assumptions: constants that are not in data sheets.
      adds_first: whether the compiler adds partial sums before it all-reduces them, as in `Compiler`.
      scale: the batch over that of the program, for the cost of one step.
    """

    program: Program
    plan: Plan
    cluster: Cluster
    assumptions: Assumptions
    adds_first: bool
    scale: float = 1.0

    @cached_property
    def layout(self) -> LayoutCosts:
        """The costs of one microbatch."""
        remat = self.plan.schedule.remat
        policy = self.program.options.remat if remat in (None, self.program.remat) else remat
        variant = in_variant(self.program, self.plan, remat=policy, microbatches=1)
        sharded = ShardedProgram(resolver_of(self.program, inside_stage(self.plan)).of(variant), variant.step)
        offload = priced_offload(self.cluster, self.plan.schedule.offload)
        return LayoutCosts(sharded, state_of(sharded.resolver, offload), self.cluster, self.assumptions)

    @cached_property
    def grid(self) -> Grid:
        """The mesh and the schedule of the plan."""
        schedule = self.plan.schedule
        ones = np.ones(1, int)
        count = max(schedule.microbatches, self.program.microbatches)
        sizes = np.asarray([[size] for _, size in inside_stage(self.plan).mesh.axes])
        stages = ones * schedule.num_stages
        num_layers = self.program.step.layer_carry[1]
        return Grid(
            sizes, stages, ones * count, self.scale * ones / count, schedule.pipeline, schedule.num_chunks, num_layers
        )

    @cached_property
    def memory(self) -> MemoryUse:
        """The peak memory per device, by group; arrays of shape (1,)."""
        return self.layout.memory([self.grid])[0]

    @property
    def peak_bytes(self) -> float:
        """The peak memory per device."""
        return float(self.memory.peak_bytes[0])

    @property
    def fits(self) -> bool:
        """Whether the upper estimate of the peak memory fits into that of a device, if its size is known."""
        limit = self.cluster.memory_bytes
        return limit is None or float(self.memory.upper_bytes[0]) <= limit

    @cached_property
    def candidate(self) -> Candidate:
        """The plan as a candidate of a search, whatever the names of its mesh axes."""
        costs = self.layout.costs(self.grid)
        plan = self.plan
        program = self.layout.sharded.resolver.program
        mesh = inside_stage(plan).mesh
        return Candidate.of(plan.layout, storing_of(plan.layout), mesh, program, self.grid, costs, self.memory)

    @cached_property
    def step(self) -> ShardedProgram:
        """The step as it would run, with all its microbatches, sharded inside one stage."""
        planned = as_planned(self.program, self.plan)
        return ShardedProgram(resolver_of(self.program, inside_stage(self.plan)).of(planned), planned.step)

    @cached_property
    def terms(self) -> Terms:
        """The cost terms of `step`."""
        return count_terms(self.step, compiler=self._compiler, late=self._late)

    @property
    def matmul_flops(self) -> float:
        """FLOPs of the matmuls of `step`; those of attention kernels only in programs for simulated devices.

        In final programs (`adds_first`) kernels are opaque calls, whose FLOPs no compiler states.
        """
        matmuls = self.terms.matmuls
        runs = np.where(matmuls.fused & self.adds_first, 0, matmuls.runs)
        sizes = np.asarray([[size] for _, size in inside_stage(self.plan).mesh.axes], float)
        stages = np.where(matmuls.in_layers, self._num_shares, 1)
        return float((matmuls.flops * runs / shard_counts(sizes)[matmuls.work, 0] / stages).sum())

    @property
    def collectives(self) -> Moved:
        """Bytes of all collectives of `step`, including transfers between stages."""
        sent = self._sent.total()
        return self._by_axes(self.terms) | ({AXIS: {HOP: sent}} if sent else {})

    def collectives_of(self, path: str) -> Moved:
        """Returns the bytes of the collectives of one leaf of the state, its gradient and its update."""
        program = self.step.resolver.program
        values = self.step.traced.leaf_aliases([leaf.path for leaf in program.leaves].index(path))
        return self._by_axes(count_terms(self.step, values, compiler=self._compiler, late=self._late))

    @property
    def collectives_at(self) -> dict[str, Moved]:
        """Bytes of `collectives` by the phase and the name of the value that moves."""
        counted = collectives_by_value(self.step, compiler=self._compiler, late=self._late)
        rows = [(place, self._by_axes(replace(self.terms, collectives=each))) for place, each in counted.items()]
        rows += [(place, {AXIS: {HOP: num_bytes}}) for place, num_bytes in self._sent.items()]
        names = value_names(self.step, {value for (value, _), _ in rows})
        result: dict[str, Moved] = {}
        for (value, phase), by_axes in rows:
            moved = result.setdefault(f"{phase.name.lower()} {names[value]}", {}) if by_axes else {}
            for axes, kinds in by_axes.items():
                for kind, num_bytes in kinds.items():
                    moved.setdefault(axes, {})[kind] = moved.get(axes, {}).get(kind, 0) + num_bytes
        return result

    @property
    def seconds_at(self) -> dict[str, float]:
        """Seconds of computation in a step, by term, phase and value, as `matmuls: forward batch,seq,mlp at mlp.py:8`.

        A matmul has the value that it computes; memory traffic has the axes of the values that kernels read and write.
        """
        sharded = self.layout.sharded
        traced = sharded.traced
        groups, matmuls = matmuls_by_group(sharded, compiler=Compiler.of(self.cluster))
        touched = traced.touched_bytes
        rows = [(num_bytes, sharded.axes_of(number), *place) for number, place, num_bytes in touched]
        traffic = table(MemoryTraffic, rows, kernels=self.layout.terms.memory_traffic.kernels)
        terms = replace(self.layout.terms, matmuls=matmuls, memory_traffic=traffic)
        seconds = row_seconds(terms, self.cluster, self.grid, self.assumptions)
        names = value_names(sharded, {op.outputs[0] for group in groups for op, _ in group.ops})
        result: Counter[str] = Counter()
        for group, (row,) in zip(groups, seconds.matmuls.tolist(), strict=True):
            for op, runs in group.ops:
                result[_at("matmuls", group.phase, names[op.outputs[0]])] += row * runs / group.runs
        for (number, place, _), (row,) in zip(touched, seconds.memory.tolist(), strict=True):
            axes = axes_text(sharded, traced.first_values[number])
            result[_at("memory", Phase(place[1]), axes)] += row
        for phase, (row,) in zip(Phase, seconds.kernels.tolist(), strict=True):
            result[_at("kernel starts", phase, "all kernels")] += row
        return dict(result)

    @property
    def prediction(self) -> Prediction | None:
        """The cost that is stored with the plan; None on a chip of unknown speed."""
        return self.prediction_as(self.candidate) if self.cluster.chip.peak_flops else None

    def prediction_as(self, candidate: Candidate) -> Prediction | None:
        """Returns `prediction` with the costs of a search's candidate, which is priced with its family of meshes."""
        peak_flops = self.cluster.chip.peak_flops
        if not peak_flops:
            return None
        peak = self.cluster.num_devices * peak_flops.get(main_dtype(self.terms), 0.0) * candidate.step_seconds
        return Prediction(
            cluster=str(self.cluster),
            step_seconds=candidate.step_seconds,
            seconds=candidate.seconds,
            memory=candidate.memory,
            limit_bytes=self.cluster.memory_bytes,
            flops=candidate.flops,
            mfu=model_flops(self.step.resolver.program) / peak if peak else None,
            moved=self.collectives,
            moved_of={path: self.collectives_of(path) for path in _distinct_params(self.plan)},
            host_bytes=candidate.host_bytes,
            hidden=candidate.hidden,
            moved_at=self.collectives_at,
            seconds_at=self.seconds_at,
        )

    @property
    def _compiler(self) -> Compiler:
        return Compiler.of_program(self.cluster, adds_first=self.adds_first)

    @cached_property
    def _sent(self) -> Counter[tuple[int, Phase]]:
        """Bytes that one device receives from other stages, by value and phase."""
        schedule = self.plan.schedule
        if schedule.num_stages == 1:
            return Counter()
        cut = pipeline_partition(self.step.traced, schedule.microbatches)
        return stage_transfers(self.step.resolver, cut, ticks_of(schedule))

    @cached_property
    def _late(self) -> DeferredReductions:
        return unreduced(self.step, self.plan.schedule)

    @property
    def _num_shares(self) -> float:
        """The number of parts that the layers are divided into, padding included."""
        schedule = self.plan.schedule
        return float(shares(self.step.traced.layer_carry[1], schedule.num_stages, schedule.num_chunks))

    def _by_axes(self, terms: Terms) -> Moved:
        result: Moved = {}
        mesh = inside_stage(self.plan).mesh
        moved = terms.moved_bytes(mesh, scale=self.scale, num_stages=self._num_shares)
        for (kind, axes), num_bytes in sorted(moved.items()):
            result.setdefault(axes, {})[kind] = round(num_bytes)
        return result


def _at(term: str, phase: Phase, name: str) -> str:
    """Returns the name of a row of `seconds_at`; computation of the update is part of the term `update`."""
    if phase == Phase.UPDATE:
        return f"update: {term} {name}"
    return f"{term}: {phase.name.lower()} {name}"


def priced_offload(cluster: Cluster, offload: Sequence[str]) -> tuple[str, ...]:
    """Returns the offloaded kinds of state that have another memory than the devices: none on simulated devices."""
    return () if cluster.chip.shared else tuple(offload)


def evaluate(
    program: Program,
    plan: Plan,
    cluster: Cluster,
    assumptions: Assumptions | None = None,
    *,
    adds_first: bool | None = None,
) -> Evaluation:
    """Returns the predicted cost of a plan, per device and per step.

    Figures raise SpanaxError if the plan was made for another program, or cannot run.

    Args:
      program: the program of the plan.
      plan: the plan.
      cluster: the devices.
      assumptions: constants that are not in data sheets.
      adds_first: whether the compiler adds partial sums before it all-reduces them. Default: that of the cluster.

    Example:
      >>> import jax, optax, spanax
      >>> from flax import nnx
      >>> program = spanax.trace(
      ...     build=lambda rngs: nnx.Linear(1024, 1024, rngs=rngs),
      ...     optimizer=optax.sgd(0.1),
      ...     batch=jax.ShapeDtypeStruct((4096, 1024), "float32"),
      ...     loss=lambda model, x: (model(x) ** 2).mean(),
      ...     compute_dtype="bfloat16",
      ... )
      >>> machine = spanax.cluster("a100:8")
      >>> best = spanax.search(program, machine, remat=("none",), microbatches=1).best
      >>> candidate = evaluate(program.variant(remat="none"), spanax.plan(program, machine), machine).candidate
      >>> candidate.step_seconds == best.step_seconds, candidate.memory == best.memory
      (True, True)
      >>> plan = spanax.plan(program, machine, layout="fsdp", mesh="fsdp=8")
      >>> evaluate(program, plan, machine).prediction.moved_of["kernel"]["fsdp"]["all-gather"] == 2 * 1024 * 1024
      True
    """
    is_first = cluster.adds_first if adds_first is None else adds_first
    return Evaluation(program, plan, cluster, assumptions or Assumptions(), is_first)


def evaluated(search: Search, candidate: Candidate) -> Evaluation:
    """Returns the predicted cost of a search's candidate."""
    program = next(iter(search.programs.values()))
    evaluation = evaluate(program, plan_of(search, candidate), search.cluster)
    return replace(evaluation, scale=search.batch_size / program.batch_size)


def with_price(plan: Plan, search: Search, candidate: Candidate) -> Plan:
    """Returns the plan of a search's candidate with its predicted cost.

    Raises:
      SpanaxError: the plan cannot run.
    """
    return replace(plan, price=evaluated(search, candidate).prediction_as(candidate))


def main_dtype(terms: Terms) -> str:
    """Returns the dtype of most FLOPs of matmuls."""
    flops: Counter[str] = Counter()
    for dtype, count in zip(terms.matmuls.dtypes, terms.matmuls.flops * terms.matmuls.runs, strict=True):
        flops[dtype] += count
    return flops.most_common(1)[0][0] if flops else "fp32"


def model_flops(program: Program) -> float:
    """Returns the FLOPs of the matmuls of a step without recomputation, with unmasked attention scores.

    Of experts, those that tokens are routed to count (`StepAnalysis.active`). Frozen weights have no gradient.

    Source: the forward pass, and twice that in the backward pass: gradients of inputs and weights (PaLM, appendix B).
    """
    graph = program.step.graph
    groups = [group for group in program.step.op_groups if group.phase == Phase.FORWARD]
    others = sum(group.runs * attention_flops(graph, group.op) for group in groups if group.op.name == FORWARD)
    kernels = [group for group in groups if group.op.name == OWN_KERNEL]
    others += sum(group.runs * product.flops for group in kernels for product in group.op.params["products"])
    return 3.0 * (program.step.active.flops + others) - _frozen_share(program) * program.step.active.flops


def _frozen_share(program: Program) -> float:
    """Returns the share of the parameters that a step does not update."""
    total = sum(math.prod(leaf.shape) for leaf in program.leaves if leaf.kind == "param")
    return 1 - program.num_trained / max(1, total)


def _distinct_params(plan: Plan) -> list[str]:
    """Returns the path of the first of each group of equal parameters, largest first."""
    groups = {
        (path_pattern(leaf.path), leaf.shape, leaf.spec): leaf for leaf in reversed(plan.leaves) if leaf.kind == "param"
    }
    return [leaf.path for leaf in sorted(groups.values(), key=lambda leaf: -leaf.local_bytes)[:MOST]]
