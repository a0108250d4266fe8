"""Default values of the options that a request leaves open, for all commands."""

from dataclasses import dataclass, replace

import jax.numpy as jnp

from spanax.errors import HardwareError, PlanMismatchError, VariantError, first_line
from spanax.hardware.cluster import Cluster
from spanax.plan.reason import Code, Reason
from spanax.trace.jaxpr.graph import CONTRACTIONS
from spanax.trace.jaxpr.remat_policies import known_chunks
from spanax.trace.program import Program
from spanax.trace.variant import Variant


@dataclass(frozen=True)
class Defaults:
    """The defaults of a cluster.

    Attributes:
      compute_dtype: dtype of the loss and its gradient; None uses the dtypes of the model. Parameters keep their dtype.
      attention: as `attention` of `spanax.plan`.
      loss_chunks: number of chunks of the logits; 0 chooses one.
      pipeline: whether a search partitions layers into stages: on several nodes always, elsewhere if nothing fits.
      is_searched: whether remat, microbatches and mesh are chosen by cost under an explicit layout, too.
    """

    compute_dtype: str | None
    attention: str
    loss_chunks: int
    pipeline: bool
    is_searched: bool


STAGE_MARGIN = 0.05
"""How much faster than the fastest plan without stages one with stages must be, as a fraction.

A bubble assumes equal stages, and a step in stages compiles longer. Source: a judgment, about the mean error of
predicted step times (notes/planner.md): a smaller difference says nothing.
"""

ASSIGNMENT_MARGIN = 0.1
"""How much faster than the fastest preset a layout of a local search must be, as a fraction.

Source: a judgment, about the mean error of predicted step times of compiled programs (notes/planner.md).
"""

RATIO_ERROR = 0.09
"""The median error of the predicted ratio of the step times of two layouts of one model, as a fraction.

Of measured layouts that were predicted to be so close, 1 in 4 were in the other order.
Source: benchmarks/plan_accuracy.py --leave-one-out, 831 pairs in 37 groups.
"""

SAVED_VALUES_MARGIN = 0.02
"""How much faster than the fastest plan a policy that lists the values to save must be, as a fraction.

Its names are harder to read. Source: a judgment; predicted times of one sharding under two
policies differ by the recomputed FLOPs, which are exact in compiled programs (notes/planner.md), so that the errors of
the times are nearly equal.
"""

HOST_MARGIN = 0.2
"""How much faster than without host memory a step that saves values there must be, as a fraction; 0 if nothing fits.

Source: a judgment. Compilers copy during other layers, as is assumed, but how fast was not measured.
"""

REPEATED_MARGIN = 0.5
"""How much faster a plan that repeats most FLOPs on several devices must be than one that does not, as a fraction.

Such a plan is faster only where latency exceeds computation, and predicted times are least accurate there: those of a
small model on simulated devices have a mean error of 105 % without calibration, those of large models one of about
10 %. Source: a judgment, between both (notes/planner.md).
"""

ON_CPU = Defaults(None, "plain", 1, pipeline=False, is_searched=False)
ON_ACCELERATOR = Defaults("bfloat16", "auto", 0, pipeline=True, is_searched=True)
WITHOUT_BFLOAT16 = Defaults(None, "auto", 0, pipeline=True, is_searched=True)


_RATES = ("int8", "fp8")
"""Quantizations whose matmuls have a rate of their own."""

_NARROW = frozenset({"int8", "float8_e4m3fn", "float8_e5m2"})
"""Dtypes of quantized operands."""


def defaults(cluster: Cluster) -> Defaults:
    """Returns the defaults of a cluster.

    An accelerator that computes in float16 but not in bfloat16 uses float32: float16 needs a scaled loss.

    Example:
      >>> from spanax.hardware.cluster import cluster
      >>> [defaults(cluster(name)).compute_dtype for name in ("h100:8", "v100:8", "cpu:8")]
      ['bfloat16', None, None]
    """
    if cluster.chip.shared:
        return ON_CPU
    dtypes = cluster.chip.peak_flops
    return ON_ACCELERATOR if "bf16" in dtypes or not dtypes else WITHOUT_BFLOAT16


def prices_stages(program: Program, cluster: Cluster) -> bool:
    """Whether a search prices stages even where layouts without them fit: links between nodes are slower than inside.

    Example:
      >>> from spanax.hardware.cluster import cluster
      >>> from spanax.models.workloads import load
      >>> program = load("gpt-nano").trace(learning_rate=1e-3, num_steps=4)
      >>> [prices_stages(program, cluster(name)) for name in ("h100:2x8", "h100:8", "v5p:4x4x4", "cpu:8")]
      [True, False, False, False]
    """
    is_several = not cluster.is_torus and cluster.num_devices > cluster.devices_per_node
    has_layers = program.has_evaluation and program.step.layer_carry[1] > 1
    return defaults(cluster).pipeline and is_several and has_layers


def computed_in(program: Program, compute_dtype: str | None) -> Program:
    """Returns the program with the compute dtype of a plan.

    Raises:
      SpanaxError: the program was traced with a different dtype.
    """
    return program.variant(options_in(program, compute_dtype))


def options_in(program: Program, compute_dtype: str | None) -> Variant:
    """Returns the options of a program with the compute dtype of a plan, untraced: other fields may change first.

    Raises:
      SpanaxError: the program was traced with a different dtype.
    """
    if program.compute_dtype == "float32" and compute_dtype is None:
        return program.options  # plans of float32 models omit the dtype
    if program.compute_dtype is not None and program.compute_dtype != compute_dtype:
        raise PlanMismatchError(
            f"the plan computes in {compute_dtype or 'the dtypes of the model'}, and the program was traced with "
            f"compute_dtype '{program.compute_dtype}'.",
            fix="trace the program without compute_dtype, or plan it again",
        )
    return replace(program.options, compute_dtype=compute_dtype)


def check_quantized_alike(program: Program, quantize: str | None) -> None:
    """Raises PlanMismatchError unless a program was traced with the quantization of a plan."""
    traced = program.options.quantize
    if traced != quantize:
        raise PlanMismatchError(
            f"the plan computes matmuls of weights in {quantize or 'the compute dtype'}, and the program was traced "
            f"with quantize={traced!r}.",
            fix=f"quantize={quantize!r}, or plan the program again",
        )


def check_rate(program: Program, cluster: Cluster) -> None:
    """Raises HardwareError if the chips of a cluster multiply no operands as a program quantizes them.

    nvfp4 is emulated: its matmuls are in the compute dtype. So is all arithmetic of simulated devices.
    """
    quantize = program.options.quantize
    rates = cluster.chip.peak_flops
    if quantize not in _RATES or quantize in rates or not rates or cluster.chip.shared:
        return
    others = [f"--quantize {name}" for name in _RATES if name in rates]
    raise HardwareError(
        f"'{cluster.chip.name}' has no rate of {quantize}: quantized operands would be converted, and nothing gained.",
        where=f"it computes in {', '.join(rates)}",
        fix=" or ".join([*others, "omit --quantize"]),
    )


def default_dtype(program: Program, cluster: Cluster) -> str | None:
    """Returns the compute dtype of a program on a cluster; None uses the dtypes of the model.

    A requested dtype, the dtypes that a model sets for its layers and a custom `train_step` take precedence.

    Raises:
      HardwareError: the chips multiply no operands as the program quantizes them.
    """
    check_rate(program, cluster)
    is_float32 = set(contraction_dtypes(program)) <= {"float32", *_NARROW}
    if program.compute_dtype is not None or not program.has_evaluation or not is_float32:
        return program.compute_dtype
    return defaults(cluster).compute_dtype


def untraceable_in(program: Program, compute_dtype: str | None) -> Reason | None:
    """Returns why the loss of a program cannot be traced in a compute dtype; None if it can."""
    try:
        computed_in(program, compute_dtype)
    except VariantError as error:
        what = first_line(error).rstrip(".")
        return Reason(Code.WRITTEN_DTYPE, array_dtype(program) or "dtypes of the model", detail=what)
    return None


def array_dtype(program: Program) -> str | None:
    """Returns the dtype in which a program computes as written; None if its arrays have several."""
    dtypes = [leaf.dtype for leaf in (*program.leaves, *program.batch)]
    floating = {str(dtype) for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)}
    return "float32" if floating == {"float32"} else None


def default_chunks(program: Program, cluster: Cluster, loss_chunks: int | str | None) -> int:
    """Returns the number of chunks of the logits; 0 chooses one.

    Raises:
      SpanaxError: `loss_chunks` is neither `auto` nor a positive integer.
    """
    if loss_chunks is not None:
        return known_chunks(loss_chunks)
    return program.loss_chunks if program.loss_chunks > 1 else defaults(cluster).loss_chunks


def contraction_dtypes(program: Program) -> tuple[str, ...]:
    """Returns the floating and quantized dtypes of the operands of a step's matmuls and convolutions, sorted."""
    graph = program.step.graph
    dtypes = {graph.avals[value].dtype for op in graph.ops() if op.name in CONTRACTIONS for value in op.inputs}
    return tuple(sorted(str(dtype) for dtype in dtypes if dtype.kind not in "biu" or str(dtype) in _NARROW))
