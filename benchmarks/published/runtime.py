"""What runs a published step: features of its software, read from what the row itself states.

Defaults are those of the framework's documentation; what the row states replaces them. A feature never depends on the
source, on the file, or on a date.
"""

import re
from dataclasses import dataclass, replace

from published.rows import Row
from spanax.hardware.chip import Chip
from spanax.plan.cost.overlap import RUNTIMES, Overlap

XLA = (r"maxtext", r"\bjax\b", r"axlearn", r"\bpax", r"praxis", r"\bxla\b", r"\btpu")
FULLY_SHARDED = (r"\bfsdp", r"torchtitan", r"fully.sharded", r"llm-foundry", r"simplefsdp")
MEGATRON = (r"megatron", r"nemo")
ZERO = (r"zero", r"deepspeed")
MODERN_MEGATRON = (r"megatron[- ]?core", r"megatron[- ]?bridge", r"nemo", r"mcore")
SPARSE_CORES = (r"sparse[- ]?cores?",)
FUSED = (r"flash", r"fused.attention", r"splash", r"cudnn.attention", r"\bsdpa\b", r"transformer.engine", r"\bte\b")
UNFUSED = (r"unfused.attention", r"naive.attention", r"no.flash", r"dot.product.attention")


@dataclass(frozen=True)
class Runtime:
    """Features of a run's software.

    Attributes:
      compiler: `eager` (one operation dispatched after another), `torch.compile`, or `xla`.
      family: `megatron`, `fsdp`, `zero`, `xla gpu` or `xla tpu`: who issues the collectives.
      fused_attention: whether attention scores stay on the chip.
      overlaps_gradients: whether reductions of gradients run during computation.
      overlaps_gathers: whether gathers of parameters run during computation.
      overlaps_tensor: whether collectives of tensor parallelism overlap with the matmuls that need them.
      latency_hiding: whether XLA schedules collectives to run during computation.
      distributed_optimizer: whether optimizer state is sharded over data parallelism.
      attention: the kernel of fused attention; empty for the compiler's.
      overlap: what of the communication computation can hide.
      interleaves: whether its pipelines are interleaved unless a row states otherwise.
    """

    compiler: str
    family: str
    fused_attention: bool
    overlaps_gradients: bool
    overlaps_gathers: bool
    overlaps_tensor: bool
    latency_hiding: bool
    distributed_optimizer: bool
    attention: str
    overlap: Overlap
    interleaves: bool


def runtime_of(row: Row, chip: Chip) -> Runtime:
    """Returns the features of a row's software.

    Source: PyTorch FSDP (gathers are prefetched, gradients reduced in the backward pass, by default); Megatron-LM's
    arguments `--overlap-grad-reduce`, `--overlap-param-gather`, `--tp-comm-overlap` (off by default, on in the recipes
    of Megatron Core and NeMo); DeepSpeed's `overlap_comm` (on by default in stage 3); XLA's latency-hiding scheduler
    (`xla_gpu_enable_latency_hiding_scheduler`, on in JAX-Toolbox and MaxText recipes; TPUs always).
    """
    compiler = compiler_of(row)
    family = family_of(row, compiler)
    is_xla = compiler == "xla"
    # No Megatron before Megatron-Core supports the chips that compute in eight bits.
    is_modern = family == "megatron" and (row.states(*MODERN_MEGATRON) or "fp8" in chip.peak_flops)
    by_default = {"fsdp": True, "megatron": is_modern, "zero": row.zero_stage == 3}.get(family, is_xla)
    gradients = _stated(row, r"overlap[-_ ]grad", by_default)
    gathers = _stated(row, r"overlap[-_ ]param", by_default)
    tensor = _stated(row, r"tp[-_ ]comm[-_ ]overlap|async ?tp|collective.matmul", family == "xla tpu" or is_modern)
    latency_hiding = is_xla and _stated(row, r"latency[-_ ]hiding", True)
    return Runtime(
        compiler=compiler,
        family=family,
        fused_attention=has_fused_attention(row, compiler, family, chip),
        overlaps_gradients=gradients,
        overlaps_gathers=gathers,
        overlaps_tensor=tensor,
        latency_hiding=latency_hiding,
        distributed_optimizer=bool(row.zero_stage) or row.states(r"distributed.optim"),
        attention=attention_of(row, compiler, family, chip),
        overlap=overlap_of(row, family, chip, gradients, gathers, tensor and not is_xla, latency_hiding),
        interleaves=is_modern,
    )


def overlap_of(
    row: Row, family: str, chip: Chip, gradients: bool, gathers: bool, tensor: bool, latency_hiding: bool
) -> Overlap:
    """Returns what computation can hide: a runtime of Spanax, with what the row switches on or off.

    Source: the options of MaxText's recipes (AI-Hypercomputer/tpu-recipes @3596002): those for a v6e are the
    compiler's defaults (`CF_FOR_ALL_GATHER`), those for a v7 hand gathers to the SparseCores.
    """
    if family == "xla gpu":
        return RUNTIMES["xla-gpu-latency-hiding" if latency_hiding else "xla-gpu"]
    if family == "xla tpu":
        has_sparse_cores = chip.name == "v7" or row.states(*SPARSE_CORES)
        name = "xla-tpu-sparse-cores" if has_sparse_cores else f"xla-tpu-{chip.name}"
        return RUNTIMES.get(name, RUNTIMES["xla-tpu"])
    base = RUNTIMES["megatron" if family == "megatron" else "fsdp"]
    return replace(
        base,
        gradient_reductions=base.gradient_reductions * gradients,
        weight_gathers=base.weight_gathers * gathers,
        updated_weights=base.updated_weights * gathers,
        activations=RUNTIMES["megatron"].activations * tensor,
        hops=base.hops * gradients,
    )


def attention_of(row: Row, compiler: str, family: str, chip: Chip) -> str:
    """Returns the kernel of fused attention: what is stated, else the framework's; empty for the compiler's.

    PyTorch's `scaled_dot_product_attention` is FlashAttention-2; Megatron with Transformer Engine takes cuDNN's on the
    chips that compute in eight bits. Eager frameworks with a mixed-precision context had the first FlashAttention.
    """
    for kernel, words in KERNELS:
        if row.states(*words):
            return kernel
    if compiler == "xla":
        return ""
    if family == "megatron":
        return "cudnn" if "fp8" in chip.peak_flops else "flash"
    return "flash2" if row.states("compile", "torchtitan") else "flash"


KERNELS = (
    ("flash3", (r"flash[- ]?attention[- ]?3", r"\bfa3\b", r"\bflash3\b")),
    ("flash2", (r"flash[- ]?attention[- ]?2", r"\bfa2\b", r"\bflash2\b")),
    ("cudnn", (r"cudnn.attention",)),
)
"""Words for a kernel."""


def compiler_of(row: Row) -> str:
    """Returns `xla`, `torch.compile` or `eager`."""
    if row.states(*XLA) or "tpu" in row.text.get("device", "").lower():
        return "xla"
    return "torch.compile" if row.states(r"\bcompile") else "eager"


def family_of(row: Row, compiler: str) -> str:
    """Returns who issues the collectives of a run."""
    if compiler == "xla":
        return "xla tpu" if "tpu" in row.text.get("device", "").lower() else "xla gpu"
    if row.states(*FULLY_SHARDED):
        return "fsdp"
    if row.states(*ZERO) and row.zero_stage == 3:
        return "zero"
    return "megatron" if row.states(*MEGATRON) or row.tensor * row.stages > 1 else "fsdp"


def has_fused_attention(row: Row, compiler: str, family: str, chip: Chip) -> bool:
    """Returns whether attention scores stay on the chip.

    A row that does not state it: on TPUs MaxText takes splash, and PyTorch's FSDP and compiled PyTorch PyTorch 2's
    `scaled_dot_product_attention`. XLA on GPUs runs attention as it is written, two matmuls and a softmax, unless
    Transformer Engine or cuDNN's kernel is stated (openxla/xla: `xla_gpu_enable_cudnn_fmha` is off by default).
    Megatron and DeepSpeed had no fused kernel before the chips that compute in eight bits.
    """
    if row.states(*UNFUSED):
        return False
    if row.states(*FUSED) or family in ("xla tpu", "fsdp") or compiler == "torch.compile":
        return True
    return family != "xla gpu" and "fp8" in chip.peak_flops


def _stated(row: Row, words: str, default: bool) -> bool:
    """Returns whether the words are stated as on; the default where they are not there."""
    for text in row.cells:
        if match := re.search(words, text):
            rest = text[match.end() :].split(",")[0].split(";")[0]
            return not re.search(r"\b(off|false|disabled|no|0)\b", rest)
    return default
