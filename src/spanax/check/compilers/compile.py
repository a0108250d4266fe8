"""Compile: a program given to a compiler in a process of its own, with a time limit and a log that outlives a crash."""

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
from spanax.check.compilers.target import Target, missing
from spanax.check.report import Buffer
from spanax.errors import CompilerError, SpanaxError
from spanax.hardware.mesh import MeshShape

TIMEOUT_SECONDS = 900.0

OUT_OF_MEMORY = re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)")
"""Source: libtpu 0.0.51's error E1000, CompileTimeHbmOom."""

POWERS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, eq=False)
class Compiled:
    """What a compiler said of a program.

    `module` is XLA's serialized program, empty where none was made; `memory` its own count of bytes on one device
    (`assigned`: of its main memory in all). `needed_bytes` and `limit_bytes` are set where it does not fit, and then
    `buffers` holds the largest, as told: their paths are not known yet. `log` is what it wrote meanwhile.
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
    """Compile a program for a target in a process of its own; up to machine code only where `is_whole` asks for it.

    Raises:
      SpanaxError: the compiler is not installed.
      CompilerError: it died, refused the program or took too long; its log is kept.
    """
    if line := missing(target.platform):
        raise SpanaxError(f"the compiler for {target.topology} is not installed.", fix=line)
    folder = Path(tempfile.mkdtemp(prefix="spanax-check-"))
    try:
        _ask(folder, target, lowered, mesh, dict(flags or {}), is_whole)
        log = _run(folder, target, timeout)
        found = replace(_answered(folder, target), log=log)
    except CompilerError:
        shutil.rmtree(folder / "dump", ignore_errors=True)
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    return found


def _ask(folder: Path, target: Target, lowered: Lowered, mesh: MeshShape, flags: Any, is_whole: bool) -> None:
    mesh.split(target.num_slices)  # refused here, and not in the child
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
    """Let the child work; what it wrote."""
    log = folder / "log.txt"
    command = [sys.executable, "-P", "-m", "spanax.check.compilers.child", str(folder)]
    # Where this process finds its packages, but not the folder it works in, whose files would shadow them.
    found = [entry for entry in sys.path if entry and Path(entry).resolve() != Path.cwd()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(found)}
    with log.open("wb") as file:
        try:
            code = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, timeout=timeout, env=environment
            ).returncode
        except subprocess.TimeoutExpired:
            raise CompilerError(
                f"the compiler for {target.topology} took longer than {timeout:g} s.",
                where=f"its log: {log}",
                fix=f"--timeout {2 * timeout:g}, or a level below",
            ) from None
    if code or not (folder / "answer.json").exists():
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise CompilerError(
            f"the compiler for {target.topology} died ({how}): {''.join(last)[:200]}",
            where=f"its log: {log}",
            fix="a level below, or another version of the compiler",
        )
    return log.read_text(errors="replace")


def _answered(folder: Path, target: Target) -> Compiled:
    answer = json.loads((folder / "answer.json").read_text())
    error, version = answer.get("error", ""), answer["platform_version"]
    if not error:
        assigned = next(iter((folder / "dump").glob("*.jit_step.*buffer-assignment.txt")), None)
        memory = answer["memory"] | (_assigned(assigned) if assigned is not None else {})
        return Compiled((folder / "compiled.pb").read_bytes(), memory, version)
    told = OUT_OF_MEMORY.search(error)
    if told is None:
        raise CompilerError(
            f"the compiler for {target.topology} refuses the program: {error.splitlines()[0][:300]}",
            where=f"its log: {folder / 'log.txt'}",
        )
    needed, limit = (int(float(told[at]) * POWERS[told[at + 1]]) for at in (1, 3))
    report = next(iter((folder / "dump").glob("*.jit_step.*memory-usage-report.txt")), None)
    return Compiled(b"", {}, version, needed, limit, _buffers(report))


def _assigned(dumped: Path) -> dict[str, int]:
    """Bytes of a chip's main memory by what they are for, as the compiler has assigned them.

    What is local to a thread, and other memories (those with a color), are left out.
    """
    found = {"arguments": 0, "temporaries": 0, "other": 0}
    for size, what in re.findall(r"^allocation \d+: size (\d+),(.*)$", dumped.read_text(), flags=re.MULTILINE):
        if "thread-local" not in what and " color " not in what:
            kind = "arguments" if " parameter " in what else "temporaries" if "temp" in what else "other"
            found[kind] += int(size)
    return found | {"assigned": sum(found.values())}


def _buffers(report: Path | None) -> tuple[Buffer, ...]:
    """The largest allocations in libtpu's report of what uses the memory."""
    if report is None:
        return ()
    row = r"^\s*[\d.]+\w+\(\s*\d+%\);\s*([\d.]+)(\w+);.*?;\s*\d+; (.+)$"
    main = report.read_text().split("Memory Space:")[1]
    found = [Buffer(_bytes(size, unit), text) for size, unit, text in re.findall(row, main, flags=re.MULTILINE)]
    return tuple(sorted(found, key=lambda one: -one.num_bytes)[:12])


def _bytes(size: str, unit: str) -> int:
    return int(float(size) * POWERS[unit.removesuffix("B").removesuffix("i")])
