"""Chooses between the attention of the model and a platform's fused kernel."""

from collections.abc import Sequence
from dataclasses import replace

from spanax.errors import VariantError
from spanax.hardware.cluster import Cluster
from spanax.plan.candidates.request import Request
from spanax.plan.defaults import defaults
from spanax.plan.sharding.attention import attention_kernels, attention_sharding
from spanax.plan.sharding.resolve import Resolver
from spanax.trace.jaxpr.remat_policies import BLOCKWISE, CUDNN, GATHERED, SPLASH, known_attention
from spanax.trace.program import Program
from spanax.trace.rewrites.attention.fuse import FusedAttention
from spanax.trace.rewrites.attention.operation import RING
from spanax.trace.variant import Variant


def kernel_on(cluster: Cluster) -> str | None:
    """Returns the fused attention kernel of a cluster's chips, or None.

    Source: jax.experimental.pallas.ops.tpu.splash_attention for TPUs from v4 on; cuDNN's fused attention, which
    JAX enables on NVIDIA GPUs from Ampere on.

    Example:
      >>> from spanax.hardware.cluster import cluster
      >>> [kernel_on(cluster(name)) for name in ("v5p:2x2x1", "h100:8", "mi300x:8", "v3:2x2", "t4:8", "cpu:8")]
      ['splash', 'cudnn', None, None, None, None]
    """
    chip = cluster.chip
    if cluster.is_torus:
        return SPLASH if chip.name != "v3" else None
    is_from_ampere_on = "bf16" in chip.peak_flops and any(kind.startswith("NVIDIA") for kind in chip.device_kinds)
    return CUDNN if is_from_ampere_on else None


def with_attention(
    program: Program, cluster: Cluster, requested: str | None, options: Variant | None = None
) -> Program:
    """Returns the program with its attention computed as requested; its `attention` records the kernel or the reason.

    Args:
      program: what `spanax.trace` returned.
      cluster: the devices.
      requested: `plain`, as the model defines it; `flash`, by the platform's kernel, or in blocks of keys if there are
        several; `auto`, the same or plain. None leaves the program unchanged.
      options: the other options of the program, untraced; by default its own.

    Raises:
      SpanaxError: `flash`, and no kernel supports any attention of this program, nor has one several blocks.
    """
    options = program.options if options is None else options
    if requested is None or known_attention(requested) == "plain" or options.context != GATHERED:
        return program.variant(options)
    kernel = kernel_on(cluster)
    without = f": there is no attention kernel for {cluster.chip.name}"
    if not program.rewrites_loss:
        attention: tuple[FusedAttention, ...] = (FusedAttention(None, ": the program has a custom train step"),)
    else:
        attention = program.attentions(replace(options, context=kernel or BLOCKWISE))
        if kernel is None:
            attention = tuple(dict.fromkeys(_without(each, without) for each in attention))
        kernels = {each.kernel for each in attention}
        if kernels & {kernel, BLOCKWISE} - {None}:
            context = kernel if kernel is not None and kernel in kernels else BLOCKWISE
            return replace(program.variant(options, context=context), attention=attention)
    if requested == "flash":
        raise VariantError(
            "no attention of this program is supported by a kernel.", where=str(attention[0]), fix="attention 'auto'"
        )
    return replace(program.variant(options), attention=attention)


def _without(attention: FusedAttention, why: str) -> FusedAttention:
    """Returns an attention on a chip without kernels, with that as the reason."""
    return replace(attention, detail=attention.detail + why if attention.kernel else why)


def in_attention(program: Program, cluster: Cluster, request: Request, options: Variant) -> Program:
    """Returns the program under options, with the attention of a request; the layout handles ring attention."""
    attention = request.attention or defaults(cluster).attention
    return program.variant(options) if request.is_ring else with_attention(program, cluster, attention, options)


def can_ring(program: Program, cluster: Cluster, requested: str | None) -> bool:
    """Whether a search may compute the attention of a program in a ring: neither its context nor a kernel is requested.

    Devices that share one chip, as simulated ones do, save neither memory nor time with a ring.
    """
    is_open = program.context == GATHERED and requested != "flash"
    return is_open and program.rewrites_loss and not cluster.chip.shared


def saves_with_ring(program: Program, batch_size: int, num_devices: int) -> bool:
    """Whether ring attention may shorten a step of which some layout fits without it.

    It does not where a kernel computes every attention and each device has whole examples: a device computes as much of
    the attention either way, and a ring sends keys and values as well.
    """
    in_kernels = bool(program.attention) and all(each.kernel not in (None, BLOCKWISE) for each in program.attention)
    return not in_kernels or batch_size % num_devices != 0


def repeating_axes(resolver: Resolver, axes: Sequence[str]) -> tuple[str, ...]:
    """Returns the mesh axes along which several devices repeat the work of an attention kernel.

    Args:
      resolver: a layout, applied to a program.
      axes: the mesh axes.
    """
    step = resolver.program.step
    constraints = resolver.constraints(step)
    shardings = [attention_sharding(step.graph, op, constraints, resolver.mesh) for op in attention_kernels(step)]
    several = [axis for axis in axes if resolver.mesh.ways([axis]) > 1]
    return tuple(axis for axis in several if any(each is not None and axis not in each.used for each in shardings))


def ring_axes(resolver: Resolver) -> tuple[str, ...]:
    """Returns the mesh axes of the ring that keys and values circulate around; empty without ring attention."""
    step = resolver.program.step
    constraints = resolver.constraints(step)
    ops = [group.op for group in step.op_groups if group.op.name in RING]
    shardings = [attention_sharding(step.graph, op, constraints, resolver.mesh) for op in ops]
    return max((each.ring for each in shardings if each is not None), key=resolver.mesh.ways, default=())
