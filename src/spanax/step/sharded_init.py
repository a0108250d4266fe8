"""Initializes the state sharded: each array is computed on the devices that store it.

A single program for the state of a deep unrolled model takes a minute to compile and twice the memory of the state.
So keys, counts and other scalars are computed first, and each array is then computed by a small program of its own,
compiled once for all arrays with equal computations (such as one kernel of 48 blocks). Programs are compiled in
parallel and run in sequence.
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from spanax.plan.sharding.placement import Placement
from spanax.step.placement import platform_of
from spanax.trace.analysis.sharding_keys import only_moves
from spanax.trace.jaxpr.graph import Graph, Op, from_jaxpr
from spanax.trace.jaxpr.interpret import Values, run
from spanax.trace.program import Program

FILLED_BYTES = 4 << 20
"""Constant arrays up to this size are copied from the host: 1 to 2 ms, where loading a cached program takes 10 ms."""


def init_sharded_state(
    program: Program,
    placements: Sequence[Placement],
    mesh: jax.sharding.Mesh,
    seed: int,
    weights: Mapping[int, jax.Array] | None = None,
) -> list[jax.Array]:
    """Returns the state of a program at step 0, sharded by its placements.

    The values depend on the seed and not on the mesh. Leaves in `weights`, by index, are used as they are, also in the
    initial values of optimizer state that is computed from them.
    """
    shardings = [placement.sharding(mesh) for placement in placements]
    derived = {index for index, placement in enumerate(placements) if placement.kind == "optimizer"}
    return init_sharded(program.init.jaxpr, program.init.inputs(seed), shardings, weights or {}, derived)


def init_sharded(
    jaxpr: core.ClosedJaxpr,
    inputs: Sequence[Any],
    shardings: Sequence[jax.sharding.NamedSharding],
    weights: Mapping[int, jax.Array] = MappingProxyType({}),
    derived: Collection[int] = (),
) -> list[jax.Array]:
    """Returns the outputs of a jaxpr, each computed on the devices that store it; the values do not depend on the mesh.

    Args:
      jaxpr: computes all arrays.
      inputs: its inputs, such as a seed.
      shardings: the sharding of each output, all on one mesh.
      weights: arrays that are used as they are in place of outputs, by index.
      derived: the indices of outputs that are computed from `weights`, where they depend on them.
    """
    graph = from_jaxpr(jaxpr)
    scalars = graph.constants | _scalars(graph, inputs)
    loaded = {graph.body.outputs[index]: array for index, array in weights.items()}
    options = _options(shardings)
    programs = dict[Any, Future[Any]]()

    def make(value: int, known: dict[int, Any], sharding: jax.sharding.NamedSharding) -> Callable[[], jax.Array]:
        if value in known and value in loaded:
            # The step donates both: a copy of a parameter needs its own buffer.
            return partial(jax.jit(jnp.copy, out_shardings=sharding), known[value])
        if value in known:
            return partial(placed, known[value], sharding)
        ops = graph.slice([value], known)
        inputs = tuple(dict.fromkeys(operand for op in ops for operand in op.inputs if operand in known))
        if _is_filled(graph, ops, inputs, value):
            return partial(_filled, known[inputs[0]], graph.avals[value], sharding)
        args = [known[operand] for operand in inputs]
        key = _signature(graph, ops, inputs, value), sharding, tuple(getattr(arg, "sharding", None) for arg in args)
        if key not in programs:
            jitted = jax.jit(_program(graph, ops, inputs, value), out_shardings=sharding, compiler_options=options)
            programs[key] = pool.submit(lambda: jitted.lower(*args).compile())
        return lambda: programs[key].result()(*args)

    # Several processes may synchronize in compilation, and must then compile all programs in the same order.
    with ThreadPoolExecutor(1 if jax.process_count() > 1 else os.cpu_count()) as pool:
        makes = []
        for index, (value, sharding) in enumerate(zip(graph.body.outputs, shardings, strict=True)):
            known = scalars | loaded if index in derived else scalars
            makes.append(partial(weights.get, index) if index in weights else make(value, known, sharding))
        return [initialize() for initialize in makes]


def _options(shardings: Sequence[jax.sharding.NamedSharding]) -> dict[str, int] | None:
    """Returns compiler options: at LLVM's level 1, CPU programs compile in 0.4 of the time and run as fast."""
    level = "xla_backend_optimization_level"
    is_cpu = any(platform_of(sharding.mesh) == "cpu" for sharding in shardings[:1])
    return {level: 1} if is_cpu and level not in os.environ.get("XLA_FLAGS", "") else None


def _is_filled(graph: Graph, ops: Sequence[Op], inputs: Sequence[int], value: int) -> bool:
    """Returns whether an array is small and constant, so that copying it is faster than compiling a program."""
    aval = graph.avals[value]
    is_constant = len(inputs) == 1 and graph.shape(inputs[0]) == () and all(only_moves(op) for op in ops)
    if not is_constant or jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        return False
    return bool(aval.size * aval.dtype.itemsize <= FILLED_BYTES)


def _filled(number: Any, aval: Any, sharding: jax.sharding.NamedSharding) -> Any:
    return placed(np.full(aval.shape, number, aval.dtype), sharding)


def placed(value: Any, sharding: jax.sharding.NamedSharding) -> jax.Array:
    """Returns a sharded copy of a value that every process has, with its own buffers, because the step donates them."""
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        # `make_array_from_callback` does not support key arrays.
        spec = jax.sharding.PartitionSpec(*sharding.spec, *(None,) * (value.ndim + 1 - len(sharding.spec)))
        key_data = placed(jax.random.key_data(value), jax.sharding.NamedSharding(sharding.mesh, spec))
        return jax.random.wrap_key_data(key_data, impl=jax.random.key_impl(value))
    # `device_put(may_alias=False)` of an array still aliases its buffer on one of several devices (jax 0.10 to 0.12).
    array = jnp.copy(value) if getattr(value, "weak_type", False) else np.array(value)  # NumPy has no weak types
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding, may_alias=False)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _scalars(graph: Graph, inputs: Sequence[Any]) -> dict[int, Any]:
    """Returns the inputs and all scalars computed from them, such as keys and counts."""
    values: Values = dict(zip(graph.body.inputs, inputs, strict=True))
    ops = list[Op]()
    known = values.keys() | graph.constants.keys()
    for op in graph.body.ops:
        is_small = all(graph.shape(value) == () for value in (*op.inputs, *op.outputs))
        if is_small and not op.bodies and known.issuperset(op.inputs):
            ops.append(op)
            known.update(op.outputs)
    with jax.default_device(jax.local_devices()[0]):
        run(graph, ops, values)
    return values


def _program(graph: Graph, ops: Sequence[Op], inputs: Sequence[int], output: int) -> Callable[..., Any]:
    def make(*args: Any) -> Any:
        values = dict(zip(inputs, args, strict=True))
        run(graph, ops, values)
        return values[output]

    return make


def _signature(graph: Graph, ops: Sequence[Op], inputs: Sequence[int], output: int) -> Any:
    """Returns a key that is equal for arrays that one compiled program can compute: operations, wiring, and types."""
    number = {value: index for index, value in enumerate(inputs)}

    equations = []
    for op in ops:
        operands = tuple(number[value] for value in op.inputs)
        for value in op.outputs:
            number[value] = len(number)
        params = tuple(sorted((key, str(value)) for key, value in op.params.items()))
        equations.append((op.name, operands, params, tuple(str(graph.avals[value]) for value in op.outputs)))
    return tuple(equations), tuple(str(graph.avals[value]) for value in inputs), number[output]
