"""State born sharded: every array is made on the devices that keep it, one array at a time.

One program for the whole state would hold it twice over while compiling and take a minute for a deep unrolled
model. So keys, counts and other single numbers are computed first, and each array is then one small program of
its own, compiled once for all arrays that are made alike (the same kernel of forty-eight blocks). They are compiled
side by side, and run one after the other.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spanax.plan.plan import Placement
from spanax.run.step.platform import platform_of
from spanax.trace.analysis.sharding_keys import only_moves
from spanax.trace.jaxpr.graph import Graph, Op, from_jaxpr
from spanax.trace.jaxpr.interpret import Values, run
from spanax.trace.program import Program

FILLED_BYTES = 4 << 20
"""An array that size is copied to a device in a millisecond or two; to read its program takes ten, to make it more."""


def init_sharded_state(
    program: Program,
    placements: Sequence[Placement],
    mesh: jax.sharding.Mesh,
    seed: int,
    given: Mapping[int, jax.Array] | None = None,
) -> list[jax.Array]:
    """The program's state at step 0, each leaf on the devices and in the shards of its placement.

    The numbers depend on the seed alone, not on the mesh; and on those leaves that are `given` by their number, as the
    optimizer does where it begins with copies of parameters.
    """
    given = given or {}
    graph = from_jaxpr(program.init.jaxpr)
    made = graph.constants | _single_numbers(graph, program.init.inputs(seed))
    brought = {graph.body.outputs[number]: array for number, array in given.items()}
    options, programs = _options(mesh), dict[Any, Future[Any]]()

    def make(value: int, known: dict[int, Any], sharding: jax.sharding.NamedSharding) -> Callable[[], jax.Array]:
        if value in known and value in brought:
            # The step takes both away: a copy of a parameter has to have its own memory.
            return partial(jax.jit(jnp.copy, out_shardings=sharding), known[value])
        if value in known:
            return partial(placed, known[value], sharding)
        ops = graph.slice([value], known)
        inputs = tuple(dict.fromkeys(operand for op in ops for operand in op.inputs if operand in known))
        if _is_filled(graph, ops, inputs, value):
            return partial(_filled, known[inputs[0]], graph.avals[value], sharding)
        ins = [known[one] for one in inputs]
        key = _signature(graph, ops, inputs, value), sharding, tuple(getattr(one, "sharding", None) for one in ins)
        if key not in programs:
            jitted = jax.jit(_program(graph, ops, inputs, value), out_shardings=sharding, compiler_options=options)
            programs[key] = pool.submit(lambda: jitted.lower(*ins).compile())
        return lambda: programs[key].result()(*ins)

    # Compilers of several processes may wait for each other, and then want all programs in the same order.
    with ThreadPoolExecutor(1 if jax.process_count() > 1 else os.cpu_count()) as pool:
        makes = []
        for number, (value, placement) in enumerate(zip(graph.body.outputs, placements, strict=True)):
            known = made | brought if placement.kind == "optimizer" else made
            is_given = number in given
            makes.append(partial(given.get, number) if is_given else make(value, known, placement.sharding(mesh)))
        return [one() for one in makes]


def _options(mesh: jax.sharding.Mesh) -> dict[str, int] | None:
    """On a CPU these programs, which run once, compile in 0.4 of the time at LLVM's first level, and run as fast."""
    level = "xla_backend_optimization_level"
    return {level: 1} if platform_of(mesh) == "cpu" and level not in os.environ.get("XLA_FLAGS", "") else None


def _is_filled(graph: Graph, ops: Sequence[Op], inputs: Sequence[int], value: int) -> bool:
    """Whether an array is small and one number all over: to copy it is faster than to have a program for it."""
    aval = graph.avals[value]
    is_one = len(inputs) == 1 and graph.shape(inputs[0]) == () and all(only_moves(op) for op in ops)
    if not is_one or jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        return False
    return bool(aval.size * aval.dtype.itemsize <= FILLED_BYTES)


def _filled(number: Any, aval: Any, sharding: jax.sharding.NamedSharding) -> Any:
    return placed(np.full(aval.shape, number, aval.dtype), sharding)


def placed(value: Any, sharding: jax.sharding.NamedSharding) -> jax.Array:
    """A copy of a value that every process has, sharded; it shares no buffer, because the step donates it."""
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        # Keys cannot be made from a callback: their numbers can.
        spec = jax.sharding.PartitionSpec(*sharding.spec, *(None,) * (value.ndim + 1 - len(sharding.spec)))
        numbers = placed(jax.random.key_data(value), jax.sharding.NamedSharding(sharding.mesh, spec))
        return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(value))
    # `device_put(may_alias=False)` of an array still reuses its buffer on one of several devices (jax 0.10 to 0.12).
    here = np.array(value)
    if sharding.is_fully_addressable:
        return jax.device_put(here, sharding, may_alias=False)
    return jax.make_array_from_callback(here.shape, sharding, lambda index: here[index])


def _single_numbers(graph: Graph, inputs: Sequence[Any]) -> dict[int, Any]:
    """The inputs, and every value of one element that follows from them, computed at once: keys, counts, scalars."""
    values: Values = dict(zip(graph.body.inputs, inputs, strict=True))
    ops, known = list[Op](), values.keys() | graph.constants.keys()
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


def _signature(graph: Graph, ops: Sequence[Op], inputs: Sequence[int], wanted: int) -> Any:
    """What two arrays must share to be made by one compiled program: the operations, wired alike."""
    place = {value: index for index, value in enumerate(inputs)}

    wired = []
    for op in ops:
        ins = tuple(place[value] for value in op.inputs)
        for value in op.outputs:
            place[value] = len(place)
        params = tuple(sorted((key, str(value)) for key, value in op.params.items()))
        wired.append((op.name, ins, params, tuple(str(graph.avals[value]) for value in op.outputs)))
    return tuple(wired), tuple(str(graph.avals[value]) for value in inputs), place[wanted]
