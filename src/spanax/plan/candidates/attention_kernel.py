"""Chooses between the attention of the model and a platform's fused kernel."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from spanax.errors import MeshError, VariantError
from spanax.hardware.cluster import Cluster
from spanax.plan.candidates.request import Request
from spanax.plan.defaults import defaults
from spanax.plan.place import as_planned, resolver_of
from spanax.plan.plan import Plan
from spanax.plan.presets import default_mesh, in_words
from spanax.plan.reason import Code, Reason
from spanax.plan.sharding.attention import attention_kernels, attention_sharding
from spanax.plan.sharding.resolve import Resolver
from spanax.plan.space import AXES, Family, Rejections
from spanax.trace.jaxpr.remat_policies import BLOCKWISE, CUDNN, GATHERED, RING, SPLASH, ULYSSES, known_attention
from spanax.trace.program import Program
from spanax.trace.rewrites.attention.fuse import FusedAttention
from spanax.trace.rewrites.attention.operation import FORWARD
from spanax.trace.rewrites.attention.operation import RING as ATTENTION
from spanax.trace.rewrites.attention.scores import Form
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
        several; `auto`, the same or plain; `ring`, in blocks; `ulysses`, as `flash`, and in blocks where no kernel
        applies. None leaves the program unchanged.
      options: the other options of the program, untraced; by default its own.

    Raises:
      SpanaxError: `flash`, and no kernel supports any attention of this program, nor has one several blocks.
    """
    options = program.options if options is None else options
    if requested in (None, "plain") or options.context != GATHERED:
        return program.variant(options)
    if requested == RING:
        return program.variant(options, context=RING)
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
    if requested == ULYSSES:
        return program.variant(options, context=ULYSSES)
    if known_attention(requested) == "flash":
        raise VariantError(
            "no attention of this program is supported by a kernel.", where=str(attention[0]), fix="attention 'auto'"
        )
    return replace(program.variant(options), attention=attention)


def _without(attention: FusedAttention, why: str) -> FusedAttention:
    """Returns an attention on a chip without kernels, with that as the reason."""
    return replace(attention, detail=attention.detail + why if attention.kernel else why)


def in_attention(program: Program, cluster: Cluster, request: Request, options: Variant) -> Program:
    """Returns the program under options, with the attention of a request."""
    requested = request.form or request.attention or defaults(cluster).attention
    return with_attention(program, cluster, requested, options)


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
    shardings = [attention_sharding(resolver, step.graph, op, constraints) for op in attention_kernels(step)]
    several = [axis for axis in axes if resolver.mesh.ways([axis]) > 1]
    return tuple(axis for axis in several if any(each is not None and axis not in each.used for each in shardings))


def ring_axes(resolver: Resolver) -> tuple[str, ...]:
    """Returns the mesh axes of the ring that keys and values circulate around; empty without ring attention."""
    step = resolver.program.step
    constraints = resolver.constraints(step)
    ops = [group.op for group in step.op_groups if group.op.name in ATTENTION]
    shardings = [attention_sharding(resolver, step.graph, op, constraints) for op in ops]
    return max((each.ring for each in shardings if each is not None), key=resolver.mesh.ways, default=())


def by_heads(program: Program, family: Family, rejected: Rejections) -> Family:
    """Returns the family with only the meshes whose axis `context` divides heads or examples of every attention."""
    sizes = family.sizes[AXES.index("context")]
    forms: list[Form] = [op.params["form"] for op in program.step.first_ops.get(FORWARD, ())]
    dims = [form.sizes[: form.queries] for form in forms]
    divides = np.asarray([all(any(dim % size == 0 for dim in each) for each in dims) for size in sizes.tolist()], bool)
    rejected[Reason(Code.NO_HEADS)] += int(np.count_nonzero(~divides))
    return family.select(np.flatnonzero(divides))


def named_ulysses(program: Program, plan: Plan) -> Plan:
    """Returns a plan under the name of the layout without a ring, after checking that it is this.

    Raises:
      SpanaxError: mesh axes that shard the sequence divide neither heads nor examples of some attention.
    """
    resolver = resolver_of(as_planned(program, plan), plan)
    step = resolver.program.step
    constraints = resolver.constraints(step)
    several = {axis for axis, names in plan.layout.computed if "seq" in names and plan.mesh.ways([axis]) > 1}
    if not several:
        what = f"layout '{ULYSSES}' needs a mesh axis that shards sequences."
        raise MeshError(what, where=f"mesh {plan.mesh}", fix=f"mesh {default_mesh(ULYSSES, plan.mesh.size)}")
    for op in step.first_ops.get(FORWARD, ()):
        sharding = attention_sharding(resolver, step.graph, op, constraints)
        form: Form = op.params["form"]
        if sharding is None or sharding.axes[form.queries] or not several <= sharding.used:
            sizes = " x ".join(str(size) for size in form.sizes[: form.queries])
            raise MeshError(
                f"layout '{ULYSSES}' needs heads or examples that the mesh axes of the sequence divide.",
                where=f"mesh {plan.mesh}: an attention of {sizes} (examples, heads of keys, queries of each)",
                fix="layout 'context', which passes keys around a ring, or a smaller axis",
            )
    return replace(plan, layout=replace(plan.layout, name=in_words(plan.layout.name, ULYSSES)))
