"""Chooses whether attention runs as the model wrote it or by a platform's kernel."""

from dataclasses import replace

from spanax.errors import SpanaxError
from spanax.hardware.cluster import Cluster
from spanax.trace.program import Program
from spanax.trace.rewrites.attention.fuse import FusedAttention
from spanax.trace.rewrites.remat_policies import CUDNN, GATHERED, SPLASH, known_attention


def kernel_on(cluster: Cluster) -> str | None:
    """The attention kernel of a cluster's chips, if there is one.

    Source: jax.experimental.pallas.ops.tpu.splash_attention for TPUs from v4 on; cuDNN's fused attention, which
    JAX's check of it has on NVIDIA GPUs from Ampere on.

    Example:
      >>> from spanax.hardware.cluster import cluster
      >>> [kernel_on(cluster(name)) for name in ("v5p:2x2x1", "h100:8", "mi300x:8", "v3:2x2", "cpu:8")]
      ['splash', 'cudnn', None, None, None]
    """
    kinds, old = cluster.chip.device_kinds, ("v3", "v100-32gb", "v100-16gb")
    if cluster.chip.name in old:
        return None
    if cluster.is_torus:
        return SPLASH
    return CUDNN if any(kind.startswith("NVIDIA") for kind in kinds) else None


def with_attention(program: Program, cluster: Cluster, asked: str | None) -> Program:
    """A program with its attention computed as asked; its `attention` says by what, and why.

    Args:
      program: what `spanax.trace` returned.
      cluster: where it is to run.
      asked: `plain`, as the model wrote it; `flash`, by the platform's kernel; `auto`, by it where it can be. None
        leaves the program as it is.

    Raises:
      SpanaxError: `flash`, and there is no kernel on this platform or for any attention of this program.
    """
    if asked is None or known_attention(asked) == "plain" or program.context != GATHERED:
        return program
    kernel = kernel_on(cluster)
    found: tuple[FusedAttention, ...] = (
        FusedAttention(None, f": there is no attention kernel for {cluster.chip.name}"),
    )
    if program.evaluation is None:
        found = (FusedAttention(None, ": the program has a train step of its own"),)
    elif kernel is not None:
        made = program.with_context(kernel)
        if any(each.kernel == kernel for each in made.attention):
            return made
        found = made.attention
    if asked == "flash":
        raise SpanaxError(
            "no attention of this program can be a kernel's.", where=str(found[0]), fix="attention 'auto'"
        )
    return replace(program, attention=found)
