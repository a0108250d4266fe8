"""Compiles one program in a child process, for absent devices: `python -P -m spanax.check.compilers.child DIR`.

A compiler may die, hang, or hold the machine's one lock on its library; none of that may happen to the process that
asks. DIR holds `request.json` and `program.mlirbc`; the answer is left there as `answer.json` and `compiled.pb`.
"""

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spanax.check.hlo.protobuf import fields
from spanax.errors import DataError

PASS = "spmd-partitioning"
EARLY = {
    "cpu": f"*after_{PASS}*.hlo.pb",
    "tpu": "*.jit_step.*after_optimizations_after_buffer_assignment.hlo.pb",
    "cuda": "*.jit_step.*_gpu_after_optimizations.hlo.pb",
}
"""What a compiler dumps of a program last before it makes machine code, or (CPU) before it is made one for a CPU."""

POLL_SECONDS = 0.2

Answer = tuple[dict[str, Any], bytes]
"""What is said of a program, and the program as XLA serializes it: empty where none was made."""


def main(folder: Path) -> None:
    """Compile what lies in a folder, and leave the answer there."""
    request = json.loads((folder / "request.json").read_text())
    _environment(request)
    answer, program = _compiled(folder, request)
    (folder / "compiled.pb").write_bytes(program)
    (folder / "answer.json").write_text(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)  # the compiler may still be at work in its thread, and is not waited for


def _environment(request: dict[str, Any]) -> None:
    """Before JAX is imported: no accelerator is started, and libtpu may be loaded beside another process."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "1"  # warnings of XLA's are read, whatever the caller wants to see
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
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir

    jax.config.update("jax_enable_compilation_cache", False)
    devices = _devices(request)
    told = {"platform_version": devices.flat[0].client.platform_version}
    flags = {
        "xla_dump_to": str(folder / "dump"),
        "xla_dump_hlo_as_proto": True,
        "xla_dump_hlo_as_text": request["platform"] != "cpu",
        **({"xla_dump_hlo_pass_re": PASS} if request["platform"] == "cpu" else {}),
        **request["flags"],
    }
    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=devices.size,
        device_assignment=devices.reshape(1, -1),
        env_options_overrides=flags,
    )

    def compiled() -> Answer:
        with mlir.make_ir_context():
            module = ir.Module.parse((folder / "program.mlirbc").read_bytes())
            there = xla_client.DeviceList(tuple(devices.flat))
            try:
                client = devices.flat[0].client
                executable = compiler.backend_compile_and_load(client, module, there, options, [])
            except jax.errors.JaxRuntimeError as error:
                return {"error": str(error)}, b""
        program = executable.hlo_modules()[0].as_serialized_hlo_module_proto()
        return {"memory": _memory(executable.get_compiled_memory_stats())}, program

    early = EARLY[request["platform"]]
    answer, program = compiled() if request["is_whole"] else until(folder / "dump", early, compiled)
    return told | answer, program


def until(folder: Path, early: str, compiled: Callable[[], Answer]) -> Answer:
    """What a compilation says, or the program as it is before machine code is made of it: whichever is first there.

    Of the time that TPU programs take, 95 % go into machine code, which nobody is going to run.
    """
    found: list[Answer] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(compiled())
        except BaseException as error:  # told by the thread that waits
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    program = b""
    while thread.is_alive():
        thread.join(POLL_SECONDS)
        before, program = program, _dumped(folder, early)
        if program and program == before:  # seen twice: what is dumped beside it is there too
            return {"memory": {}}, program
    if failed:
        raise failed[0]
    answer, program = found[0]
    return (answer, program) if "error" in answer else (answer, _dumped(folder, early) or program)


def _dumped(folder: Path, early: str) -> bytes:
    """The program that a compiler has dumped; empty while there is none, or only the beginning of one."""
    for path in folder.glob(early):
        data = path.read_bytes()
        try:
            return data if fields(data) else b""
        except DataError:
            return b""
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
    """The devices as the step will have them when it runs: an array of the mesh's shape."""
    import jax

    from spanax.hardware.mesh import MeshShape

    if request["platform"] == "cpu":
        jax.config.update("jax_num_cpu_devices", request["num_devices"])
        devices = jax.devices()
    else:
        from jax.experimental import topologies

        wanted = {key: tuple(value) if isinstance(value, list) else value for key, value in request["options"].items()}
        name = request["topology"]
        if request["platform"] == "cuda":
            name, wanted["topology"] = "", name
        devices = topologies.get_topology_desc(name, platform=request["platform"], **wanted).devices
    if len(devices) != request["num_devices"]:
        raise SystemExit(f"the compiler's {request['topology']} has {len(devices)} devices")
    return MeshShape.of(request["mesh"]).build(devices).devices


if __name__ == "__main__":
    main(Path(sys.argv[1]))
