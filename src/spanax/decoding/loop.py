"""The loop that generates tokens: on the devices, or step by step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spanax.decoding.decoder import Decoder, Form
from spanax.decoding.rows import Rows
from spanax.decoding.sampling import Sampling, draw
from spanax.processes.processes import on_every_host


@dataclass(frozen=True)
class Job:
    """What a compiled loop depends on.

    Attributes:
      form: the sizes of the sequences.
      rows: their placement.
      stops: the token ids that end one.
      max_new_tokens: the most new tokens of one.
    """

    form: Form
    rows: Rows
    stops: tuple[tuple[int, ...], ...]
    max_new_tokens: int


class State(NamedTuple):
    """The state of the loop after a token.

    Attributes:
      index: the number of tokens so far.
      cache: the caches of the sequences.
      positions: the number of tokens of each sequence that the cache has.
      tokens: the new tokens, [sequences, max_new_tokens].
      log_probabilities: that of each.
      counts: the number of new tokens of each sequence, with its stop.
      is_done: whether each has stopped.
      seen: whether each token of the vocabulary is in the sequence; None unless repetition is penalized.
    """

    index: Any
    cache: Any
    positions: Any
    tokens: Any
    log_probabilities: Any
    counts: Any
    is_done: Any
    seen: Any


@dataclass(frozen=True, eq=False)
class Loop:
    """The generation of sequences."""

    decoder: Decoder
    job: Job

    def run(
        self, arrays: Sequence[Any], lengths: np.ndarray, sampling: Sampling, seed: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the new tokens, their log-probabilities, and how many count, computed by one program."""
        compiled = self.decoder.compiled(_whole)
        state = compiled(self.job, self._parameters(), *self._placed(arrays, lengths), sampling, seed)
        tokens, log_probabilities, counts = (on_every_host(array)[: self.job.rows.num_sequences] for array in state)
        return tokens, log_probabilities, counts

    def stream(self, arrays: Sequence[Any], lengths: np.ndarray, sampling: Sampling, seed: int) -> Iterator[np.ndarray]:
        """Yields the new token of each sequence, -1 after its end."""
        parameters = self._parameters()
        state = self.decoder.compiled(_first)(self.job, parameters, *self._placed(arrays, lengths), sampling, seed)
        following = self.decoder.compiled(_next, donated=2)
        while True:
            index = int(state.index) - 1
            is_new = on_every_host(state.counts) == index + 1
            yield np.where(is_new, on_every_host(state.tokens[:, index]), -1)[: self.job.rows.num_sequences]
            if index + 1 == self.job.max_new_tokens or on_every_host(state.is_done).all():
                return
            state = following(self.job, parameters, state, sampling, seed)

    def _parameters(self) -> list[Any]:
        return self.job.rows.parameters(self.decoder.parameters())

    def _placed(self, arrays: Sequence[Any], lengths: np.ndarray) -> tuple[list[Any], Any]:
        *placed, lengths = self.job.rows.placed([*arrays, lengths])
        return placed, lengths


def _whole(job: Job, parameters: Any, arrays: Any, lengths: Any, sampling: Sampling, seed: Any) -> tuple[Any, Any, Any]:
    """Returns the new tokens, their log-probabilities and how many count."""
    state = _first(job, parameters, arrays, lengths, sampling, seed)
    state = jax.lax.while_loop(
        lambda state: (state.index < job.max_new_tokens) & ~state.is_done.all(),
        lambda state: _next(job, parameters, state, sampling, seed),
        state,
    )
    return state.tokens, state.log_probabilities, state.counts


def _first(job: Job, parameters: Any, arrays: Any, lengths: Any, sampling: Sampling, seed: Any) -> State:
    """Returns the state after the first new token."""
    logits, cache = job.rows.prefilled(parameters, arrays, lengths)
    count = lengths.shape[0]
    seen = None
    if sampling.repetition_penalty is not None:
        is_prompt = jnp.arange(job.form.length) < lengths[:, None]
        sequences = jnp.arange(count)[:, None]
        seen = jnp.zeros(logits.shape, bool).at[sequences, arrays[0]].max(is_prompt)
    new = count, job.max_new_tokens
    state = State(
        index=jnp.zeros((), jnp.int32),
        cache=cache,
        positions=lengths,
        tokens=jnp.zeros(new, jnp.int32),
        log_probabilities=jnp.zeros(new, jnp.float32),
        counts=jnp.zeros(count, jnp.int32),
        is_done=jnp.arange(count) >= job.rows.num_sequences,
        seen=seen,
    )
    return _drawn(job, state, logits, sampling, seed)


def _next(job: Job, parameters: Any, state: State, sampling: Sampling, seed: Any) -> State:
    """Returns the state after one more token."""
    token = jax.lax.dynamic_index_in_dim(state.tokens, state.index - 1, 1, keepdims=False)
    logits, cache = job.rows.stepped(parameters, state.cache, [token], state.positions)
    state = state._replace(cache=cache, positions=state.positions + 1)
    return _drawn(job, state, logits, sampling, seed)


def _drawn(job: Job, state: State, logits: Any, sampling: Sampling, seed: Any) -> State:
    """Returns the state with a token drawn from logits; sequences that have stopped get none."""
    sequences = jnp.arange(logits.shape[0])
    keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), row), state.index))
    token, log_probability = draw(logits, keys(sequences), sampling, state.seen)
    tokens = jax.lax.dynamic_update_slice_in_dim(state.tokens, token[:, None], state.index, 1)
    numbers = jax.lax.dynamic_update_slice_in_dim(state.log_probabilities, log_probability[:, None], state.index, 1)
    counts = jnp.where(state.is_done, state.counts, state.index + 1)
    is_done = state.is_done
    for stop in job.stops:
        places = state.index + 1 - len(stop) + np.arange(len(stop))
        latest = jnp.take(tokens, jnp.maximum(places, 0), axis=1)
        is_done |= (places[0] >= 0) & (latest == np.array(stop)).all(-1)
    seen = None if state.seen is None else state.seen.at[sequences, token].set(True)
    return state._replace(
        index=state.index + 1,
        tokens=tokens,
        log_probabilities=numbers,
        counts=counts,
        is_done=is_done,
        seen=seen,
    )
