"""The forward pass of one sequence as functions of several: prefill and step, from caches or by recomputation."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from spanax.decoding.derive.advance import Advance, cut
from spanax.decoding.derive.fill import Cache, filled
from spanax.decoding.derive.forward import Forward
from spanax.decoding.derive.incremental import How, Steps, Want, all_steps
from spanax.trace.jaxpr.dim_maps.relations import Family
from spanax.trace.jaxpr.graph import RAGGED, Op
from spanax.trace.jaxpr.interpret import evaluate


@dataclass(frozen=True, eq=False)
class Incremental:
    """The incremental form of a forward pass, for several sequences; of `among_copies`, see `Advance`."""

    forward: Forward
    steps: Steps
    among_copies: bool = False

    def fill(self, parameters: Sequence[Any], arrays: Sequence[Any], counts: Any) -> Cache:
        """Returns the caches of sequences after their first `counts` positions."""

        def one(arrays: Sequence[Any], count: Any) -> Cache:
            args = [*parameters, *(array[None] for array in arrays)]
            return filled(self.forward, self.steps, args, count)[1]

        return _over_rows(self.forward, one)(list(arrays), counts)

    def step(self, parameters: Sequence[Any], cache: Cache, rows: Sequence[Any], positions: Any) -> tuple[Any, Cache]:
        """Returns the logits [sequences, vocabulary] at a position of each sequence, and the caches after it."""
        forward = self.forward
        per_token = forward.token_arrays
        logits = Want(forward.logits, (1,))

        def one(cache: Cache, rows: Sequence[Any], position: Any) -> Any:
            given = dict(zip(forward.parameters, parameters, strict=True))
            given |= {value: row[None, None] for value, row in zip(per_token, rows, strict=True)}
            inputs = {
                want: given[want.value] if want.value in per_token else cut(given[want.value], want.rows, position)
                for want in self.steps.inputs
            }
            arrays, cache = Advance(forward, position, self.among_copies).run(self.steps, inputs, cache)
            return arrays[logits][0, 0], cache

        return _over_rows(self.forward, one)(cache, list(rows), positions)

    def computes_alone(self) -> bool:
        """Whether some operations are computed as for one token alone."""
        regions = (part.region for steps in all_steps(self.steps) for part in steps.parts)
        return any(region is not None and region.size == 1 for region in regions)

    def recomputed(self) -> list[str]:
        """Returns the lines of the model whose operations a step computes for all positions."""
        return [*dict.fromkeys(filter(None, (op.where for op in _recomputed(self.forward, self.steps))))]


@dataclass(frozen=True, eq=False)
class Recomputation:
    """The same for a forward pass without an incremental form: the cache is the tokens, and a step computes all."""

    forward: Forward

    def fill(self, parameters: Sequence[Any], arrays: Sequence[Any], counts: Any) -> Cache:
        """Returns the arrays of sequences."""
        return dict(zip(self.forward.arrays, arrays, strict=True))

    def step(self, parameters: Sequence[Any], cache: Cache, rows: Sequence[Any], positions: Any) -> tuple[Any, Cache]:
        """Returns the logits [sequences, vocabulary] at a position of each sequence, and the arrays with it."""
        cache = dict(cache)
        sequences = jnp.arange(positions.shape[0])
        for value, row in zip(self.forward.token_arrays, rows, strict=True):
            cache[value] = cache[value].at[sequences, positions].set(row.astype(cache[value].dtype))
        logits = full(self.forward, parameters, [cache[value] for value in self.forward.arrays])
        return logits[sequences, positions], cache


def prefilled(
    derived: Incremental | Recomputation, parameters: Sequence[Any], arrays: Sequence[Any], lengths: Any
) -> tuple[Any, Cache]:
    """Returns the logits [sequences, vocabulary] after the last of the tokens that count, and the caches.

    Args:
      derived: the form of the forward pass.
      parameters: the arrays of the model.
      arrays: the inputs of the sequences, with all positions of the form.
      lengths: the number of tokens of each sequence that count.
    """
    last = lengths - 1
    cache = derived.fill(parameters, arrays, last)
    sequences = jnp.arange(lengths.shape[0])
    pairs = zip(arrays, derived.forward.per_token, strict=True)
    rows = [array[sequences, last] for array, is_per_token in pairs if is_per_token]
    return derived.step(parameters, cache, rows, last)


ONE_BY_ONE = {RAGGED, "pure_callback", "io_callback"}
"""Operations that JAX cannot batch: matmuls of ragged groups, and callbacks that do not say how."""


def full(forward: Forward, parameters: Sequence[Any], arrays: Sequence[Any]) -> Any:
    """Returns the logits [sequences, length, vocabulary] of the forward pass of several sequences."""

    def one(*row: Any) -> Any:
        return evaluate(forward.graph, [*parameters, *(array[None] for array in row)])[-1][0]

    return _over_rows(forward, one)(*arrays)


def _over_rows(forward: Forward, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of one sequence as a function of several."""
    if any(op.name in ONE_BY_ONE for op in forward.graph.ops()):
        return lambda *args: jax.lax.map(lambda row: function(*row), args)
    return jax.vmap(function)


def _recomputed(forward: Forward, steps: Steps) -> Iterator[Op]:
    views = Family.VIEW, Family.RESIZE
    for each in all_steps(steps):
        for part in each.of(How.COMPUTE):
            is_work = part.op.family not in views and part.op.name != "convert_element_type"
            if is_work and not part.results[0].rows and any(map(forward.follows_tokens, part.op.outputs)):
                yield part.op
