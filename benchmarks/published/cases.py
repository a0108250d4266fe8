"""A published run as the planner sees it: cluster, mesh, layout, microbatches and software, ready to be priced."""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from published.decoder import Shape, padded, program_of, shape_of
from published.launches import launched
from published.machine import cluster_of
from published.rows import Row, Skipped, step_seconds
from published.runtime import Runtime, runtime_of
from spanax.errors import SpanaxError
from spanax.hardware.chips import catalogue
from spanax.hardware.cluster import Cluster
from spanax.plan.cost.roofline import NARROW
from spanax.plan.sharding.resolve import resolve
from spanax.plan.space import layout_on, mesh_of
from spanax.plan.spmd.count_terms import count_terms
from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.plan.spmd.terms import KINDS, Terms
from spanax.trace.analysis.op_groups import Phase

TRACED = 16
"""The traced batch is a multiple of it, and of every number of batch shards: a batch of one would be no axis."""

PADS = ("megatron", "deepspeed", "nemo")


@dataclass(frozen=True, eq=False)
class Case:
    """A run ready to be priced."""

    row: Row
    shape: Shape
    cluster: Cluster
    terms: Terms
    sizes: tuple[int, ...]
    num_microbatches: int
    scale: float
    runtime: Runtime
    redone: str
    gathers_again: bool
    measured_seconds: float


def remat_of(row: Row, runtime: Runtime) -> tuple[str, str]:
    """Returns the policy under which a run is traced, and whether the layers' forward pass is repeated as written.

    PyTorch's checkpoints repeat all of it. MaxText's `minimal` saves the results of matmuls; its policies in between
    count as the nearer of `dots` and `full`. Megatron's `selective` forgets attention scores only, which a fused kernel
    does not save anyway. That of PyTorch's FSDP saves every second matmul, or checkpoints some of the blocks: half of
    the forward pass is repeated (torchtitan, `selective_ac_option`).
    """
    stated = row.text.get("remat", "").lower() or noted_remat(row)
    if not stated or re.match(r"none|no\b|false|off", stated):
        return "none", ""
    if runtime.compiler == "xla":
        return (
            "dots" if re.match(r"minimal|dots|selective|save_dot_with|save_dot_except_mlpwi", stated) else "full"
        ), ""
    if "selective" in stated:
        if runtime.family == "fsdp":
            return "none", "half"
        return ("none" if runtime.fused_attention else "dots"), ""
    return "none", "all"


def noted_remat(row: Row) -> str:
    """Returns the policy that a row's notes name, in lower case; empty where they name none."""
    noted = re.search(r"\bremat(?:_policy)?[ =:]+'?([\w-]+)", row.text.get("notes", "").lower())
    return noted[1] if noted else ""


def degrees_of(row: Row, compiler: str) -> tuple[tuple[int, ...], str]:
    """Returns the sizes of AXES, and what is stored sharded over `fsdp`.

    In a pipeline PyTorch's FSDP keeps what it gathered from one microbatch to the next, as below stage 3.

    Raises:
      Skipped: the degrees contradict each other.
    """
    shards, stage = row.batch_shards, row.zero_stage
    fsdp = row.fsdp if row.fsdp is not None else (shards if stage else 1)
    if row.fsdp is None and stage and row.data is not None and row.data < shards:
        raise Skipped("the degrees do not multiply to the devices")
    if shards % fsdp or (row.data is not None and row.data not in (shards, shards // fsdp)):
        raise Skipped("the degrees do not multiply to the devices")
    storing = {1: "zero1", 2: "zero2"}.get(stage or 3, "fsdp")
    if storing == "fsdp" and row.stages > 1 and compiler != "xla":
        storing = "zero2"
    if row.expert == 1:
        return (shards // fsdp, fsdp, 1, row.context, row.tensor), storing
    # Experts are sharded over devices with different examples; degrees beyond these go over tensor parallelism.
    expert = math.gcd(row.expert, shards)
    if row.expert % expert or (row.tensor * row.context) % (row.expert // expert):
        raise Skipped("the expert degree does not divide the devices of a stage")
    return (1, shards // expert, expert, row.context, row.tensor), storing if row.zero_stage else "zero1"


def batch_of(row: Row, compiler: str) -> tuple[int, int]:
    """Returns the sequences of a step, and the number of microbatches of each device's shard of them.

    A compiled JAX step takes the batch at once unless it states otherwise. torchtitan's pipeline cuts its local batch
    into single sequences.

    Raises:
      Skipped: it is not stated, or not a multiple of the microbatch.
    """
    shards = row.batch_shards
    if row.states("torchtitan") and row.stages > 1:
        local = re.search(r"local batch (\d+)", row.text.get("notes", ""))
        size = int(local[1]) if local else row.microbatch or (row.batch // shards if row.batch else None)
        if not size:
            raise Skipped("the batch is not stated")
        return size * shards, size
    if compiler == "xla" and row.stages == 1:
        count = row.accumulated or 1
        each = row.microbatch * row.num_devices if row.microbatch and not row.batch else 0
        batch = row.batch or each * count
    else:
        batch = row.batch or (row.microbatch or 0) * shards * (row.accumulated or 1)
        each = row.microbatch or (batch // (shards * row.accumulated) if row.accumulated else 0)
        if not each and row.stages > 1:
            raise Skipped("the microbatch is not stated")
        count = batch // (each * shards) if each else 1
    if not batch:
        raise Skipped("the batch is not stated")
    is_uneven = bool(each) and compiler != "xla" and count * each * shards != batch
    if not count or batch % count or batch % shards or is_uneven:
        raise Skipped("the batch is no whole number of microbatches")
    return batch, count


def cases(rows: Sequence[Row]) -> tuple[list[Case], dict[str, str]]:
    """Returns every run that can be expressed, ready to be priced; and the reason for each of the others, by id."""
    together: dict[tuple[object, ...], list[Setting]] = defaultdict(list)
    skipped: dict[str, str] = {}
    for row in rows:
        try:
            setting = setting_of(row)
            together[setting.shape, setting.remat].append(setting)
        except Skipped as reason:
            skipped[row.id] = str(reason)
    result = []
    for alike in together.values():
        traced = math.lcm(TRACED, *(setting.row.batch_shards for setting in alike))
        known: dict[tuple[object, ...], Terms] = {}
        for setting in alike:
            try:
                result.append(case_of(setting, traced, known))
            except Skipped as reason:
                skipped[setting.row.id] = str(reason)
            except SpanaxError as error:
                skipped[setting.row.id] = refusal(error)
    return result, skipped


def refusal(error: SpanaxError) -> str:
    """Returns the reason for which rows that the planner refuses are skipped, equal for all alike."""
    return "the planner refuses it: " + re.sub(r"\d+", "N", str(error).splitlines()[0])


@dataclass(frozen=True)
class Setting:
    """What a row's program is traced with, and where it runs."""

    row: Row
    shape: Shape
    cluster: Cluster
    runtime: Runtime
    remat: str
    redone: str


def setting_of(row: Row) -> Setting:
    """Returns the shape, machine and software of a row.

    Raises:
      Skipped: one of them cannot be expressed.
    """
    shape = shape_of(row)
    if row.states(*PADS):
        shape = replace(shape, vocab_size=padded(shape.vocab_size, row.tensor))
    machine = cluster_of(row)
    runtime = runtime_of(row, machine.chip)
    return Setting(row, shape, machine, runtime, *remat_of(row, runtime))


def case_of(setting: Setting, traced: int, known: dict[tuple[object, ...], Terms]) -> Case:
    """Returns one run, ready to be priced.

    PyTorch's FSDP and DeepSpeed shard weights laid end to end, which any number of devices divides: the terms are those
    of two devices, on which every array divides, and are priced on the true number.
    """
    row, machine, compiler = setting.row, setting.cluster, setting.runtime.compiler
    sizes, storing = degrees_of(row, compiler)
    batch, count = batch_of(row, compiler)
    # Megatron Core refuses tensor and expert parallelism together without sequence parallelism.
    is_stated = row.text.get("seq_parallel", "").lower() in ("1", "1.0", "true", "yes")
    sequence = row.tensor > 1 and (is_stated or row.expert > 1)
    row = replace(row, chunks=chunks_of(row, setting.runtime, count))
    if row.chunks > 1 and count % row.stages:
        raise Skipped("interleaved stages take a multiple of their number of microbatches")
    dtype = dtype_of(row)
    if dtype not in machine.chip.peak_flops:
        raise Skipped(f"the chip's rate in {dtype} is not known")
    # An MFU is of the data sheet's rate, whatever limits the chip.
    peak = catalogue()[machine.chip.name].peak_flops["bf16" if dtype in ("fp8", "fp4") else dtype]
    seconds = step_seconds(row, batch, peak, setting.shape.matmul_params)
    resolved = sizes if compiler == "xla" else (sizes[0], min(sizes[1], 2), *sizes[2:])
    key = (resolved, storing, sequence)
    if key not in known:
        known[key] = terms_of(setting, traced, *key)
    copies, local_experts = sent_copies(setting, sizes), setting.shape.num_experts / row.expert
    variant = (*key, dtype, copies, local_experts)
    if variant not in known:
        known[variant] = launched_by(setting, in_dtype(with_copies(known[key], copies), dtype), local_experts, dtype)
    return Case(
        row=row, shape=setting.shape, cluster=machine, terms=known[variant], sizes=sizes,
        num_microbatches=count,
        scale=batch / count / traced, runtime=setting.runtime, redone=setting.redone,
        gathers_again=storing == "fsdp" and setting.runtime.family == "zero", measured_seconds=seconds,
    )  # fmt: skip


def launched_by(setting: Setting, terms: Terms, local_experts: float, dtype: str) -> Terms:
    """Returns the terms with what the host of an eager runtime launches in addition."""
    if setting.runtime.compiler != "eager":
        return terms
    layers = setting.shape.num_layers
    return launched(
        terms,
        routed_layers=layers * setting.shape.is_mixture,
        local_experts=local_experts,
        checkpointed_layers=layers * (setting.redone == "all"),
        is_cast=dtype in NARROW,
    )


def chunks_of(row: Row, runtime: Runtime, count: int) -> int:
    """Returns the chunks of each pipeline stage.

    A row that leaves them open, of a runtime that interleaves stages, has been tuned: one layer a chunk, the least idle
    time, where the number of microbatches allows it. Source: Llama 3 (arXiv 2407.21783), section 3.3.2.
    """
    if row.stages == 1:
        return 1
    is_open = not row.text.get("vpp") and runtime.interleaves and not row.states("1f1b", "gpipe")
    if is_open and count % row.stages == 0:
        return max(round(row.num_layers / row.stages), 1)
    return row.chunks


def terms_of(setting: Setting, traced: int, sizes: tuple[int, ...], storing: str, sequence: bool) -> Terms:
    """Returns the terms of a setting's step on a mesh of those sizes."""
    mesh = mesh_of(sizes)
    program = program_of(setting.shape, traced, setting.remat)
    resolver = resolve(program, layout_on(storing, sequence, mesh), mesh, {})
    terms = count_terms(ShardedProgram(resolver, program.step))
    return gathered_in_16_bits(dispatched(terms)) if setting.runtime.compiler != "xla" else terms


def gathered_in_16_bits(terms: Terms) -> Terms:
    """Returns the terms with gathers of updated weights in 16 bits: the 32-bit copy stays sharded.

    The all-reduce of 16-bit gradients before it takes as long as these runtimes' reduce-scatter in 32 bits.

    Source: Megatron-Core's distributed optimizer (docs, `dist_optimizer`): gradients in 32 bits are reduce-scattered,
    weights in 16 are gathered; Rajbhandari et al., "ZeRO" (arXiv 1910.02054), section 5.
    """
    moves = terms.collectives
    changes = (moves.phase == Phase.UPDATE) & moves.of_weights & (moves.kind == KINDS.index("all-gather"))
    return replace(terms, collectives=replace(moves, num_bytes=np.where(changes, moves.num_bytes / 2, moves.num_bytes)))


def dispatched(terms: Terms) -> Terms:
    """Returns the terms with routed tokens sent to the devices of their experts only.

    A partitioner gathers the tokens of all devices, which a program cannot state otherwise without a mesh of its own;
    the dispatchers of Megatron Core and DeepSpeed exchange them by all-to-all (megatron/core/transformer/moe).
    """
    if "expert" not in terms.axes:
        return terms
    moves, over = terms.collectives, 1 << terms.axes.index("expert")
    changes = (moves.over == over) & ~moves.of_weights & (moves.kind == KINDS.index("all-gather"))
    kind = np.where(changes, KINDS.index("all-to-all"), moves.kind)
    return replace(terms, collectives=replace(moves, kind=kind))


def sent_copies(setting: Setting, sizes: tuple[int, ...]) -> float:
    """Returns the copies of a token that are sent between nodes over its number of experts, 1 within a node.

    Dispatchers of Megatron-Core send a token once to each node with any of its k experts, and copy it there: of N nodes
    with equal loads 1 - (1 - 1 / N)^k have one.

    Source: DeepSeek-V3 (arXiv 2412.19437), section 3.2.2; Megatron-Bridge, `moe_flex_dispatcher_backend`.
    """
    nodes = math.ceil(math.prod(sizes[2:]) / setting.cluster.devices_per_node)
    if not setting.shape.is_mixture or not setting.runtime.interleaves or nodes == 1:
        return 1.0
    return nodes * (1 - (1 - 1 / nodes) ** setting.shape.experts_per_token) / setting.shape.experts_per_token


def with_copies(terms: Terms, copies: float) -> Terms:
    """Returns the terms with a share of the bytes between experts."""
    moves = terms.collectives
    num_bytes = np.where(moves.kind == KINDS.index("all-to-all"), copies * moves.num_bytes, moves.num_bytes)
    return replace(terms, collectives=replace(moves, num_bytes=num_bytes))


def dtype_of(row: Row) -> str:
    """Returns what the layers' matmuls compute in."""
    stated = row.text.get("precision", "").lower()
    if re.search(r"fp4|int4", stated):
        return "fp4"
    if re.search(r"fp8|float8|mxfp8", stated):
        return "fp8"
    return "fp16" if "fp16" in stated or "float16" in stated.replace("bfloat16", "") else "bf16"


def in_dtype(terms: Terms, dtype: str) -> Terms:
    """Returns the terms with matmuls in another dtype: in fp16 all of them, in fewer bits those of layers' weights."""
    matmuls = terms.matmuls
    num = len(matmuls.dtypes)
    changes = np.ones(num, bool) if dtype == "fp16" else matmuls.in_layers & ~matmuls.scores.any(1)
    names = tuple(dtype if name == "bf16" and yes else name for name, yes in zip(matmuls.dtypes, changes, strict=True))
    return replace(terms, matmuls=replace(matmuls, dtypes=names))
