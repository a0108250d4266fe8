"""Verifies a plan's predictions against XLA, at one of four levels and without the hardware."""

import functools
import hashlib
import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spanax.check.compilers.abstract_mesh import abstract_collectives, is_available
from spanax.check.compilers.compile import TIMEOUT_SECONDS, Compiled, compile_for
from spanax.check.compilers.lowered_step import lower
from spanax.check.compilers.target import Target, install_command, platform_of, simulated_target, target_of
from spanax.check.hlo.collectives import collectives, totals, with_arrays
from spanax.check.hlo.flops import program_flops
from spanax.check.hlo.module import HOST_MEMORY, Module, read_module
from spanax.check.hlo.replicated_tensors import replicated_tensors
from spanax.check.report import Figures, Report
from spanax.documents import read_bytes
from spanax.errors import DeviceCountError, NotInstalledError, RangeError, UnknownNameError, UnsupportedError
from spanax.frames import OURS
from spanax.hardware.cluster import Cluster, cluster_of
from spanax.hardware.flags import for_platform
from spanax.plan.candidate import rounded_up
from spanax.plan.cost.memory.tiles import padded_bytes
from spanax.plan.evaluate import Evaluation, evaluate
from spanax.plan.place import check_made_for
from spanax.plan.plan import Plan
from spanax.plan.sharding.placement import DEVICE, HOST, Placement
from spanax.trace.jaxpr.graph import Op
from spanax.trace.kernels.operation import opaque_kernels
from spanax.trace.program import Program
from spanax.train.data.cache import cache_folder, keep

MAX_SIMULATED = 1024
"""The most devices that level 2 simulates; above, compiling for CPU takes longer than the target's own compiler."""

WORD_BYTES = 4

PACKAGES = ("spanax", "jax", "jaxlib", "flax", "libtpu", "jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12")
"""The packages that a report depends on."""


def check(  # noqa: PLR0913
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
    """Compares a plan's predictions with XLA's figures. Allocates no arrays and does not need the cluster's devices.

    Args:
      program: the traced program.
      plan: a plan for it.
      cluster: the devices of the plan, or their name.
      level: the level of the check; by default, the highest level available on this machine.
        0: shapes and bytes only (milliseconds);
        1: the partitioner's passes on an abstract mesh (about a second, for any number of devices);
        2: XLA's partitioner for simulated CPU devices, at most 1,024 (seconds);
        3: the compiler for the cluster's chips (TPU: `spanax[tpu]`, NVIDIA: `spanax[cuda12]`; seconds).
      timeout: the time limit for the compiler, in seconds.
      flags: compiler options in addition to its defaults and those of the plan.
      codegen: whether the compiler generates machine code, which takes up to 20 times as long and changes no figure.
      inputs_only: shards only the state and the batch as planned, like a `jax.jit` with `in_shardings`; XLA propagates
        all other shardings.
      cache: whether to reuse the report of an earlier check of the same program, devices, flags and versions.

    Raises:
      SpanaxError: the plan was made for another program, the level is not available here, or its compiler is not
        installed.
      CompilerError: the compiler crashed, rejected the program or exceeded the time limit; its log file is saved.

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
        raise DeviceCountError(
            f"the plan is for {plan.mesh.size} devices, but {cluster} has {cluster.num_devices}.",
            where=f"mesh {plan.mesh}",
        )
    if not timeout > 0:
        raise RangeError(f"--timeout is {timeout}; expected a number > 0.", fix=f"--timeout {TIMEOUT_SECONDS:g}")
    chosen = highest_level(cluster) if level is None else level
    kernel = _kernel(program, cluster)
    if kernel is not None and chosen == 2:
        if level is not None:
            raise UnsupportedError(
                f"level 2 simulates {cluster} on CPUs, for which `{kernel.name}` does not compile.",
                where=kernel.where,
                fix="level 1 or 3",
            )
        chosen = 1
    start = time.perf_counter()
    report = _static(program, plan, cluster, chosen)
    report = replace(report, flags=dict(flags or {}), is_whole=codegen, inputs_only=inputs_only)
    if chosen == 1:
        report = _by_passes(program, plan, cluster, report)
    elif chosen in (2, 3):
        return _by_compiler(program, plan, cluster, report, timeout, cache, start)
    elif chosen != 0:
        raise UnknownNameError(f"unknown level {level}.", fix="0, 1, 2 or 3")
    return replace(report, seconds=time.perf_counter() - start)


def highest_level(cluster: Cluster) -> int:
    """Returns the highest level of `check` that is available on this machine for a cluster."""
    platform = platform_of(cluster)
    if platform in ("tpu", "cuda") and not install_command(platform):
        return 3
    if cluster.num_devices <= MAX_SIMULATED:
        return 2
    return 1 if is_available() else 0


def _kernel(program: Program, cluster: Cluster) -> Op | None:
    """Returns a kernel of the step that compiles only for the platform of the cluster, if there is one."""
    ops = program.step.graph.ops() if platform_of(cluster) != "cpu" else ()
    kernels = (op for op in ops if any(not eqn.params.get("interpret") for eqn in opaque_kernels(op)))
    return next(kernels, None)


def _static(program: Program, plan: Plan, cluster: Cluster, level: int) -> Report:
    """Returns the report of level 0: the predictions, and the exact bytes of the state with the padding of the chip."""
    # Levels 1 and 2 read the program right after the partitioner, before collectives are combined.
    cost = evaluate(program, plan, cluster, adds_first=cluster.adds_first and level in (0, 3))
    platform = platform_of(cluster)
    state, host = (
        sum(_padded(leaf, platform) for leaf in plan.leaves if leaf.memory_kind == kind) for kind in (DEVICE, HOST)
    )
    limit = cluster.memory_bytes
    upper = rounded_up(cost.memory.upper_bytes[0])
    return Report(
        level=level,
        target=str(cluster),
        layout=plan.layout.name,
        mesh=repr(plan.mesh),
        fits=None if limit is None else upper <= limit,
        fits_by="the plan",
        predicted=replace(figures(cost), state_bytes=state, host_bytes=host),
        compiled=Figures(state_bytes=state, host_bytes=host),
        upper_bytes=upper,
        limit_bytes=limit,
        versions={package: version for package in PACKAGES if (version := _version(package))},
    )


def _version(package: str) -> str:
    """Returns the version of a package; empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _padded(leaf: Placement, platform: str) -> int:
    if leaf.is_key:  # a random key is stored as 32-bit words
        words = leaf.local_bytes // math.prod(leaf.local_shape) // WORD_BYTES
        return padded_bytes((*leaf.local_shape, words), WORD_BYTES, platform)
    return padded_bytes(leaf.local_shape, np.dtype(jax.dtypes.canonicalize_dtype(leaf.dtype)).itemsize, platform)


def _by_passes(program: Program, plan: Plan, cluster: Cluster, report: Report) -> Report:
    """Returns the report of level 1, from the partitioner's passes in this process."""
    if not is_available():
        raise NotInstalledError(
            "this jaxlib does not provide the partitioner's passes.", where="level 1", fix="level 2 or 3"
        )
    platform = "cpu" if _kernel(program, cluster) is None else platform_of(cluster)
    lowered = lower(program, plan, platform, devices=cluster.platform, inputs_only=report.inputs_only)
    moves = with_arrays(abstract_collectives(lowered.module, plan.mesh), plan)
    figures = replace(report.compiled, collectives=totals(moves))
    return replace(report, program_hash=lowered.digest, compiled=figures, collectives=moves)


def _by_compiler(
    program: Program, plan: Plan, cluster: Cluster, report: Report, timeout: float, cache: bool, start: float
) -> Report:
    """Returns the report of level 2 or 3, from a compiler in a child process."""
    if report.level == 2 and cluster.num_devices > MAX_SIMULATED:
        raise UnsupportedError(
            f"level 2 simulates at most {MAX_SIMULATED} devices, but {cluster} has {cluster.num_devices}.",
            fix="level 1 or 3",
        )
    target = target_of(cluster) if report.level == 3 else simulated_target(cluster.num_devices)
    if command := install_command(target.platform):
        raise NotInstalledError(f"level 3 on {cluster} needs its compiler, which is not installed.", fix=command)
    lowered = lower(program, plan, target.platform, devices=cluster.platform, inputs_only=report.inputs_only)
    report = replace(report, program_hash=lowered.digest)
    report = replace(report, flags=for_platform(plan.xla_flags, target.platform) | dict(report.flags))
    # The report so far has the predictions, the limit of the memory, the program, flags and versions.
    key = key_of(report=report.to_json(), plan=plan.to_json(), target=target)
    if cache and (cached := find_cached(key)):
        return cached
    compiled = compile_for(target, lowered, plan.mesh, timeout=timeout, flags=report.flags, is_whole=report.is_whole)
    report = replace(_with_answer(report, plan, target, compiled), seconds=time.perf_counter() - start)
    put_cached(key, report)
    return report


def _with_answer(report: Report, plan: Plan, target: Target, compiled: Compiled) -> Report:
    """Returns the report with a compiler's result."""
    report = replace(report, versions={**report.versions, "compiler": " ".join(compiled.platform_version.split())})
    if compiled.needed_bytes is not None:
        return replace(
            report,
            fits=False,
            fits_by="the compiler",
            compiled=Figures(peak_bytes=compiled.needed_bytes),
            limit_bytes=compiled.limit_bytes,
            buffers=tuple(replace(buffer, paths=_paths(buffer.shapes, plan)) for buffer in compiled.buffers),
            replicated=replicated_tensors(compiled.log),
        )
    module = read_module(compiled.module)
    moves = with_arrays(collectives(module, plan.mesh), plan)
    is_simulated = report.level == 2
    state, host = _state_bytes(module, plan, is_simulated)
    figures = Figures(state, flops=program_flops(module), collectives=totals(moves), host_bytes=host)
    report = replace(report, replicated=replicated_tensors(compiled.log, module))
    if is_simulated:
        return replace(report, compiled=figures, collectives=moves)
    memory = compiled.memory
    peak = memory.get("assigned") or memory["arguments"] + memory["temporaries"] + memory["outputs"] - memory["aliased"]
    report = replace(
        report,
        compiled=replace(figures, peak_bytes=peak),
        memory=memory,
        collectives=moves,
        fits=True,
        fits_by="the compiler",
    )
    if target.platform == "tpu" or report.limit_bytes is None:
        return report
    # XLA's GPU compiler has no memory limit, so its peak is compared with the memory of the chip.
    return replace(report, fits=peak <= report.limit_bytes, fits_by="the compiler's peak and the chip's memory")


def _state_bytes(module: Module, plan: Plan, is_simulated: bool) -> tuple[int, int]:
    """Returns the bytes of the state among a program's arguments in the memory of the device and of the host, padded.

    Layouts of programs for simulated devices have no memory space: then that of the plan counts.
    """
    arguments = module.entry.parameters
    num_bytes = [0, 0]
    for index, leaf in enumerate(plan.leaves):
        shape = arguments[index].shape
        is_on_host = leaf.memory_kind == HOST if is_simulated else shape.memory_space == HOST_MEMORY
        num_bytes[is_on_host] += shape.padded_bytes
    return num_bytes[0], num_bytes[1]


def _paths(shapes: str, plan: Plan) -> tuple[str, ...]:
    """Returns the paths of the state arrays whose per-device shape occurs in a buffer, equal shapes together."""
    short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int32": "s32", "uint32": "u32"}
    by_shape: dict[str, list[str]] = {}
    for leaf in plan.leaves:
        shape = f"{short.get(leaf.dtype, leaf.dtype)}[{','.join(map(str, leaf.local_shape))}]"
        by_shape.setdefault(shape, []).append(leaf.path)
    return tuple(path for shape, paths in by_shape.items() if shape in shapes for path in paths)


def figures(cost: Evaluation) -> Figures:
    """Returns the figures of an evaluated plan."""
    plan = cost.plan
    return Figures(plan.state_bytes(), round(cost.peak_bytes), cost.matmul_flops, cost.collectives, plan.host_bytes)


def key_of(**parts: Any) -> str:
    """Returns the cache key of a check, a hash of what it depends on and of the source of Spanax.

    Example:
      >>> key_of(program="a", level=3) == key_of(level=3, program="a") != key_of(program="b", level=3)
      True
    """
    text = json.dumps(parts, sort_keys=True, default=str) + _source_digest(OURS)
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _source_digest(folder: Path) -> str:
    """Returns a hash of the code and tables in a folder: between two releases they change, and the version does not."""
    digest = hashlib.sha256()
    for path in sorted((*folder.rglob("*.py"), *folder.rglob("*.toml"))):
        digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def find_cached(key: str) -> Report | None:
    """Returns the cached report, or None if it is missing or damaged."""
    try:
        return replace(Report.from_json(read_bytes(_cache_file(key)).decode()), is_kept=True)
    except (OSError, ValueError):  # missing or damaged
        return None


def put_cached(key: str, report: Report) -> None:
    """Writes a report to the cache."""
    keep(_cache_file(key), lambda file: file.write(report.to_json().encode()), None)


def _cache_file(key: str) -> Path:
    return cache_folder(os.environ.get("SPANAX_CACHE_DIR")) / "checks" / f"{key}.json"
