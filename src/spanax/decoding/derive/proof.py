"""Compares an incremental form with the full forward pass, and finds the line where a model is not causal."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spanax.decoding.derive.forward import Forward
from spanax.decoding.derive.sequences import Incremental, full
from spanax.errors import CausalityError, DecodeError, first_line
from spanax.processes.processes import on_every_host
from spanax.trace.jaxpr.graph import Body, Op
from spanax.trace.jaxpr.interpret import Values, evaluate, read
from spanax.trace.jaxpr.loops import loop_of

TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""The largest difference of logits, relative to the largest logit, by the narrowest dtype of the model: rounding."""

FALLBACK = "fallback=True, which computes the whole sequence for each token"

NUM_STEPS = 2
"""The number of steps after each prefill that are compared."""


def reference(forward: Forward, parameters: Sequence[Any]) -> np.ndarray:
    """Returns the logits of random sequences by the forward pass; later tokens must not change earlier ones.

    Raises:
      CausalityError: the model is not causal; the error names the line.
      DecodeError: the forward pass returns NaN.
    """
    inputs, garbage = _sequences(forward)
    expected = _finite(jax.jit(partial(full, forward))(parameters, inputs))
    if np.isnan(expected).any():
        raise DecodeError("the forward pass returns NaN for random tokens.", fix="parameters that are finite")
    count, others, leaked = _changed(forward, parameters, inputs, garbage)
    if not leaked <= tolerance(forward) * _largest(expected):
        raise CausalityError(
            "this model is not causal: the logits of a position depend on later tokens.",
            where=_leak(forward, parameters, [array[:1] for array in inputs], others, count) or "",
            fix="a causal mask in this line",
        )
    return expected


def prove(derived: Incremental, parameters: Sequence[Any], expected: np.ndarray) -> None:
    """Checks that an incremental form has the logits of the forward pass, with other tokens after those that count.

    Regions that compute each token alone must do so among others, which are copies of it: these take all slots first.

    Raises:
      DecodeError: it has others.
    """
    forward = derived.forward
    limit = tolerance(forward) * _largest(expected)
    try:
        error = _largest_error(derived, parameters, expected)
        if error <= limit and derived.computes_alone():
            error = _largest_error(replace(derived, among_copies=True), parameters, expected)
    except Exception as failure:  # an operation that has no rows after all, in any of JAX's or our rules
        what = "no incremental form of this model was found."
        raise DecodeError(what, where=first_line(failure), fix=FALLBACK) from failure
    if not error <= limit:
        share = error / _largest(expected)
        raise DecodeError(
            f"the incremental form of this model differs from its forward pass, by {share:.1e} of the largest logit.",
            fix=FALLBACK,
        )


def _sequences(forward: Forward) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns random sequences of each input, and others."""
    first, second = ([_random(forward, index, seed) for index in range(len(forward.arrays))] for seed in range(2))
    return first, second


def _largest(logits: np.ndarray) -> float:
    return max(float(np.abs(logits).max()), 1e-30)


def _changed(
    forward: Forward, parameters: Sequence[Any], inputs: Sequence[Any], garbage: Sequence[Any]
) -> tuple[int, list[Any], float]:
    """Returns after how many tokens others change the logits before them most, in which sequence, and how much."""
    length = forward.length
    halves = [length >> power for power in range(1, length.bit_length())]
    counts = np.array(
        sorted({*halves, length - 1, 3 * length // 4, *(half + 1 for half in halves[:2])} - {0}), np.int32
    )
    rows = []
    for given, other, is_per_token in zip(inputs, garbage, forward.per_token, strict=True):
        row = np.repeat(given[:1], len(counts), 0)
        for index, count in enumerate(counts if is_per_token else ()):
            # Random tokens, or the padding of a prefill: some gates compare a token with statistics of all.
            row[index, count:] = other[0, count:] if index % 2 else 0
        rows.append(row)

    def compared(parameters: Sequence[Any], rows: Sequence[Any], counts: Any) -> Any:
        expected = full(forward, parameters, [array[:1] for array in inputs])[0]

        def one(each: Any) -> Any:
            row, count = each
            logits = full(forward, parameters, [array[None] for array in row])[0]
            difference = jnp.where(jnp.isinf(expected), 0.0, jnp.abs(logits - expected))
            return jnp.where(jnp.arange(length)[:, None] < count, difference, 0.0).max()

        return lax.map(one, (list(rows), counts))

    differences = on_every_host(jax.jit(compared)(parameters, rows, counts)).astype(np.float64)
    worst = int(np.nan_to_num(differences, nan=np.inf).argmax())
    return int(counts[worst]), [row[worst : worst + 1] for row in rows], float(differences[worst])


def _finite(logits: Any) -> np.ndarray:
    """Returns logits in float64, with 0 for those of tokens that are excluded by infinity."""
    array = on_every_host(logits).astype(np.float64)
    return np.where(np.isinf(array), 0.0, array)


def depends_on_others(forward: Forward, alone: np.ndarray, batch: Forward, parameters: Sequence[Any]) -> bool:
    """Whether a shorter batch of two sequences has other logits, as where experts have fewer slots, or share them.

    Args:
      forward: the forward pass of one sequence.
      alone: the logits of the random sequences, as `reference` returns them.
      batch: the forward pass of two shorter sequences.
      parameters: the arrays of the model.
    """
    pairs = ((_random(forward, index), is_row) for index, is_row in enumerate(forward.per_token))
    first = [array[:2, : batch.length] if is_row else array[:2] for array, is_row in pairs]
    together = _finite(jax.jit(lambda *args: evaluate(batch.graph, args)[-1])(*parameters, *first))
    alone = alone[:2, : batch.length]
    return float(np.abs(together - alone).max()) > tolerance(forward) * float(np.abs(alone).max())


def _largest_error(derived: Incremental, parameters: Sequence[Any], expected: np.ndarray) -> float:
    """Returns the largest difference of logits, also at the last positions."""
    forward = derived.forward
    inputs, garbage = _sequences(forward)
    length = forward.length
    is_known = np.arange(length)
    last = length - NUM_STEPS
    fill = jax.jit(derived.fill)
    step = jax.jit(derived.step)
    largest = 0.0
    for counts in ([0, length // 2 - 1, last], [last, 1, length // 2]):
        positions = np.clip(np.array(counts, np.int32), 0, max(last, 0))
        known = is_known < positions[:, None]
        arrays = [
            np.where(known.reshape(known.shape + (1,) * (given.ndim - 2)), given, other) if is_per_token else given
            for given, other, is_per_token in zip(inputs, garbage, forward.per_token, strict=True)
        ]
        cache = fill(parameters, arrays, positions)
        for _ in range(min(NUM_STEPS, length)):
            chosen = np.arange(len(positions)), positions
            rows = [array[chosen] for array, is_row in zip(inputs, forward.per_token, strict=True) if is_row]
            logits, cache = step(parameters, cache, rows, positions)
            difference = np.abs(_finite(logits) - expected[chosen]).max()
            largest = max(largest, float(difference)) if np.isfinite(difference) else np.inf
            positions = np.minimum(positions + 1, length - 1)
    return largest


def _random(forward: Forward, index: int, seed: int = 0) -> np.ndarray:
    """Returns three sequences of an input: token ids, ones, or normal floats; positions and segments are ones.

    The last one repeats a token, which takes all slots of its experts. The first seed, whose logits are compared, has
    no token 0: padding may attend to all tokens.
    """
    aval = forward.graph.avals[forward.arrays[index]]
    generator = np.random.default_rng((seed, index))
    shape = (3, *aval.shape[1:])
    if index == 0:
        first = min(1 - seed, forward.vocabulary - 1)
        tokens = generator.integers(first, forward.vocabulary, shape)
        tokens[-1] = tokens[-1, 0]
        return tokens.astype(aval.dtype)
    if jnp.issubdtype(aval.dtype, jnp.floating):
        return generator.normal(size=shape).astype(aval.dtype)
    return np.ones(shape, aval.dtype)


def tolerance(forward: Forward) -> float:
    """Returns the largest difference of its numbers, relative to the largest one, that is rounding."""
    dtypes = {str(getattr(aval, "dtype", "")) for aval in forward.graph.avals}
    return max(TOLERANCE[dtype] for dtype in dtypes if dtype in TOLERANCE)


def _leak(
    forward: Forward, parameters: Sequence[Any], first: Sequence[Any], second: Sequence[Any], count: int
) -> str | None:
    """Returns the line of the first operation whose first rows depend on later tokens; None if it is not found."""
    args = [[*parameters, *map(jnp.asarray, arrays)] for arrays in (first, second)]
    return _first_leak(forward, forward.graph.body, count, *args)


def _first_leak(forward: Forward, body: Body, count: int, first: Sequence[Any], second: Sequence[Any]) -> str | None:
    """Returns the line of the first leak of a body, evaluated on inputs whose first `count` rows are equal."""
    both: tuple[Values, Values] = ({}, {})
    for values, args in zip(both, (first, second), strict=True):
        values.update(zip(body.inputs, args, strict=True))
    for op in body.ops:
        ins = [read(forward.graph, values, op.inputs) for values in both]
        for values, operands in zip(both, ins, strict=True):
            values.update(zip(op.outputs, op.bind(operands), strict=True))
        if any(_differs(forward, value, count, *(values[value] for values in both)) for value in op.outputs):
            return _inside(forward, op, count, *ins) or op.where
    return None


def _inside(forward: Forward, op: Op, count: int, first: Sequence[Any], second: Sequence[Any]) -> str | None:
    """Returns the line of the first leak in the first iteration of a loop, or in the body of a call."""
    if len(op.bodies) != 1:
        return None
    (body,) = op.bodies
    if op.name != "scan":
        return _first_leak(forward, body, count, first, second)
    loop = loop_of(forward.graph, op)
    roles = map(loop.by_role, (first, second))
    args = [[*consts, *carry, *(array[0] for array in scanned)] for consts, carry, scanned in roles]
    return _first_leak(forward, body, count, *args)


def _differs(forward: Forward, value: int, count: int, first: Any, second: Any) -> bool:
    """Whether the first rows of a value along its positions differ."""
    dims = forward.positions(value)
    if len(dims) != 1 or not jnp.issubdtype(first.dtype, jnp.number):
        return False
    rows = (on_every_host(lax.slice_in_dim(each, 0, count, axis=dims[0])) for each in (first, second))
    before, after = (each.astype(np.float64) for each in rows)
    smallest = 1e-5 * float(np.abs(before).max(initial=0))
    return not np.allclose(before, after, rtol=1e-3, atol=smallest, equal_nan=True)
