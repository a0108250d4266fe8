"""Check: a plan held against XLA, without the hardware, at one of four levels."""

import math
import time
from collections.abc import Mapping
from dataclasses import replace

import jax
import numpy as np

from spanax.check.compilers import report_cache
from spanax.check.compilers.abstract_mesh import abstract_collectives, is_possible
from spanax.check.compilers.compile import TIMEOUT_SECONDS, Compiled, compile_for
from spanax.check.compilers.lowered_step import lower
from spanax.check.compilers.target import Target, missing, platform_of, simulated, target_of
from spanax.check.hlo.array_matching import with_arrays
from spanax.check.hlo.collectives import collectives, totals
from spanax.check.hlo.flops import program_flops
from spanax.check.hlo.module import Module, read_module
from spanax.check.hlo.replicated_tensors import replicated_tensors
from spanax.check.hlo.tpu_tiles import padded_bytes
from spanax.check.predictions import predictions
from spanax.check.report import Figures, Report
from spanax.errors import SpanaxError
from spanax.hardware.cluster import Cluster, cluster_of
from spanax.hardware.flags import for_platform
from spanax.plan.candidate import RESERVE
from spanax.plan.plan import Placement, Plan
from spanax.plan.sharding.place import check_made_for
from spanax.trace.program import Program

MAX_SIMULATED = 1024
"""Devices that are simulated for level 2: beyond them a CPU program takes longer than the target's own compiler."""

WORD_BYTES = 4

PACKAGES = {
    "spanax": "spanax",
    "jax": "jax",
    "jaxlib": "jaxlib",
    "flax": "flax",
    "libtpu": "libtpu",
    "jax-cuda12-plugin": "jax-cuda12-plugin",
    "nvidia-cuda-nvcc-cu12": "nvidia-cuda-nvcc-cu12",
}
"""What a report depends on."""


def check(
    program: Program,
    plan: Plan,
    cluster: Cluster | str,
    *,
    level: int | None = None,
    timeout: float = TIMEOUT_SECONDS,
    flags: Mapping[str, str] | None = None,
    codegen: bool = False,
    inputs_only: bool = False,
    cache: bool = True,
) -> Report:
    """Hold a plan against XLA. No array is allocated, and none of the cluster's devices is needed.

    Args:
      program: what `spanax.trace` returned.
      plan: what `spanax.plan` returned for it.
      cluster: the devices it was planned for, or their name.
      level: what is asked. Left out: the highest that can be had here.
        0: shapes and bytes alone (milliseconds);
        1: the partitioner's passes on a mesh without devices (about a second, at any size);
        2: XLA's partitioner for so many simulated CPU devices, up to 1,024 (seconds);
        3: the compiler of the cluster's own chips (TPU: `spanax[tpu]`, NVIDIA: `spanax[cuda12]`; seconds).
      timeout: seconds that a compiler may take.
      flags: options for the compiler beyond its defaults and those of the plan.
      codegen: let the compiler go on to machine code, which takes up to 20 times as long and changes no figure.
      inputs_only: split the state and the batch as planned, and leave all between to the compiler, as a `jax.jit`
        with `in_shardings` does: what that moves beyond the plan is what the plan gains.
      cache: whether a report on the same program, devices, flags and versions is taken from an earlier check.

    Raises:
      SpanaxError: the plan is another program's, the level cannot be had here, or its compiler is not installed.
      CompilerError: the compiler died, refused the program or took too long; its log is report_cache.

    Example:
      >>> import optax, spanax
      >>> from flax import nnx
      >>> program = spanax.trace(
      ...     build=lambda rngs: nnx.Linear(16, 32, rngs=rngs),
      ...     optimizer=optax.sgd(0.1),
      ...     batch=jax.ShapeDtypeStruct((8, 16), "float32"),
      ...     loss=lambda model, x: (model(x) ** 2).mean(),
      ... )
      >>> machine = spanax.cluster("cpu:8")
      >>> report = check(program, spanax.plan(program, machine, layout="fsdp"), machine, level=0)
      >>> report.compiled.state_bytes, report.by
      (276, 'static')
    """
    check_made_for(program, plan)
    cluster = cluster_of(cluster)
    if plan.mesh.size != cluster.num_devices:
        raise SpanaxError(
            f"the plan is for {plan.mesh.size} devices, and {cluster} has {cluster.num_devices}.",
            where=f"mesh {plan.mesh}",
        )
    if not timeout > 0:
        raise SpanaxError(f"--timeout is {timeout}; it takes seconds above 0.", fix=f"--timeout {TIMEOUT_SECONDS:g}")
    chosen = highest_level(cluster) if level is None else level
    began = time.perf_counter()
    report = _static(program, plan, cluster, chosen)
    report = replace(report, flags=dict(flags or {}), is_whole=codegen, inputs_only=inputs_only)
    if chosen == 1:
        report = _by_passes(program, plan, cluster, report)
    elif chosen in (2, 3):
        return _by_compiler(program, plan, cluster, report, timeout, cache, began)
    elif chosen != 0:
        raise SpanaxError(f"unknown level {level}.", fix="0, 1, 2 or 3")
    return replace(report, seconds=time.perf_counter() - began)


def highest_level(cluster: Cluster) -> int:
    """The highest level that can be had here for a cluster."""
    platform = platform_of(cluster)
    if platform in ("tpu", "cuda") and not missing(platform):
        return 3
    if cluster.num_devices <= MAX_SIMULATED:
        return 2
    return 1 if is_possible() else 0


def _static(program: Program, plan: Plan, cluster: Cluster, level: int) -> Report:
    """What shapes alone tell: exact bytes of the state, as they lie in this chip's memory."""
    # Levels 1 and 2 read the program right after the partitioner, where nothing has been joined yet.
    told = predictions(program, plan, cluster, adds_first=cluster.adds_first and level in (0, 3))
    platform = platform_of(cluster)
    state = sum(_padded(leaf, platform) for leaf in plan.leaves)
    limit = cluster.memory_bytes
    needed = (told.peak_bytes or 0) / (1 - RESERVE)
    return Report(
        level=level,
        target=str(cluster),
        layout=plan.layout.name,
        mesh=repr(plan.mesh),
        fits=None if limit is None else needed <= limit,
        fits_by="the plan",
        predicted=replace(told, state_bytes=state),
        compiled=Figures(state_bytes=state),
        limit_bytes=limit,
        versions=report_cache.versions(PACKAGES),
    )


def _padded(leaf: Placement, platform: str) -> int:
    if leaf.is_key:  # a random key is some words of four bytes
        words = leaf.local_bytes // math.prod(leaf.local_shape) // WORD_BYTES
        return padded_bytes((*leaf.local_shape, words), WORD_BYTES, platform)
    return padded_bytes(leaf.local_shape, np.dtype(jax.dtypes.canonicalize_dtype(leaf.dtype)).itemsize, platform)


def _by_passes(program: Program, plan: Plan, cluster: Cluster, report: Report) -> Report:
    """Level 1: what the partitioner's passes make of the step, in this process."""
    if not is_possible():
        raise SpanaxError("this jaxlib does not have the partitioner's passes.", where="level 1", fix="level 2 or 3")
    lowered = lower(program, plan, "cpu", devices=cluster.platform, inputs_only=report.inputs_only)
    found = with_arrays(abstract_collectives(lowered.module, plan.mesh), plan)
    figures = replace(report.compiled, collectives=totals(found))
    return replace(report, program_hash=lowered.digest, compiled=figures, collectives=found)


def _by_compiler(
    program: Program, plan: Plan, cluster: Cluster, report: Report, timeout: float, cache: bool, began: float
) -> Report:
    """Levels 2 and 3: what a compiler makes of the step."""
    target = _target(cluster, report.level)
    if line := missing(target.platform):
        raise SpanaxError(f"level 3 on {cluster} needs its compiler, which is not installed.", fix=line)
    lowered = lower(program, plan, target.platform, devices=cluster.platform, inputs_only=report.inputs_only)
    report = replace(report, program_hash=lowered.digest)
    report = replace(report, flags=for_platform(plan.xla_flags, target.platform) | dict(report.flags))
    said = {"flags": report.flags, "is_whole": report.is_whole, "versions": report.versions}
    key = report_cache.key_of(program=lowered.digest, plan=plan.to_json(), target=target, level=report.level, **said)
    if cache and (found := report_cache.find(key)):
        return found
    answer = compile_for(target, lowered, plan.mesh, timeout=timeout, flags=report.flags, is_whole=report.is_whole)
    report = replace(_with_answer(report, plan, target, answer), seconds=time.perf_counter() - began)
    report_cache.put(key, report)
    return report


def _target(cluster: Cluster, level: int) -> Target:
    if level == 3:
        return target_of(cluster)
    if cluster.num_devices > MAX_SIMULATED:
        raise SpanaxError(
            f"level 2 simulates at most {MAX_SIMULATED} devices, and {cluster} has {cluster.num_devices}.",
            fix="level 1 or 3",
        )
    return simulated(cluster.num_devices)


def _with_answer(report: Report, plan: Plan, target: Target, answer: Compiled) -> Report:
    """The report with what a compiler answered."""
    report = replace(report, versions={**report.versions, "compiler": " ".join(answer.platform_version.split())})
    if answer.needed_bytes is not None:
        return replace(
            report,
            fits=False,
            fits_by="the compiler",
            compiled=Figures(peak_bytes=answer.needed_bytes),
            limit_bytes=answer.limit_bytes,
            buffers=tuple(replace(one, paths=_paths(one.shapes, plan)) for one in answer.buffers),
            replicated=replicated_tensors(answer.log),
        )
    module = read_module(answer.module)
    found = with_arrays(collectives(module, plan.mesh), plan)
    figures = Figures(flops=program_flops(module), collectives=totals(found))
    report = replace(report, replicated=replicated_tensors(answer.log, module))
    if report.level == 2:
        return replace(report, compiled=replace(figures, state_bytes=_state_bytes(module, plan)), collectives=found)
    memory = answer.memory
    peak = memory.get("assigned") or memory["arguments"] + memory["temporaries"] + memory["outputs"] - memory["aliased"]
    report = replace(
        report,
        compiled=replace(figures, state_bytes=_state_bytes(module, plan), peak_bytes=peak),
        memory=memory,
        collectives=found,
        fits=True,
        fits_by="the compiler",
    )
    if target.platform == "tpu" or report.limit_bytes is None:
        return report
    # XLA's GPU compiler knows no limit: what it needs is held against what the chip has.
    return replace(report, fits=peak <= report.limit_bytes, fits_by="the compiler's peak and the chip's memory")


def _state_bytes(module: Module, plan: Plan) -> int:
    """Bytes of the state among a program's arguments, as their layouts have them."""
    arguments = module.entry.parameters
    return sum(arguments[at].shape.padded_bytes for at in range(len(plan.leaves)))


def _paths(shapes: str, plan: Plan) -> tuple[str, ...]:
    """The arrays of the state that have one of the shapes of a buffer on one device."""
    named: dict[str, list[str]] = {}
    for leaf in plan.leaves:
        named.setdefault(_shape_text(leaf), []).append(leaf.path)
    return tuple(path for shape, paths in named.items() if shape in shapes for path in paths)


def _shape_text(leaf: Placement) -> str:
    short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int32": "s32", "uint32": "u32"}
    return f"{short.get(leaf.dtype, leaf.dtype)}[{','.join(map(str, leaf.local_shape))}]"
