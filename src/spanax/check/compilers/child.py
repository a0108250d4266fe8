"""Compiles one program in a child process, for absent devices: `python -P -m spanax.check.compilers.child DIR`.

A compiler may crash, hang, or lock its library for the whole machine, so it does not run in the parent process. The
child reads `request.json` and `program.mlirbc` in DIR, and writes `answer.json` and `compiled.pb`.
"""

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from spanax.check.hlo.messages import parse_hlo
from spanax.compat import compiled
from spanax.errors import DataError

PASS = "spmd-partitioning"
EARLY = {
    "cpu": f"*after_{PASS}*.hlo.pb",
    "tpu": "*.jit_step.*after_optimizations_after_buffer_assignment.hlo.pb",
    "cuda": "*.jit_step.*_gpu_after_optimizations.hlo.pb",
}
"""The last dump of a program before machine code is generated; for CPU, before CPU-specific passes."""

POLL_SECONDS = 0.2

Answer = tuple[dict[str, Any], bytes]
"""The JSON answer, and the serialized HLO module, which is empty if compilation failed."""


def main(folder: Path) -> None:
    """Compiles the program in a folder and writes the answer there."""
    request = json.loads((folder / "request.json").read_text())
    _environment(request)
    answer, program = _compiled(folder, request)
    (folder / "compiled.pb").write_bytes(program)
    (folder / "answer.json").write_text(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)  # does not wait for the compiler's thread, which may still be running


def _environment(request: dict[str, Any]) -> None:
    """Sets the environment before JAX is imported: no accelerator starts, and another process may hold libtpu."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "1"  # XLA's warnings are parsed, so the caller's log level does not apply
    if request["platform"] == "tpu":
        os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-16")
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    if request["platform"] == "cpu":
        flags.append("--xla_backend_optimization_level=0")
    os.environ["XLA_FLAGS"] = " ".join(flags)


def _compiled(folder: Path, request: dict[str, Any]) -> Answer:
    import jax

    jax.config.update("jax_enable_compilation_cache", False)
    devices = _devices(request)
    platform = {"platform_version": devices.flat[0].client.platform_version}
    flags = {
        "xla_dump_to": str(folder / "dump"),
        "xla_dump_hlo_as_proto": True,
        "xla_dump_hlo_as_text": request["platform"] != "cpu",
        **({"xla_dump_hlo_pass_re": PASS} if request["platform"] == "cpu" else {}),
        **request["flags"],
    }

    def answered() -> Answer:
        try:
            executable = compiled((folder / "program.mlirbc").read_bytes(), devices, flags)
        except jax.errors.JaxRuntimeError as error:
            return {"error": str(error)}, b""
        program = executable.hlo_modules()[0].as_serialized_hlo_module_proto()
        return {"memory": _memory(executable.get_compiled_memory_stats())}, program

    early = EARLY[request["platform"]]
    answer, program = answered() if request["is_whole"] else first_result(folder / "dump", early, answered)
    return platform | answer, program


def first_result(folder: Path, early: str, compiled: Callable[[], Answer]) -> Answer:
    """Returns the result of a compilation, or the program dumped before code generation, whichever comes first.

    Code generation, whose result is never run, takes 95 % of the compile time of TPU programs.
    """
    future = ThreadPoolExecutor(1).submit(compiled)
    program = b""
    while not wait([future], POLL_SECONDS).done:
        before, program = program, _dumped(folder, early)
        if program and program == before:  # unchanged since the last poll, so the other dump files are complete
            return {"memory": {}}, program
    answer, program = future.result()
    return (answer, program) if "error" in answer else (answer, _dumped(folder, early) or program)


def _dumped(folder: Path, early: str) -> bytes:
    """Returns the program that the compiler has dumped; empty while the dump is missing or incomplete."""
    for path in folder.glob(early):
        data = path.read_bytes()
        try:
            parse_hlo(data)
        except DataError:
            return b""
        return data
    return b""


def _memory(stats: Any) -> dict[str, int]:
    return {
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "code": stats.generated_code_size_in_bytes,
    }


def _devices(request: dict[str, Any]) -> Any:
    """Returns the devices in the order in which the step runs on them, as an array with the shape of the mesh."""
    import jax

    from spanax.hardware.mesh import MeshShape

    if request["platform"] == "cpu":
        jax.config.update("jax_num_cpu_devices", request["num_devices"])
        devices = jax.devices()
    else:
        from jax.experimental import topologies

        options = {key: tuple(value) if isinstance(value, list) else value for key, value in request["options"].items()}
        name = request["topology"]
        if request["platform"] == "cuda":
            name, options["topology"] = "", name
        devices = topologies.get_topology_desc(name, platform=request["platform"], **options).devices
    if len(devices) != request["num_devices"]:
        raise SystemExit(f"the compiler's {request['topology']} has {len(devices)} devices")
    return MeshShape.of(request["mesh"]).build(devices).devices


if __name__ == "__main__":
    main(Path(sys.argv[1]))
