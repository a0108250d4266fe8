"""Replay: the traced program run again, with the resolver's constraints on its values.

What was planned is what runs: constraints recurse into loops and remat, and nothing else of the program changes.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
from jax.extend import source_info_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spanax.plan.resolve import Constraint
from spanax.plan.uses import Use
from spanax.trace.graph import BODIES, Body, Graph, Op, retraced
from spanax.trace.primitives import ELEMENTWISE

# A user's own constraints name a mesh that is not this one, and are met by the plan instead.
DROPPED = frozenset({"sharding_constraint"})

GROUPS = ("feature_group_count", "batch_group_count")
"""Of a convolution, what a device has a part of."""


def replay(
    graph: Graph, constraints: Sequence[Constraint | None], uses: Mapping[Op, Use], mesh: Mesh
) -> Callable[..., list[Any]]:
    """A function of the graph's inputs that computes its outputs under the constraints.

    Args:
      graph: the traced program.
      constraints: one a value, by number; None leaves a value to the compiler.
      uses: the operations that take operands otherwise than they lie.
      mesh: the devices.
    """
    shardings: dict[Constraint, NamedSharding] = {}

    def constrain(array: Any, constraint: Constraint | None) -> Any:
        # What lies on the host was put there from a device, split as it was there.
        if constraint is None or mesh.size == 1 or jax.typeof(array).memory_space == jax.memory.Space.Host:
            return array
        if constraint not in shardings:
            shardings[constraint] = NamedSharding(mesh, _partition_spec(constraint))
        return jax.lax.with_sharding_constraint(array, shardings[constraint])

    def run(body: Body, args: Sequence[Any]) -> list[Any]:
        readers = {value: op for op in reversed(body.ops) for value in op.inputs}
        values: dict[int, Any] = {}
        for value, arg in zip(body.inputs, args, strict=True):
            with as_traced(readers[value]) if value in readers else nullcontext():
                values[value] = constrain(arg, constraints[value])

        def read(value: int) -> Any:
            return values[value] if value in values else graph.constants[value]

        for op in body.ops:
            with as_traced(op):
                outs = compute(op, [read(value) for value in op.inputs])
            values.update(zip(op.outputs, outs, strict=True))
        return [read(value) for value in body.outputs]

    def compute(op: Op, ins: Sequence[Any]) -> list[Any]:
        use = uses.get(op)
        if use is not None:
            ins = [constrain(array, wanted) for array, wanted in zip(ins, use.inputs, strict=True)]
        if op.name in DROPPED:
            outs = list(ins[:1])
        elif use is not None and use.is_local and mesh.size > 1:
            outs = _shard_by_shard(op, use, mesh, ins)
        else:
            outs = _bind(op, ins, inner)
        if use is not None:
            outs = [constrain(array, wanted) for array, wanted in zip(outs, use.outputs, strict=True)]
        # Elementwise, with an operand of the result's shape and split: the compiler carries that over. Not over another
        # dtype: it would move the wider.
        is_plain = op.name in ELEMENTWISE - {"convert_element_type"} and use is None
        carried = {(graph.shape(value), constraints[value]) for value in op.inputs} if is_plain else set()
        found = []
        for value, out in zip(op.outputs, outs, strict=True):
            wanted = constraints[value]
            known = wanted is not None and any(wanted.spec) and (graph.shape(value), wanted) in carried
            found.append(out if known else constrain(out, wanted))
        return found

    def inner(body: Body) -> Callable[..., list[Any]]:
        return lambda *args: run(body, args)

    return lambda *args: run(graph.body, args)


def as_traced(op: Op) -> AbstractContextManager[None]:
    """What is traced inside has the source line and the name stack that the operation was traced with."""
    told = op.eqn.source_info
    name_stack = source_info_util.current_name_stack() + told.name_stack
    return source_info_util.user_context(told.traceback, name_stack=name_stack)


def _bind(op: Op, ins: Sequence[Any], inner: Callable[[Body], Callable[..., list[Any]]]) -> list[Any]:
    params = dict(op.params)
    bodies = iter(op.bodies)
    for key in BODIES.get(op.name, ()):
        held = params[key]
        if isinstance(held, tuple):
            params[key] = tuple(retraced(old, inner(next(bodies))) for old in held)
        else:
            params[key] = retraced(held, inner(next(bodies)))
    return op.bind(ins, params)


def _shard_by_shard(op: Op, use: Use, mesh: Mesh, ins: Sequence[Any]) -> list[Any]:
    """The operation on each device's part, without a word from the compiler."""
    specs = [
        tuple(PartitionSpec() if wanted is None else _partition_spec(wanted) for wanted in group)
        for group in (use.inputs, use.outputs)
    ]
    divided = [name for name in GROUPS if op.params.get(name, 1) > 1]

    def part(*parts: Any) -> tuple[Any, ...]:
        outs = tuple(op.bind(parts, op.params | {name: op.params[name] // use.parts for name in divided}))
        return jax.lax.psum(outs, use.summed) if use.summed else outs

    return list(jax.shard_map(part, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)(*ins))


def _partition_spec(constraint: Constraint) -> PartitionSpec:
    whole = PartitionSpec.UNCONSTRAINED if constraint.is_open else None
    return PartitionSpec(*(whole if not axes else axes[0] if len(axes) == 1 else axes for axes in constraint.spec))
