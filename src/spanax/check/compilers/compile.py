"""Compiles a lowered step in a child process, with a time limit and a log that survives a crash."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spanax.check.compilers.lowered_step import Lowered
from spanax.check.compilers.target import Target
from spanax.check.report import Buffer
from spanax.errors import CompilerError
from spanax.hardware.mesh import MeshShape

TIMEOUT_SECONDS = 900.0

OUT_OF_MEMORY = re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)")
"""Source: error E1000, CompileTimeHbmOom, of libtpu 0.0.51."""

FATAL = re.compile(r"F\d{4} [\d:.]+ +\d+ [\w.]+:\d+\] ")
"""The start of a line of XLA's log that ends the process."""

POWERS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, eq=False)
class Compiled:
    """The result of compiling a program.

    Attributes:
      module: the serialized HLO module; empty if the program does not fit in memory.
      memory: the compiler's memory statistics in bytes per device; `assigned` is the total in main memory.
      platform_version: the version of the compiler.
      needed_bytes: the memory needed, if the program does not fit.
      limit_bytes: the memory available, if the program does not fit.
      buffers: the largest buffers, without paths, if the program does not fit.
      log: the log of the compiler.
    """

    module: bytes
    memory: dict[str, int]
    platform_version: str
    needed_bytes: int | None = None
    limit_bytes: int | None = None
    buffers: tuple[Buffer, ...] = ()
    log: str = ""


def compile_for(
    target: Target,
    lowered: Lowered,
    mesh: MeshShape,
    *,
    timeout: float = TIMEOUT_SECONDS,
    flags: Mapping[str, str] | None = None,
    is_whole: bool = False,
) -> Compiled:
    """Compiles a program for a target in a child process; generates machine code only with `is_whole`.

    Raises:
      CompilerError: the compiler crashed, rejected the program or exceeded the time limit; its log file is kept.
    """
    folder = Path(tempfile.mkdtemp(prefix="spanax-check-"))
    try:
        _write_request(folder, target, lowered, mesh, dict(flags or {}), is_whole)
        log = _run(folder, target, timeout)
        compiled = replace(_result(folder, target), log=log)
    except CompilerError:
        shutil.rmtree(folder / "dump", ignore_errors=True)
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    return compiled


def _write_request(folder: Path, target: Target, lowered: Lowered, mesh: MeshShape, flags: Any, is_whole: bool) -> None:
    mesh.split(target.num_slices)  # raises here instead of in the child
    request = {
        "platform": target.platform,
        "topology": target.topology,
        "num_devices": target.num_devices,
        "options": target.options,
        "mesh": dict(mesh.axes),
        "flags": flags,
        "is_whole": is_whole,
    }
    (folder / "request.json").write_text(json.dumps(request))
    (folder / "program.mlirbc").write_bytes(lowered.code)


def _run(folder: Path, target: Target, timeout: float) -> str:
    """Runs the child process and returns its log."""
    log = folder / "log.txt"
    command = [sys.executable, "-P", "-m", "spanax.check.compilers.child", str(folder)]
    # The import path of this process, except for the working directory, whose files could shadow packages.
    entries = [entry for entry in sys.path if entry and Path(entry).resolve() != Path.cwd()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entries)}
    with log.open("wb") as file:
        try:
            code = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, timeout=timeout, env=environment
            ).returncode
        except subprocess.TimeoutExpired:
            raise CompilerError(
                f"the compiler for {target.topology} exceeded the time limit of {timeout:g} s.",
                where=f"compiler log: {log}",
                fix=f"--timeout {2 * timeout:g}, or a lower level",
            ) from None
    if code or not (folder / "answer.json").exists():
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        # Of a fatal error, the last lines are addresses.
        fatal = next((line.partition("] ")[2] for line in lines if FATAL.match(line)), "".join(lines[-1:]))
        status = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise CompilerError(
            f"the compiler for {target.topology} crashed ({status}) while compiling: {fatal[:200]}",
            where=f"compiler log: {log}",
            fix="JAX_USE_SHARDY_PARTITIONER=0, another layout, a lower level, or another version of the compiler",
        )
    return log.read_text(errors="replace")


def _result(folder: Path, target: Target) -> Compiled:
    answer = json.loads((folder / "answer.json").read_text())
    error = answer.get("error", "")
    version = answer["platform_version"]
    if not error:
        assigned = next(iter((folder / "dump").glob("*.jit_step.*buffer-assignment.txt")), None)
        memory = answer["memory"] | (_assigned_bytes(assigned) if assigned is not None else {})
        return Compiled((folder / "compiled.pb").read_bytes(), memory, version)
    match = OUT_OF_MEMORY.search(error)
    if match is None:
        raise CompilerError(
            f"the compiler for {target.topology} rejects the program: {error.splitlines()[0][:300]}",
            where=f"compiler log: {folder / 'log.txt'}",
        )
    needed, limit = (int(float(match[group]) * POWERS[match[group + 1]]) for group in (1, 3))
    report = next(iter((folder / "dump").glob("*.jit_step.*memory-usage-report.txt")), None)
    return Compiled(b"", {}, version, needed, limit, _buffers(report))


def _assigned_bytes(dumped: Path) -> dict[str, int]:
    """Returns the bytes that the compiler's buffer assignment allocates in main memory, by purpose.

    Thread-local buffers and other memory spaces (those with a color) are omitted.
    """
    num_bytes = {"arguments": 0, "temporaries": 0, "other": 0}
    for size, description in re.findall(r"^allocation \d+: size (\d+),(.*)$", dumped.read_text(), flags=re.MULTILINE):
        if "thread-local" not in description and " color " not in description:
            purpose = "other"
            if " parameter " in description:
                purpose = "arguments"
            elif "temp" in description:
                purpose = "temporaries"
            num_bytes[purpose] += int(size)
    return num_bytes | {"assigned": sum(num_bytes.values())}


def _buffers(report: Path | None) -> tuple[Buffer, ...]:
    """Returns the largest allocations in libtpu's memory usage report."""
    if report is None:
        return ()
    row = r"^\s*[\d.]+\w+\(\s*\d+%\);\s*([\d.]+)(\w+);.*?;\s*\d+; (.+)$"
    main = report.read_text().split("Memory Space:")[1]
    buffers = [Buffer(_bytes(size, unit), text) for size, unit, text in re.findall(row, main, flags=re.MULTILINE)]
    return tuple(sorted(buffers, key=lambda buffer: -buffer.num_bytes)[:12])


def _bytes(size: str, unit: str) -> int:
    return int(float(size) * POWERS[unit.removesuffix("B").removesuffix("i")])
