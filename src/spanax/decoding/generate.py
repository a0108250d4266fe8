"""`spanax.generate`: new tokens after prompts, by any causal model."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx

from spanax.decoding.decoder import Decoder, Form, called, check_tokens
from spanax.decoding.loop import Job, Loop
from spanax.decoding.rows import Rows
from spanax.decoding.sampling import Sampling
from spanax.errors import ArgumentError, FormatError, RangeError
from spanax.hardware.mesh import MeshShape
from spanax.jit.sharded_function import ShardedFunction
from spanax.plan.layout import Layout


class TextTokenizer(Protocol):
    """What `generate` needs of a tokenizer; those of the libraries `tokenizers` and `transformers` have it."""

    def encode(self, text: str) -> Any:
        """Returns the ids of a text, or an encoding with `ids`."""

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids."""


@dataclass(frozen=True)
class Generation:
    """What was generated after one prompt.

    Attributes:
      tokens: the new token ids, without the stop.
      log_probabilities: that of each under the model's logits, without temperature and other rules.
      text: their text, cut at a stop string; None without a tokenizer.
      is_stopped: whether a stop ended it, rather than the number of tokens.
    """

    tokens: tuple[int, ...]
    log_probabilities: tuple[float, ...]
    text: str | None
    is_stopped: bool


def generate(  # noqa: PLR0913
    model: Any,
    prompts: Any,
    max_new_tokens: int = 128,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    stop: Any = (),
    seed: int = 0,
    num_samples: int = 1,
    stream: bool = False,
    tokenizer: TextTokenizer | None = None,
    function: Callable[..., Any] | None = None,
    inputs: Mapping[str, Any] | None = None,
    layout: str | Layout | None = None,
    mesh: Mapping[str, int] | str | MeshShape | jax.sharding.Mesh | None = None,
    like: ShardedFunction | None = None,
    fallback: bool = True,
) -> Any:
    """Generates tokens after prompts, with the cache that `spanax.decode` derives from the model.

    All prompts are generated together, each from its own length. Samples depend on the seed and on the index of the
    prompt, and not on the mesh.

    Args:
      model: as in `spanax.decode`. It is evaluated in evaluation mode.
      prompts: a sequence of prompts, each token ids, or a text if there is a tokenizer.
      max_new_tokens: the most tokens after each prompt.
      temperature: divides the logits; 0 takes the most likely token.
      top_k: draw from this many most likely tokens.
      top_p: draw from the fewest most likely tokens whose probabilities sum to this.
      min_p: draw from tokens that are at least this times as likely as the most likely one.
      repetition_penalty: makes tokens of the sequence less likely if above 1.
      stop: token ids, sequences of token ids, and texts if there is a tokenizer; any of them ends a generation.
      seed: of the random draws.
      num_samples: the number of generations for each prompt, which follow each other.
      stream: return an iterator instead, that yields the new token of each generation, -1 after its end.
      tokenizer: encodes and decodes text: an object with `encode` and `decode`.
      function: as in `spanax.decode`.
      inputs: other arguments of `function`, by name, each with the prompts along dim 0.
      layout: as in `spanax.jit`. Parameters that it only stores in shards are gathered once, if they fit.
      mesh: as in `spanax.jit`. By default, the parameters remain where they are.
      like: a function of `spanax.jit` whose mesh and layout are used.
      fallback: as in `spanax.decode`.

    Returns:
      A list of `Generation`s.

    Raises:
      SpanaxError: an argument is invalid, the model is not causal, or has fewer positions than tokens are requested.

    Example:
      >>> from flax import nnx
      >>> from spanax.models import gpt
      >>> model = gpt.GPT(gpt.GPTConfig(64, 64, num_layers=1, num_heads=2, embed_dim=16), nnx.Rngs(0))
      >>> long, short = generate(model, [[3, 1, 4, 1, 5], [9]], max_new_tokens=4, temperature=0)
      >>> len(long.tokens), len(short.log_probabilities), short.is_stopped
      (4, 4, False)
    """
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty).checked()
    for name, number in (("max_new_tokens", max_new_tokens), ("num_samples", num_samples)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise RangeError(f"`{name}` is {number!r}.", fix="a whole number of at least 1")
    ids = [each for each in _token_ids(prompts, tokenizer) for _ in range(num_samples)]
    lengths = np.array([*map(len, ids)], np.int32)
    stops = _stops(stop, tokenizer)
    known = _known(model, function, fallback)
    decoder = known.decoder
    others = {name: np.repeat(np.asarray(array), num_samples, 0) for name, array in (inputs or {}).items()}
    form = decoder.form_for(int(lengths.max()) + max_new_tokens, others)
    rows = known.placed(model, form, len(ids), layout=layout, mesh=mesh, like=like)
    vocabulary = decoder.derived(form).forward.vocabulary
    for name, each in (*(("prompts", prompt) for prompt in ids), *(("stop", stop.ids) for stop in stops)):
        check_tokens(name, each, vocabulary)
    tokens = np.zeros((len(ids), form.length), np.int32)
    for row, prompt in zip(tokens, ids, strict=True):
        row[: len(prompt)] = prompt
    loop = Loop(decoder, Job(form, rows, tuple(each.ids for each in stops), max_new_tokens))
    arrays = [tokens, *others.values()]
    if stream:
        return loop.stream(arrays, lengths, sampling, seed)
    return _generations(*loop.run(arrays, lengths, sampling, seed), stops, tokenizer)


def _token_ids(prompts: Any, tokenizer: TextTokenizer | None) -> list[list[int]]:
    """Returns the ids of prompts.

    Raises:
      SpanaxError: there is none, one is empty, or one is a text without a tokenizer.
    """
    if isinstance(prompts, str) or not hasattr(prompts, "__len__"):
        raise ArgumentError.of("prompts", prompts, "a list of prompts, each a list of token ids or a text")
    ids = [_encoded(prompt, tokenizer) for prompt in prompts]
    empty = [index for index, each in enumerate(ids) if not each]
    if not ids or empty:
        what = f"prompt {empty[0]} is empty." if empty else "there is no prompt."
        raise RangeError(what, fix="begin with at least one token, such as the tokenizer's begin-of-text")
    return ids


def _encoded(prompt: Any, tokenizer: TextTokenizer | None, name: str = "prompts") -> list[int]:
    if not isinstance(prompt, str):
        array = np.asarray(prompt)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ArgumentError.of(name, prompt, "lists of token ids, such as [[3, 1, 4]]")
        return [int(each) for each in array]
    if tokenizer is None:
        raise ArgumentError.of(name, prompt, "token ids; or pass tokenizer=")
    encoding = tokenizer.encode(prompt)
    return [int(each) for each in getattr(encoding, "ids", encoding)]


@dataclass(frozen=True)
class Stop:
    """What ends a generation: token ids, and their text if it was given as one."""

    ids: tuple[int, ...]
    text: str | None = None


def _stops(stop: Any, tokenizer: TextTokenizer | None) -> list[Stop]:
    """Returns what ends a generation.

    Raises:
      SpanaxError: a stop is empty, or a text that the tokenizer cannot make.
    """
    given = [stop] if isinstance(stop, str | int) else list(stop)
    stops = []
    for each in given:
        text = each if isinstance(each, str) else None
        ids = _encoded([each] if isinstance(each, int) else each, tokenizer, "stop")
        if text is not None and tokenizer is not None and tokenizer.decode(ids) != text:
            raise FormatError(f"the tokenizer cannot make the stop {text!r}.", fix="its token ids, or another text")
        if not ids:
            raise RangeError("a stop is empty.", fix="stop=()")
        stops.append(Stop(tuple(ids), text))
    return stops


@dataclass(frozen=True, eq=False)
class _Known:
    """What calls for one model share.

    Attributes:
      decoder: the decoder.
      rows: the placements of earlier calls.
    """

    decoder: Decoder
    rows: dict[Any, Rows] = field(default_factory=dict)

    def placed(self, model: Any, form: Form, num_sequences: int, **options: Any) -> Rows:
        """Returns the placement under options of `spanax.jit`, planned once."""
        key = form, num_sequences, repr(options["layout"]), repr(options["mesh"]), options["like"]
        if key not in self.rows:
            self.rows[key] = Rows.of(model, self.decoder.derived(form), num_sequences, **options)
        return self.rows[key]


_KNOWN: dict[int, dict[Any, _Known]] = {}
"""What is known of living models, by identity, so that the next call does not derive and compile it again."""


def _known(model: Any, function: Callable[..., Any] | None, fallback: bool) -> _Known:
    """Returns what earlier calls derived of a model."""
    if not isinstance(model, nnx.Module):
        raise ArgumentError.of("model", model, "an nnx.Module")
    if id(model) not in _KNOWN:
        weakref.finalize(model, _KNOWN.pop, id(model), None)
    of_model = _KNOWN.setdefault(id(model), {})
    key = function, fallback
    if key not in of_model:
        decoder = Decoder(weakref.ref(model), function or called, None, (), fallback)
        of_model[key] = _Known(decoder)
    return of_model[key]


def _generations(
    tokens: np.ndarray,
    log_probabilities: np.ndarray,
    counts: np.ndarray,
    stops: Sequence[Stop],
    tokenizer: TextTokenizer | None,
) -> list[Generation]:
    """Returns what each row generated, cut at the first stop."""
    generations = []
    for row, (ids, count) in enumerate(zip(tokens.tolist(), counts.tolist(), strict=True)):
        new = ids[:count]
        end = next((stop for stop in stops if tuple(new[-len(stop.ids) :]) == stop.ids), None)
        kept = new if end is None else new[: -len(end.ids)]
        text = None if tokenizer is None else tokenizer.decode(kept)
        numbers = tuple(log_probabilities[row, : len(kept)].tolist())
        generations.append(Generation(tuple(kept), numbers, text, end is not None))
    return generations
