"""Child: one compilation in a process of its own, for devices that are not here. `python -m spanax.check.child DIR`.

A compiler may die, hang, or hold the machine's one lock on its library; none of that may happen to the process that
asks. DIR holds `request.json` and `program.mlirbc`; the answer is left there as `answer.json` and `compiled.pb`.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

PASS = "spmd-partitioning"


def main(folder: Path) -> None:
    """Compile what lies in a folder, and leave the answer there."""
    request = json.loads((folder / "request.json").read_text())
    _environment(request)
    answer = _compiled(folder, request)
    (folder / "answer.json").write_text(json.dumps(answer))


def _environment(request: dict[str, Any]) -> None:
    """Before JAX is imported: no accelerator is started, and libtpu may be loaded beside another process."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["NPROC"] = "32"
    if request["platform"] == "tpu":
        os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-16")
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    if request["platform"] == "cpu":
        flags.append("--xla_backend_optimization_level=0")
    os.environ["XLA_FLAGS"] = " ".join(flags)


def _compiled(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    import jax
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir

    jax.config.update("jax_enable_compilation_cache", False)
    began = time.perf_counter()
    devices = _devices(request)
    platform = devices.flat[0].client.platform_version
    dump = folder / "dump"
    flags = {"xla_dump_to": str(dump), **request["flags"]}
    if request["platform"] == "cpu":
        flags |= {"xla_dump_hlo_pass_re": PASS, "xla_dump_hlo_as_proto": True}
    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=devices.size,
        device_assignment=devices.reshape(1, -1),
        env_options_overrides=flags,
    )
    with mlir.make_ir_context():
        module = ir.Module.parse((folder / "program.mlirbc").read_bytes())
        try:
            there = xla_client.DeviceList(tuple(devices.flat))
            executable = compiler.backend_compile_and_load(devices.flat[0].client, module, there, options, [])
        except jax.errors.JaxRuntimeError as error:
            return {"error": str(error), "platform_version": platform, "seconds": time.perf_counter() - began}
    stats = executable.get_compiled_memory_stats()
    if request["platform"] == "cpu":
        [after] = dump.glob(f"*after_{PASS}*.hlo.pb")
        compiled = after.read_bytes()
    else:
        compiled = executable.hlo_modules()[0].as_serialized_hlo_module_proto()
    (folder / "compiled.pb").write_bytes(compiled)
    return {
        "memory": {
            "arguments": stats.argument_size_in_bytes,
            "outputs": stats.output_size_in_bytes,
            "aliased": stats.alias_size_in_bytes,
            "temporaries": stats.temp_size_in_bytes,
            "code": stats.generated_code_size_in_bytes,
            "peak": getattr(stats, "peak_memory_in_bytes", 0),
        },
        "platform_version": platform,
        "seconds": time.perf_counter() - began,
    }


def _devices(request: dict[str, Any]) -> Any:
    """The devices in the order of the mesh, as an array of its shape."""
    import jax

    sizes, names = tuple(request["mesh"].values()), tuple(request["mesh"])
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
    if request["num_slices"] > 1:
        from jax.experimental import mesh_utils

        return mesh_utils.create_hybrid_device_mesh(
            tuple(request["within_slice"]), tuple(request["between_slices"]), devices, allow_split_physical_axes=True
        )
    kinds = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(sizes, names, axis_types=kinds, devices=devices).devices


if __name__ == "__main__":
    main(Path(sys.argv[1]))
