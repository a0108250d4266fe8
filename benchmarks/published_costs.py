"""A published run as the planner sees it: cluster, mesh, layout, microbatches and software; and its price.

The price is `spanax.plan.cost.step_time.price`, as the search uses it. Software assumptions depend only on the kind of
framework: operations dispatched one by one (eager PyTorch), compiled PyTorch, or a program compiled by XLA.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from published import Row, Skipped, step_seconds
from published_models import Shape, padded, program_of, shape_of
from spanax.errors import SpanaxError
from spanax.hardware.chip import Chip
from spanax.hardware.chips import catalogue
from spanax.hardware.cluster import Cluster, cluster
from spanax.plan.cost.calibration import Assumptions
from spanax.plan.cost.step_time import Costs, Grid, price, repeated
from spanax.plan.cost.terms import Terms
from spanax.plan.sharding.resolve import resolve
from spanax.plan.space import AXES, layout_on, mesh_of
from spanax.plan.spmd.count_terms import count_terms
from spanax.plan.spmd.sharded_program import ShardedProgram

DISPATCH_SECONDS = 79e-6
"""On the host, for each kernel of the fused program, where PyTorch runs op by op. Source: --fit, as `Assumptions`."""

LOSS_PASSES = 2.9
"""How often PyTorch, op by op, goes over the logits where a fused loss goes once. Source: --fit, as `Assumptions`."""

PART_SECONDS = 15e-6
"""Of each device's part of an array that DeepSpeed's ZeRO-3 gathers or scatters: a list with one tensor a device.

Source: 10 us for PyTorch to dispatch a copy, and 4.7 us a step of NCCL's ring with 8 devices a node (tuning.cc); not
fitted, but added after the rows of Narayanan et al. (2021), table 2, had been seen.
"""

PERSISTENT_BYTES = 1e6
"""DeepSpeed gathers no smaller arrays. Source: its documentation, stage3_param_persistence_threshold."""

CHIPS = (
    (r"gb200", "gb200"), (r"\bb200", "b200"), (r"h200", "h200"), (r"gh200|h100", "h100"), (r"mi300x", "mi300x"),
    (r"a100.{0,12}40", "a100-40gb"), (r"a100", "a100-80gb"), (r"v100.{0,12}16", "v100-16gb"), (r"v100", "v100-32gb"),
    (r"\bl4\b", "l4"), (r"v5p", "v5p"), (r"v5e|v5 ?lite", "v5e"), (r"v6e|trillium", "v6e"),
    (r"tpu ?7x|tpu ?v7|ironwood", "v7"), (r"tpu ?v4|\bv4-", "v4"), (r"tpu ?v3", "v3"),
)  # fmt: skip
"""What a device's text holds, and the chip of the catalogue that it means; the first that fits."""

TRACED = 16
"""The batch that is traced is a multiple of it, and of every number of ways: a batch of one would be no axis at all."""

XLA = ("maxtext", r"\bjax\b", "axlearn", "paxml", "praxis", r"\bxla\b", r"\btpu")
COMPILED = ("compile",)
NO_FUSED_ATTENTION = (r"2019", r"2020", r"2021", r"2022", "vtrain", "mt-nlg", "mt_nlg", "zero-3")
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
    software: str
    redone: str
    gathers_again: bool
    fused_attention: bool
    measured_seconds: float


def software_of(row: Row) -> str:
    """`xla`, `compiled` or `eager`."""
    if row.says(*XLA) or "tpu" in row.text.get("device", "").lower():
        return "xla"
    return "compiled" if row.says(*COMPILED) else "eager"


def assumptions_of(
    case: Case, given: Assumptions, dispatch_seconds: float = DISPATCH_SECONDS, loss_passes: float = LOSS_PASSES
) -> Assumptions:
    """What is assumed of a run: the same for all of its kind of framework."""
    is_eager = case.software == "eager"
    return replace(
        given,
        dispatch_seconds=dispatch_seconds if is_eager else 0.0,
        touched_around=loss_passes if is_eager else 1.0,
        repeats_forward=case.redone == "all",
        gathers_again=case.gathers_again,
        fused_attention=case.fused_attention,
        causal_share=0.5 if case.fused_attention else 1.0,
    )


def listed_seconds(case: Case) -> float:
    """What DeepSpeed's ZeRO-3 takes beyond the bytes: each array goes alone, as a list with one tensor a device."""
    if not case.gathers_again:
        return 0.0
    moves = (repeated(case.terms, True) if case.redone == "all" else case.terms).collectives
    runs = moves.runs[moves.of_weights & (moves.num_bytes >= PERSISTENT_BYTES)].sum()
    return float(runs * case.num_microbatches * case.sizes[1] * PART_SECONDS)


def remat_of(row: Row, software: str, fused_attention: bool) -> tuple[str, str]:
    """The policy under which a run is traced, and whether the layers' forward pass is repeated as written.

    PyTorch's checkpoints repeat all of it. MaxText's `minimal` keeps the results of matmuls; its policies in between
    count as the nearer of `dots` and `full`. Megatron's `selective` forgets attention scores only, which a fused kernel
    does not keep anyway.
    """
    says = row.text.get("remat", "").lower()
    if not says or re.match(r"none|no\b|false|off", says):
        return "none", ""
    if software == "xla":
        return ("dots" if re.match(r"minimal|dots|selective|save_dot_with|save_dot_except_mlpwi", says) else "full"), ""
    if "selective" in says:
        return ("none" if fused_attention and not row.says("torchtitan") else "dots"), ""
    return "none", "all"


def has_fused_attention(row: Row, software: str) -> bool:
    """Whether attention scores stay on the chip: in MaxText and llm-foundry, and since 2023 in Megatron."""
    if row.says("flash", "fused attention", "llm-foundry", "torchtitan") or software == "xla":
        return True
    return not (row.says(*NO_FUSED_ATTENTION) or "v100" in row.text.get("device", "").lower())


def cluster_of(row: Row) -> Cluster:
    """The machine of a run: the catalogue's chip, with memory and network rates that its text states.

    Raises:
      Skipped: the device is not in the catalogue, or does not come in that number.
    """
    device = row.text.get("device", "").lower()
    name = next((name for pattern, name in CHIPS if re.search(pattern, device)), None)
    if name is None or name not in catalogue():
        raise Skipped("the device is not in the catalogue")
    chip, nodes = catalogue()[name], _nodes(row)
    try:
        if chip.inside is not None and chip.inside.kind == "torus":
            shape = re.search(r"\b(\d+x\d+(?:x\d+)?)\b", row.text.get("topology", ""))
            exact = (
                shape is not None
                and math.prod(map(int, shape[1].split("x"))) * nodes * chip.devices_per_chip == row.num_devices
            )
            size = shape[1] if shape and exact else str(row.num_devices // nodes)
            found = cluster(f"{name}:{size}" + (f":{nodes}" if nodes > 1 else ""))
        elif row.num_devices % nodes == 0 and row.num_devices // nodes <= (chip.inside.max_devices or 1):
            found = cluster(f"{name}:{nodes}x{row.num_devices // nodes}")
        else:
            found = cluster(name, row.num_devices)
    except SpanaxError as error:
        raise Skipped("the device does not come in that number") from error
    return replace(found, chip=_as_stated(found.chip, row))


def _nodes(row: Row) -> int:
    found = re.fullmatch(r"(\d+)(?:\.0)?", row.text.get("n_slices_or_nodes", ""))
    nodes = int(found[1]) if found else 1 if row.num_devices < 8 else 0
    return nodes if nodes and row.num_devices % nodes == 0 else 1


def _as_stated(chip: Chip, row: Row) -> Chip:
    """The chip with the rates that a row's own text gives."""
    text = f"{row.text.get('device', '')} {row.text.get('topology', '')}"
    if rate := re.search(r"([\d.]+) ?TB/s", text):
        chip = replace(chip, memory_bytes_per_second=float(rate[1]) * 1e12)
    if chip.between is None or chip.devices_per_host is None:
        return chip
    if rate := re.search(r"(\d+) ?Gbps/node|inter (\d+) ?Gbps", text):
        gigabits = float(rate[1] or rate[2]) / chip.devices_per_host
    elif rate := re.search(r"(\d+) ?Gb/s per GPU", text):
        gigabits = float(rate[1])
    else:
        return chip
    return replace(chip, between=replace(chip.between, bytes_per_second=gigabits / 8 * 1e9))


def split_of(row: Row) -> tuple[tuple[int, ...], str]:
    """The sizes of AXES, and what is stored split over `fsdp`.

    In a pipeline PyTorch's FSDP keeps what it gathered from one microbatch to the next, as below stage 3.

    Raises:
      Skipped: the degrees contradict each other.
    """
    ways, stage = row.ways, row.zero_stage
    shards = row.fsdp if row.fsdp is not None else (ways if stage else 1)
    if row.fsdp is None and stage and row.data is not None and row.data < ways:
        raise Skipped("the degrees do not multiply to the devices")
    if ways % shards or (row.data is not None and row.data not in (ways, ways // shards)):
        raise Skipped("the degrees do not multiply to the devices")
    storing = {1: "zero1", 2: "zero2"}.get(stage or 3, "fsdp")
    if storing == "fsdp" and row.stages > 1 and software_of(row) != "xla":
        storing = "zero2"
    return (ways // shards, shards, 1, row.context, row.tensor), storing


def batch_of(row: Row, software: str) -> tuple[int, int]:
    """Sequences of a step, and in how many microbatches each device takes its part.

    A compiled JAX step takes the batch at once unless it says otherwise. torchtitan's pipeline cuts its local batch
    into single sequences.

    Raises:
      Skipped: it is not stated, or not a whole number of microbatches.
    """
    local = re.search(r"local batch (\d+)", row.text.get("notes", ""))
    if row.says("torchtitan") and row.stages > 1:
        per_way = int(local[1]) if local else row.microbatch
        per_way = row.batch // row.ways if per_way is None and row.batch else per_way
        if not per_way:
            raise Skipped("the batch is not stated")
        return per_way * row.ways, per_way
    if software == "xla" and row.stages == 1:
        count = row.accumulated or 1
        each = row.microbatch * row.num_devices if row.microbatch and not row.batch else 0
        batch = row.batch or each * count
    else:
        batch = row.batch or (row.microbatch or 0) * row.ways * (row.accumulated or 1)
        each = row.microbatch or (batch // (row.ways * row.accumulated) if row.accumulated else 0)
        if not each and row.stages > 1:
            raise Skipped("the microbatch is not stated")
        count = batch // (each * row.ways) if each else 1
    if not batch:
        raise Skipped("the batch is not stated")
    if (
        not count
        or batch % count
        or batch % row.ways
        or (each and software != "xla" and count * each * row.ways != batch)
    ):
        raise Skipped("the batch is no whole number of microbatches")
    return batch, count


def cases(rows: Sequence[Row]) -> tuple[list[Case], dict[str, str]]:
    """Every run that can be expressed, ready to be priced; and the reason for each of the others, by id."""
    found: dict[tuple[object, ...], list[tuple[Row, Shape]]] = defaultdict(list)
    skipped, made = {}, []
    for row in rows:
        try:
            shape = shape_of(row)
            if row.says(*PADS):
                shape = replace(shape, vocab_size=padded(shape.vocab_size, row.tensor))
            software = software_of(row)
            remat, _ = remat_of(row, software, has_fused_attention(row, software))
            found[shape, remat].append((row, shape))
        except Skipped as reason:
            skipped[row.id] = str(reason)
    for (_, remat), alike in found.items():
        traced = math.lcm(TRACED, *(row.ways for row, _ in alike))
        known: dict[tuple[object, ...], Terms] = {}
        for row, shape in alike:
            try:
                made.append(_case(row, shape, remat, traced, known))
            except Skipped as reason:
                skipped[row.id] = str(reason)
            except SpanaxError as error:
                skipped[row.id] = "the planner refuses it: " + re.sub(r"\d+", "N", str(error).splitlines()[0])
    return made, skipped


def _case(row: Row, shape: Shape, remat: str, traced: int, known: dict[tuple[object, ...], Terms]) -> Case:
    """One run, ready to be priced.

    PyTorch's FSDP and DeepSpeed split weights laid end to end, which any number of devices divides: the terms are those
    of two devices, on which every array divides, and are priced on as many as there are.
    """
    machine, software = cluster_of(row), software_of(row)
    sizes, storing = split_of(row)
    batch, count = batch_of(row, software)
    sequence = row.text.get("seq_parallel", "").lower() in ("1", "1.0", "true", "yes") and row.tensor > 1
    row = row if row.stages > 1 else replace(row, chunks=1)
    if row.chunks > 1 and count % row.stages:
        raise Skipped("interleaved stages take a multiple of their number of microbatches")
    dtype = dtype_of(row)
    if dtype not in machine.chip.peak_flops:
        raise Skipped(f"the chip's rate in {dtype} is not known")
    seconds = step_seconds(
        row, batch, machine.chip.peak_flops["bf16" if dtype == "fp8" else dtype], shape.matmul_params
    )
    resolved = sizes if software == "xla" else (sizes[0], min(sizes[1], 2), *sizes[2:])
    key = (resolved, storing, sequence)
    if key not in known:
        mesh = mesh_of(resolved)
        program = program_of(shape, traced, remat)
        known[key] = count_terms(
            ShardedProgram(resolve(program, layout_on(storing, sequence, mesh), mesh, {}), program.step)
        )
    if (*key, dtype) not in known:
        known[*key, dtype] = in_dtype(known[key], dtype)
    return Case(
        row=row, shape=shape, cluster=machine, terms=known[*key, dtype], sizes=sizes, num_microbatches=count,
        scale=batch / count / traced, software=software,
        redone=remat_of(row, software, has_fused_attention(row, software))[1],
        gathers_again=storing == "fsdp" and row.says("deepspeed.*zero-?3"),
        fused_attention=has_fused_attention(row, software), measured_seconds=seconds,
    )  # fmt: skip


def dtype_of(row: Row) -> str:
    """What the layers' matmuls compute in."""
    says = row.text.get("precision", "").lower()
    if re.search(r"fp4|nvfp4|mxfp4|int4", says):
        raise Skipped("matmuls in four bits")
    if re.search(r"fp8|float8|mxfp8", says):
        return "fp8"
    return "fp16" if "fp16" in says or "float16" in says.replace("bfloat16", "") else "bf16"


def in_dtype(terms: Terms, dtype: str) -> Terms:
    """The terms with matmuls in another dtype: all of them in fp16; those of the layers, without attention, in fp8."""
    works = terms.matmuls
    may = np.ones(len(works.dtypes), bool) if dtype == "fp16" else works.in_layers & ~works.scores.any(1)
    names = tuple(dtype if name == "bf16" and yes else name for name, yes in zip(works.dtypes, may, strict=True))
    return replace(terms, matmuls=replace(works, dtypes=names))


def predicted(
    made: Sequence[Case],
    given: Assumptions,
    dispatch_seconds: float = DISPATCH_SECONDS,
    loss_passes: float = LOSS_PASSES,
    sustained: Mapping[str, float] | None = None,
) -> np.ndarray:
    """Seconds of a step of every case, alike ones priced at once; `sustained` replaces chips' shares (for the fit)."""
    together: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for at, case in enumerate(made):
        alike = (id(case.terms), case.cluster, case.row.chunks, case.software, case.redone, case.fused_attention)
        together[alike].append(at)
    seconds = np.zeros(len(made))
    for places in together.values():
        alike = [made[at] for at in places]
        chosen = assumptions_of(alike[0], given, dispatch_seconds, loss_passes)
        seconds[places] = priced(alike, chosen, sustained).step_seconds + [listed_seconds(case) for case in alike]
    return seconds


def priced(alike: Sequence[Case], given: Assumptions, sustained: Mapping[str, float] | None = None) -> Costs:
    """The costs of cases that differ in degrees and batch only."""
    first, count = alike[0], len(alike)
    machine, row = first.cluster, first.row
    if sustained and machine.chip.name in sustained:
        machine = replace(machine, chip=replace(machine.chip, sustained_share=sustained[machine.chip.name]))
    sizes = dict(zip(AXES, first.sizes, strict=True))
    grid = Grid(
        sizes=np.asarray([[float(sizes[axis])] * count for axis in first.terms.axes]),
        num_stages=np.asarray([case.row.stages for case in alike]),
        num_microbatches=np.asarray([case.num_microbatches for case in alike]),
        scale=np.asarray([case.scale for case in alike]),
        schedule="interleaved" if row.chunks > 1 else "1f1b",
        num_chunks=row.chunks,
    )
    return price(first.terms, machine, grid, given)
