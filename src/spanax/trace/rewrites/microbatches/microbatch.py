"""Evaluates a loss on a subset of the examples, with the constants and the noise of the full batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from spanax.trace.jaxpr.graph import bind, opened, remat_of
from spanax.trace.jaxpr.lines import Line, Lines
from spanax.trace.rewrites.chunked_loss.chunked import as_traced
from spanax.trace.rewrites.microbatches.flow import bodies_of, counts, draws, has_bodies, is_changed
from spanax.trace.rewrites.microbatches.noise import drawn

Values = dict[int, Any]


@dataclass(frozen=True)
class Place:
    """Which microbatch is evaluated: the `index`-th of `count`, of a batch of `batch_size` examples.

    `is_tiled` has the same meaning as in `Equation`.
    """

    index: Any
    count: int
    batch_size: int
    is_tiled: bool


def evaluate(full: Lines, small: Lines, values: Values, needed: Sequence[int], place: Place) -> None:
    """Evaluates equations of a loss for one microbatch and adds their results to `values`.

    Shapes are those of the microbatch, constants and noise those of the batch.

    Args:
      full, small: the equations for the batch and for a microbatch.
      values: inputs, and values that are computed for the full batch.
      needed: the positions of the equations to evaluate, in order.
      place: which microbatch it is.
    """
    for value, const in full.known.items():
        if full.shape(value) == small.shape(value):
            values.setdefault(value, const)
    for position in needed:
        line, small_line = full.lines[position], small.lines[position]
        ins = [values[value] for value in line.ins]
        with as_traced(small_line):
            values.update(zip(line.outs, _apply(full, small, line, small_line, ins, place), strict=True))


def _apply(full: Lines, small: Lines, line: Line, small_line: Line, ins: list[Any], place: Place) -> list[Any]:
    if draws(full, small, line):
        return drawn(line, ins, [_place_of(full, small, value, place) for value in line.outs], place.index, place.count)
    if not has_bodies(line) or not any(map(is_changed, bodies_of(line), bodies_of(small_line))):
        return bind(small_line.eqn, ins, dict(small_line.eqn.params))

    pairs = zip(bodies_of(line), bodies_of(small_line), strict=True)
    return _rebuilt(full, line, small_line, [_function(*pair, place) for pair in pairs], ins)


def _rebuilt(
    full: Lines, line: Line, small_line: Line, functions: list[Callable[..., Any]], ins: list[Any]
) -> list[Any]:
    """Evaluates an equation with each of its bodies replaced by a function."""
    params = small_line.eqn.params
    if (remat := remat_of(small_line.eqn)) is not None:
        return list(jax.checkpoint(functions[0], policy=remat["policy"], prevent_cse=remat["prevent_cse"])(*ins))
    if line.name == "cond":
        return list(jax.lax.switch(ins[0], functions, *ins[1:]))
    if line.name == "while":
        num_test, num_consts = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        test, body = functions
        stops = lambda carry: test(*ins[:num_test], *carry)[0]  # noqa: E731
        return list(jax.lax.while_loop(stops, lambda carry: body(*ins[num_test:num_consts], *carry), ins[num_consts:]))
    num_consts, num_carried = counts(full, line)

    def scan_body(carry: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
        outs = functions[0](*ins[:num_consts], *carry, *row)
        return outs[:num_carried], outs[num_carried:]

    carry, rows = ins[num_consts : num_consts + num_carried], ins[num_consts + num_carried :]
    loop = {key: params[key] for key in ("length", "reverse", "unroll")}
    carry, stacked = jax.lax.scan(scan_body, carry, rows, **loop)
    return [*carry, *stacked]


def _function(full: Any, small: Any, place: Place) -> Callable[..., list[Any]]:
    """Returns a body as a function of the values of a microbatch."""
    bodies = Lines.of(*opened(full)), Lines.of(*opened(small))

    def run(*args: Any) -> list[Any]:
        values = dict(zip(bodies[0].inputs, args, strict=True))
        evaluate(*bodies, values, range(len(bodies[0].lines)), place)
        avals = [bodies[1].avals[value] for value in bodies[1].outputs]
        outs = [values[value] for value in bodies[0].outputs]
        return [
            jnp.asarray(out, aval.dtype) if jnp.ndim(out) == 0 and not hasattr(out, "dtype") else out
            for out, aval in zip(outs, avals, strict=True)
        ]

    return run


def _place_of(full: Lines, small: Lines, value: int, place: Place) -> tuple[int, int] | None:
    pairs = enumerate(zip(full.shape(value), small.shape(value), strict=True))
    dim = next(((dim, size) for dim, (size, small_size) in pairs if size != small_size), None)
    return None if dim is None else (dim[0], 1 if place.is_tiled else dim[1] // place.batch_size)
