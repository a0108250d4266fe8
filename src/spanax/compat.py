"""Private names of JAX, jaxlib, tyro and Python; no other module of Spanax imports them.

Every function works for JAX from 0.10.2 on and before 0.13, unless it says otherwise. `tests/test_compat.py` calls each
of them and fails once a public name that replaces one exists.
"""

import atexit
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


def coordination() -> Any:
    """Returns JAX's state of a group of processes: `client`, `process_id`, `num_processes`, `coordinator_address`.

    `jax.distributed` publishes no keys and barriers of the coordinator, and the functions of `multihost_utils` are
    collectives, which would run between two steps of the user.
    """
    from jax._src import distributed

    return distributed.global_state


def has_backend() -> bool:
    """Returns whether JAX has started a backend; `jax.devices()` would start one."""
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


def register_cpu_collectives(client: Any, address: Mapping[str, str]) -> None:
    """Makes the CPU backend use Gloo on `address`: `{"hostname": ...}` or `{"interface": ...}`."""
    from jax._src import xla_bridge
    from jax.extend.backend import register_backend_factory
    from jaxlib import _jax

    def make_cpu_client() -> Any:
        collectives = _jax.make_gloo_tcp_collectives(distributed_client=client, **address)
        return xla_bridge.make_cpu_client(collectives=collectives)

    register_backend_factory("cpu", make_cpu_client, priority=0, fail_quietly=False)


def cluster_kinds() -> Mapping[str, Any]:
    """Returns the kinds of clusters that `jax.distributed.initialize` joins without being asked, by class name.

    `jax.distributed.initialize` raises without a cluster, and starts a coordinator for a single process.
    """
    from jax._src.clusters import ClusterEnv

    return {kind.__name__: kind for kind in ClusterEnv._cluster_types if not kind.opt_in_only_method}


def cudnn_attention() -> Any:
    """Returns the module of cuDNN's fused attention; `jax.nn` queries a local GPU and adds a custom partitioner."""
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


def ir_context() -> Any:
    """Returns a context of MLIR with the dialects of JAX."""
    from jax._src.interpreters import mlir

    return mlir.make_ir_context()


def pass_manager(passes: str) -> Any:
    """Returns the passes that a text names, in the current context of MLIR."""
    from jaxlib.mlir import passmanager

    return passmanager.PassManager.parse(passes)


def compiled(program: bytes, devices: Any, flags: Mapping[str, Any]) -> Any:
    """Returns the executable of a serialized module for devices that need not be attached, an array of any shape."""
    from jax._src import compiler
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir
    from jax.extend.backend import get_compile_options

    options = get_compile_options(
        num_replicas=1,
        num_partitions=devices.size,
        device_assignment=devices.reshape(1, -1),
        env_options_overrides=dict(flags),
    )
    with ir_context():
        module = ir.Module.parse(program)
        device_list = xla_client.DeviceList(tuple(devices.flat))
        return compiler.backend_compile_and_load(devices.flat[0].client, module, device_list, options, [])


def color_help(is_colored: bool) -> None:
    """Sets whether tyro's help and errors have colors; tyro publishes no setting. tyro 1.0 and later."""
    import tyro

    tyro._experimental_options["ansi_codes"] = is_colored


def before_exit(function: Callable[[], None]) -> None:
    """Calls a function before the interpreter shuts down executors: functions of `atexit` run after that.

    `concurrent.futures` registers its own on import; later registrations run first. Python 3.11 to 3.14.
    """
    getattr(threading, "_register_atexit", atexit.register)(function)


def is_of_python() -> bool:
    """Returns whether Python started the current thread; `threading` represents others by a private type."""
    return not isinstance(threading.current_thread(), threading._DummyThread)


@contextmanager
def unsharded_tracers() -> Iterator[None]:
    """Traced arrays have no attribute `sharding`: JAX before 0.12 does not search for the origin of one that is asked.

    Flax asks twice for each draw from `nnx.Rngs` and each parameter that an optimizer updates. JAX then composes a
    message from all operations traced before, which nobody reads: `Tracer.__getattr__` raises its own.
    """
    from jax._src import core

    written = core.Tracer.__dict__["sharding"]

    def sharding(self: Any) -> Any:
        raise AttributeError("a traced array has no attribute 'sharding'")

    core.Tracer.sharding = property(sharding)
    try:
        yield
    finally:
        core.Tracer.sharding = written
