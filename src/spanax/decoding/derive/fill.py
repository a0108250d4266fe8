"""Fills the caches of an incremental form from all positions of a sequence."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from spanax.decoding.derive.bands import ring_positions
from spanax.decoding.derive.forward import Forward
from spanax.decoding.derive.incremental import How, Part, Steps
from spanax.trace.jaxpr.dim_maps.registry import neutral_element
from spanax.trace.jaxpr.dim_maps.relations import Equation
from spanax.trace.jaxpr.graph import Op
from spanax.trace.jaxpr.interpret import Values, evaluate, read
from spanax.trace.jaxpr.loops import loop_of

Cache = dict[int, Any]
"""What is cached of a sequence, by value, or by its inverse for the rows of a block; in loops, stacked along layers."""


def filled(forward: Forward, steps: Steps, args: Sequence[Any], count: Any) -> tuple[list[Any], Cache]:
    """Returns the outputs of a body for all positions, and what a step reads of the first `count` ones.

    Args:
      forward: the forward pass.
      steps: the steps of the body.
      args: the inputs of the body, for all positions.
      count: the number of positions whose carry a scan over positions leaves in the cache.
    """
    graph = forward.graph
    values: Values = dict(zip(steps.body.inputs, args, strict=True))
    parts = {part.op: part for part in steps.of(How.LOOP, How.STATE, How.CALL)}
    regions = [part.region for part in steps.parts if part.region is not None]
    sizes = {op: region.size for region in regions for op in region.scans.values()}
    cache: Cache = {}
    for op in steps.body.ops:
        ins = read(graph, values, op.inputs)
        part = parts.get(op)
        if op in sizes:
            outs, inner = _over_positions(forward, op, ins, count // sizes[op])
            cache |= inner
        elif part is None:
            outs = op.bind(ins)
        else:
            outs, inner = _filled_part(forward, part, ins, count)
            cache |= inner
        values.update(zip(op.outputs, outs, strict=True))
    for part in steps.of(How.TOTAL):
        cache[part.op.outputs[0]] = _total(part, values[part.op.outputs[0]], count)
    for region in regions:
        for want in region.cached:
            first = count // region.size * region.size
            (array,) = read(graph, values, [want.value])
            cache[~want.value] = lax.dynamic_slice_in_dim(array, first, region.size, want.rows[0])
    for part in steps.of(How.CACHE, How.KEEP):
        want = part.results[0]
        (array,) = read(graph, values, [want.value])
        if want.is_ring:
            (row,) = part.operands[0].rows
            array = jnp.take(array, ring_positions(part.size, count - 1, forward.length), axis=row)
        cache[want.value] = jnp.transpose(array, part.order) if part.order else array
    return read(graph, values, steps.body.outputs), cache


def _total(part: Part, results: Any, count: Any) -> Any:
    """Returns the result of a cumulative operation after `count` rows."""
    (axis,) = part.results[0].rows
    last = lax.dynamic_slice_in_dim(results, jnp.maximum(count - 1, 0), 1, axis)
    return jnp.where(count > 0, last, neutral_element(Equation(part.op.eqn)))


def _filled_part(forward: Forward, part: Part, ins: Sequence[Any], count: Any) -> tuple[list[Any], Cache]:
    if part.how is How.STATE:
        return _over_positions(forward, part.op, ins, count)
    if part.how is How.CALL:
        return filled(forward, part.inside, ins, count)
    return _over_layers(forward, part, ins, count)


def _over_layers(forward: Forward, part: Part, ins: Sequence[Any], count: Any) -> tuple[list[Any], Cache]:
    loop = loop_of(forward.graph, part.op)
    consts, start, scanned = loop.by_role(ins)

    def layer(carry: list[Any], rows: list[Any]) -> Any:
        outs, cache = filled(forward, part.inside, [*consts, *carry, *rows], count)
        return outs[: loop.num_carried], (outs[loop.num_carried :], cache)

    params = {key: part.op.params[key] for key in ("length", "reverse", "unroll")}
    carry, (stacked, cache) = lax.scan(layer, start, scanned, **params)
    return [*carry, *stacked], cache


def _over_positions(forward: Forward, op: Op, ins: Sequence[Any], count: Any) -> tuple[list[Any], Cache]:
    """Runs a scan over positions or blocks; what is cached is the carry after `count` of them."""
    loop = loop_of(forward.graph, op)
    consts, start, scanned = loop.by_role(ins)
    body = forward.graph.within(loop.body)

    def position(carry: Any, inputs: Any) -> Any:
        latest, kept = carry
        index, rows = inputs
        outs = evaluate(body, [*consts, *latest, *rows])
        latest = outs[: loop.num_carried]
        kept = [jnp.where(index < count, new, old) for new, old in zip(latest, kept, strict=True)]
        return (latest, kept), outs[loop.num_carried :]

    indices = jnp.arange(op.params["length"], dtype=jnp.int32)
    (latest, kept), stacked = lax.scan(position, (start, start), (indices, scanned))
    return [*latest, *stacked], dict(zip(loop.body_carried, kept, strict=True))
