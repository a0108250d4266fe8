"""Candidate: a layout with its cost. Search: the result of a search."""

import math
from dataclasses import dataclass, field, replace

import numpy as np

from spanax.displays import display
from spanax.errors import SpanaxError, first_line
from spanax.hardware.cluster import Cluster
from spanax.hardware.flags import default_flags
from spanax.hardware.mesh import MeshShape
from spanax.plan.cost.peak_memory import MemoryUse
from spanax.plan.cost.step_time import Costs, Grid
from spanax.plan.defaults import RATIO_ERROR, contraction_dtypes
from spanax.plan.layout import Layout
from spanax.plan.pipeline.stages import mesh_of_stages
from spanax.plan.place import as_planned, placed
from spanax.plan.plan import Plan, Schedule
from spanax.plan.presets import context_word, in_words, name_in_stages
from spanax.plan.reason import Code, Reason
from spanax.plan.setting import Setting, attention_names, sequence_lengths
from spanax.plan.sharding.assign import Pins
from spanax.plan.space import layout_on
from spanax.trace.jaxpr.remat_policies import AS_WRITTEN, GATHERED
from spanax.trace.pipeline.partition import check_order_invariant, pipeline_partition
from spanax.trace.program import Program
from spanax.trace.rewrites.attention.fuse import FusedAttention
from spanax.units import bytes_text


@dataclass(frozen=True)
class Candidate:
    """One layout with its cost. Bytes and seconds are per device and per step.

    `layout` and `whole_mesh` are its names in `--layout` and `--mesh`; `mesh` is that of one stage.
    `memory` is device memory by group, and `upper_bytes` the upper estimate of their sum, by which the layout fits.
    `host_bytes` is the offloaded state in host memory. `hidden` are seconds of communication by term that run during
    computation; `step_seconds` excludes them.
    `assigned` is the layout where a local search changed a preset. `repeats_most` is as in `Costs`.
    """

    layout: str
    storing: str
    sequence: bool
    mesh: MeshShape
    num_stages: int
    schedule: str
    num_chunks: int
    remat: str
    microbatches: int
    step_seconds: float
    seconds: dict[str, float]
    memory: dict[str, int]
    flops: float
    hidden: dict[str, float] = field(default_factory=dict)
    context: str = GATHERED
    assigned: Layout | None = None
    host_bytes: int = 0
    upper_bytes: int = 0
    repeats_most: bool = False

    @staticmethod
    def of(
        layout: Layout,
        storing: str,
        mesh: MeshShape,
        program: Program,
        grid: Grid,
        costs: Costs,
        memory: MemoryUse,
        index: int = 0,
    ) -> "Candidate":
        """Returns the candidate of one entry of a priced grid."""
        name = in_words(layout.name, context_word(program))
        return Candidate(
            layout=name_in_stages(name) if grid.num_stages[index] > 1 else name,
            storing=storing,
            sequence=layout.sequence_axis is not None,
            mesh=mesh,
            num_stages=int(grid.num_stages[index]),
            schedule=grid.schedule,
            num_chunks=grid.num_chunks,
            remat=program.remat,
            microbatches=int(grid.num_microbatches[index]),
            step_seconds=float(costs.step_seconds[index]),
            seconds={name: float(values[index]) for name, values in costs.terms.items()},
            memory={name: rounded_up(values[index]) for name, values in memory.groups.items()},
            flops=float(costs.flops[index]),
            hidden={name: float(values[index]) for name, values in costs.hidden.items()},
            context=program.context,
            host_bytes=rounded_up(memory.host_bytes[index]),
            upper_bytes=rounded_up(memory.upper_bytes[index]),
            repeats_most=bool(costs.repeats_most[index]),
        )

    @property
    def assignment(self) -> Layout:
        """The named axes that each mesh axis shards."""
        return self.assigned or layout_on(self.storing, self.sequence, self.mesh)

    @property
    def peak_bytes(self) -> int:
        """Peak bytes."""
        return sum(self.memory.values())

    @property
    def state_bytes(self) -> int:
        """Bytes of the state, which persists between steps and is what restoring a checkpoint allocates."""
        return sum(self.memory[name] for name in ("parameters", "optimizer", "other state"))

    @property
    def whole_mesh(self) -> MeshShape:
        """The mesh of all stages."""
        return mesh_of_stages(self.mesh, self.num_stages)

    @property
    def title(self) -> str:
        """The layout and the mesh, as a plan has them."""
        return f"{self.layout} on {self.whole_mesh}"

    @property
    def stages_text(self) -> str:
        """The number of stages and their schedule; empty without stages."""
        chunks = f", {self.num_chunks} chunks" if self.num_chunks > 1 else ""
        return f"{self.num_stages} {self.schedule}{chunks}" if self.num_stages > 1 else ""

    @property
    def bottleneck(self) -> str:
        """The largest term of the step time, as a sentence."""
        name, seconds = max(self.seconds.items(), key=lambda item: item[1])
        return f"{100 * seconds / self.step_seconds:.0f} % of the step goes to {name}"


@dataclass(frozen=True)
class Rates:
    """The speed of a candidate; MFU is a fraction, None where the peak of the chip is unknown.

    It counts the masked scores that an attention kernel skips, as is the convention (PaLM, appendix B).
    """

    examples_per_second: float
    tokens_per_second: float | None
    mfu: float | None


@dataclass(frozen=True)
class Search:
    """The result of a search: candidates by step time, fastest first, and the number of rejected layouts by reason.

    Attributes:
      too_large: the fastest layouts that do not fit.
      nearest: the layouts with the lowest peak memory, if none fits.
      model_flops: FLOPs of a step on all devices.
      dtype: the dtype of most of these FLOPs.
      programs: the program under each remat policy.
      attention: the outcome for each attention for which a kernel was requested.
      requested: why only these layouts were searched; None if all were.
      logits: the best number of chunks of the logits, and why.
      assignment: why the best layout is not a preset; None if it is.
      alternative: why axes are padded, or state is offloaded, without a request; None otherwise.
      offload: the kinds of state in host memory, for every candidate.
      saved_values: why a remat policy lists the values to save without a request; None where it does not.
      dtype_reason: why the loss is not computed in the default dtype of the cluster; None if it is, or on request.

    Example:
      >>> import jax, optax, spanax
      >>> from flax import nnx
      >>> program = spanax.trace(
      ...     build=lambda rngs: nnx.Linear(1024, 1024, rngs=rngs),
      ...     optimizer=optax.sgd(0.1),
      ...     batch=jax.ShapeDtypeStruct((4096, 1024), "float32"),
      ...     loss=lambda model, x: (model(x) ** 2).mean(),
      ... )
      >>> result = spanax.search(program, spanax.cluster("a100:8"), layout="data", remat=("none",))
      >>> result.best.layout, result.best.mesh, sorted(map(str, result.rejected))
      ('data', data=8, ['another layout or mesh was requested', 'storage would shard no array'])
    """

    cluster: Cluster = field(repr=False)
    batch_size: int
    candidates: tuple[Candidate, ...] = field(repr=False)
    nearest: tuple[Candidate, ...] = field(repr=False)
    rejected: dict[Reason, int]
    layouts_priced: int
    model_flops: float
    dtype: str
    trace_seconds: float
    search_seconds: float
    programs: dict[str, Program] = field(repr=False, compare=False)
    pins: Pins = field(default_factory=dict)
    too_large: tuple[Candidate, ...] = field(default=(), repr=False)
    attention: tuple[FusedAttention, ...] = ()
    requested: Reason | None = None
    logits: Reason | None = None
    assignment: Reason | None = None
    alternative: Reason | None = None
    offload: tuple[str, ...] = ()
    saved_values: Reason | None = None
    dtype_reason: Reason | None = None

    def _repr_html_(self) -> str:
        return display(self)

    @property
    def counts_all_experts(self) -> bool:
        """Whether `model_flops` includes unchosen experts: the program does not show which experts tokens use."""
        return not next(iter(self.programs.values())).step.active.is_exact

    @property
    def peak_flops(self) -> float:
        """Peak FLOPs per second of one device in `dtype`; 0 if unknown."""
        return self.cluster.chip.peak_flops.get(self.dtype, 0.0)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint: the state, without replicas."""
        return sum(leaf.num_bytes for leaf in next(iter(self.programs.values())).leaves)

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens in a batch of rows of integers; None for any other batch."""
        program = next(iter(self.programs.values()))
        first, dim = next(zip(program.batch, program.step.axes.examples, strict=True), (None, None))
        is_rows = first is not None and len(first.shape) == 2 and np.issubdtype(first.dtype, np.integer)
        return self.batch_size * first.shape[1 - (dim or 0)] if first is not None and is_rows else None

    @property
    def setting(self) -> Setting:
        """The batch, sequence and dtype of every candidate, and the attention of the best."""
        program = next(iter(self.programs.values()))
        context = self.best.context if self.best else program.context
        return Setting(
            batch_size=self.batch_size,
            sequence_lengths=sequence_lengths(program.batch),
            dtypes=contraction_dtypes(program),
            attention=attention_names(
                context, [axis.name for axis in program.axes], [each.kernel for each in self.attention]
            ),
        )

    def rates(self, candidate: Candidate) -> Rates:
        """Returns the speed of a candidate; MFU counts the FLOPs of the model, and none of recomputation."""
        seconds = candidate.step_seconds
        num_devices = self.cluster.num_devices
        peak = num_devices * self.peak_flops * seconds
        return Rates(
            examples_per_second=self.batch_size / seconds,
            tokens_per_second=self.tokens_per_step / seconds if self.tokens_per_step else None,
            mfu=self.model_flops / peak if peak else None,
        )

    def program_of(self, candidate: Candidate) -> Program:
        """Returns the program of a candidate, with its remat policy and its attention."""
        program = self.programs[candidate.remat]
        return program.variant(context=candidate.context)

    @property
    def best(self) -> Candidate | None:
        """The fastest candidate that fits, or None."""
        return self.candidates[0] if self.candidates else None

    @property
    def runner_up(self) -> Candidate | None:
        """The candidate after the best, if their step times differ by less than the error of predictions, or None."""
        if len(self.candidates) < 2:
            return None
        first, second = (candidate.step_seconds for candidate in self.candidates[:2])
        return self.candidates[1] if abs(second / first - 1) < RATIO_ERROR else None


def shortfall(search: Search) -> str:
    """Returns why nothing fits, as a sentence: the lowest peak of any layout, and the memory of a device."""
    if not search.nearest or search.cluster.memory_bytes is None:
        return "no layout divides these devices and this batch"
    needed = search.nearest[0].upper_bytes
    limit = bytes_text(search.cluster.memory_bytes)
    return f"the layout with the lowest peak needs {bytes_text(needed)} per device, and a device has {limit}"


def plan_of(search: Search, candidate: Candidate) -> Plan:
    """Returns the plan of a candidate, which trains, saves and compares like any other."""
    program = search.program_of(candidate)
    plan = placed(
        program,
        candidate.assignment,
        candidate.mesh,
        pins=search.pins,
        why="as priced",
        schedule=Schedule(
            remat=None if candidate.remat == AS_WRITTEN else candidate.remat,
            compute_dtype=program.compute_dtype,
            quantize=program.options.quantize,
            microbatches=candidate.microbatches,
            num_stages=candidate.num_stages,
            num_chunks=candidate.num_chunks,
            pipeline=candidate.schedule,
            context=candidate.context,
            loss_chunks=program.loss_chunks,
            padded=program.options.padded,
            offload=search.offload,
        ),
    )
    return replace(plan, xla_flags=default_flags(search.cluster, plan.param_axes))


def refused_stages(result: Search) -> Reason | None:
    """Returns why the best layout of a search cannot run in its stages; None if it can, or has none."""
    if result.best is None or result.best.num_stages == 1:
        return None
    plan = plan_of(result, result.best)
    code = Code.NO_STAGES
    try:
        step = as_planned(result.program_of(result.best), plan).step
        partition = pipeline_partition(step, plan.schedule.microbatches)
        code = Code.NO_CHUNKS
        if plan.schedule.num_chunks > 1:
            check_order_invariant(step, partition)
    except SpanaxError as error:
        return Reason(code, detail=first_line(error))
    return None


def rounded_up(num_bytes: float) -> int:
    """Returns the bytes as an integer, rounded up beyond floating-point error."""
    return math.ceil(round(float(num_bytes), 3))
