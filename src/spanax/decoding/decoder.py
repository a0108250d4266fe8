"""`spanax.decode`: prefill and decode step of a causal model, derived from its forward pass."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spanax.decoding.derive.candidates import candidates
from spanax.decoding.derive.forward import Forward, forward_of, resized
from spanax.decoding.derive.proof import depends_on_others, prove, reference
from spanax.decoding.derive.sequences import Incremental, Recomputation, prefilled
from spanax.errors import ArgumentError, CausalityError, DecodeError, RangeError, SpanaxError, first_line
from spanax.jit.objects import Objects, SeenObjects

BUCKET = 64
"""The lengths of sequences are multiples of this, so that those of similar lengths share a compiled program."""


@partial(jax.tree_util.register_dataclass, data_fields=["arrays", "positions"], meta_fields=["form"])
@dataclass(frozen=True)
class Cache:
    """What a decoder keeps of sequences.

    Attributes:
      arrays: by value of the forward pass, with the sequences along the first dim.
      positions: the number of tokens of each sequence.
      form: the form of the decoder that wrote it.
    """

    arrays: dict[int, jax.Array]
    positions: jax.Array
    form: "Form"

    @property
    def num_bytes(self) -> int:
        """The bytes of its arrays."""
        return sum(array.nbytes for array in self.arrays.values())


@dataclass(frozen=True)
class Form:
    """What a decoder is derived for.

    Attributes:
      length: the number of positions.
      inputs: name, shape and dtype of the inputs of one sequence.
      structure: the number of the structure that the model has.
    """

    length: int
    inputs: tuple[tuple[str, tuple[int, ...], str], ...]
    structure: int


class Decoder:
    """Prefill and decode step of a model, derived from its forward pass; `spanax.decode` returns it.

    Attributes:
      recomputed: after the first prefill, the lines of the model that each step computes for all positions, since no
        row of their results can be computed alone.
    """

    def __init__(
        self,
        model: Callable[[], Any],
        function: Callable[..., Any],
        length: int | None,
        per_token: Sequence[str],
        fallback: bool,
    ):
        self._model = model
        self._function = function
        self._length = length
        self._per_token = tuple(per_token)
        self._fallback = fallback
        self._seen = SeenObjects()
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._forms: dict[Form, Incremental | Recomputation] = {}
        self._prefill = jax.jit(self.prefilled, static_argnums=0)
        self._step = jax.jit(self.stepped, static_argnums=0, donate_argnums=2)
        self.recomputed: tuple[str, ...] = ()

    def prefill(self, tokens: Any, lengths: Any = None, **inputs: Any) -> tuple[jax.Array, Cache]:
        """Returns the logits after the last token of each sequence, [batch, vocabulary], and the cache.

        Args:
          tokens: token ids [batch, tokens].
          lengths: the number of tokens of each sequence, [batch], at least 1; the others are ignored. Default: all.
          **inputs: the other arguments of the function, each with the sequences along dim 0.

        Raises:
          SpanaxError: the model has no incremental form, or fewer positions than `tokens`; a length is out of range.
        """
        tokens = tokens if isinstance(tokens, jax.Array) else np.asarray(tokens)
        shape = tokens.shape
        if len(shape) != 2 or 0 in shape:
            raise RangeError(f"`tokens` has the shape {list(shape)}.", fix="token ids [batch, tokens]")
        form = self._form(shape, inputs)
        lengths = np.full(shape[0], shape[1], np.int32) if lengths is None else lengths
        if not isinstance(lengths, jax.core.Tracer):
            lengths = np.asarray(lengths, np.int32)
            if lengths.shape != shape[:1] or lengths.min() < 1 or lengths.max() > shape[1]:
                raise RangeError(
                    f"`lengths` is {lengths.tolist()}, for tokens {list(shape)}.",
                    fix=f"one number from 1 to {shape[1]} for each sequence",
                )
        if isinstance(tokens, np.ndarray):
            check_tokens("tokens", tokens, self.derived(form).forward.vocabulary)
        logits, arrays = self._prefill(form, self.parameters(), [tokens, *inputs.values()], lengths)
        return logits, Cache(arrays, jnp.asarray(lengths), form)

    def step(self, token: Any, cache: Cache, **inputs: Any) -> tuple[jax.Array, Cache]:
        """Returns the logits after one more token of each sequence, [batch, vocabulary], and the cache, which it frees.

        Args:
          token: a token id for each sequence, [batch].
          cache: that of the tokens before; its arrays are donated.
          **inputs: the arguments of the function that have one element for each token, [batch, ...].

        Raises:
          SpanaxError: a sequence has as many tokens as the cache has positions.
        """
        if not isinstance(cache.positions, jax.core.Tracer) and cache.positions.max() >= cache.form.length:
            raise RangeError(
                f"the cache is full: it has {cache.form.length} positions.",
                fix=f"spanax.decode(..., length={2 * cache.form.length})",
            )
        rows = [jnp.asarray(token), *inputs.values()]
        logits, arrays = self._step(cache.form, self.parameters(), cache.arrays, rows, cache.positions)
        return logits, Cache(arrays, cache.positions + 1, cache.form)

    def parameters(self) -> list[Any]:
        """Returns the arrays of the model."""
        return self._objects()[0].arrays()

    def _objects(self) -> tuple[Objects, int]:
        """Returns the arrays of the model, and the number of its structure, by which programs are known."""
        return self._seen.of((self._model(),))

    def derived(self, form: Form) -> Incremental | Recomputation:
        """Returns the incremental form for some sizes, which was compared with the forward pass."""
        if form not in self._forms:
            self._forms[form] = self._derive(form)
        return self._forms[form]

    def _derive(self, form: Form) -> Incremental | Recomputation:
        if not self._forms and _has_dropout(self._model()):
            warnings.warn("the model is in training mode, with dropout; it generates in evaluation mode.", stacklevel=5)
        arrays = [jax.ShapeDtypeStruct((1, *shape), dtype) for _, shape, dtype in form.inputs]
        names = [name for name, _, _ in form.inputs]
        per_token = [name == names[0] or name in self._per_token for name in names]

        def call(model: Any, tokens: Any, *others: Any) -> Any:
            return self._function(model, tokens, **dict(zip(names[1:], others, strict=True)))

        forward = forward_of(call, self._model(), arrays, names, per_token)
        try:
            logits = reference(forward, self.parameters())
            derived = self._proven(call, forward, logits)
        except CausalityError:
            raise
        except DecodeError as error:
            if not self._fallback:
                raise
            warnings.warn(f"{first_line(error)} Each token computes the whole sequence.", stacklevel=4)
            return Recomputation(forward)
        self.recomputed = tuple(derived.recomputed())
        if not self._forms and form.length > 1:
            self._compare_batch(call, forward, logits)
        return derived

    def _proven(self, call: Callable[..., Any], forward: Forward, logits: np.ndarray) -> Incremental:
        """Returns the incremental form, with the shortcuts that are right."""
        *shorter, plain = candidates(forward, partial(resized, forward, call, self._model()))
        for derived in shorter:
            with suppress(DecodeError):
                prove(derived, self.parameters(), logits)
                return derived
        prove(plain, self.parameters(), logits)
        return plain

    def _compare_batch(self, call: Callable[..., Any], forward: Forward, logits: np.ndarray) -> None:
        """Warns if the logits, given for random sequences, depend on the number of tokens or on other sequences."""
        batch = resized(forward, call, self._model(), forward.length // 2, rows=2)
        if batch is not None and depends_on_others(forward, logits, batch, self.parameters()):
            warnings.warn(
                "the logits of this model depend on the number of tokens, or on other sequences of the batch; here, "
                f"they are those of each sequence alone with {forward.length} tokens, whatever the later ones are.",
                stacklevel=6,
            )

    def _form(self, shape: tuple[int, ...], inputs: Mapping[str, Any]) -> Form:
        """Returns the form for a prefill.

        Raises:
          SpanaxError: it has more tokens than the cache, or the model cannot be derived.
        """
        if self._length is not None:
            if shape[1] > self._length:
                raise RangeError(f"{shape[1]} tokens are more than length={self._length}.", fix=f"length={shape[1]}")
            return self._sized(self._length, inputs)
        return self.form_for(2 * shape[1], inputs)

    def _sized(self, length: int, inputs: Mapping[str, Any]) -> Form:
        """Returns the form of a number of positions, derived and compared."""
        sizes = [("tokens", (length,), "int32")]
        for name, array in inputs.items():
            rest = np.shape(array)[1:]
            rest = (length, *rest[1:]) if name in self._per_token else rest
            sizes.append((name, rest, str(jnp.result_type(array))))
        form = Form(length, tuple(sizes), self._objects()[1])
        self.derived(form)
        return form

    def compiled(self, function: Callable[..., Any], donated: int | None = None) -> Callable[..., Any]:
        """Returns `function(static, ...)`, compiled once for this decoder, with which its programs are freed."""
        if function not in self._compiled:
            donate = () if donated is None else donated
            self._compiled[function] = jax.jit(partial(function), static_argnums=0, donate_argnums=donate)
        return self._compiled[function]

    def form_for(self, length: int, inputs: Mapping[str, Any]) -> Form:
        """Returns the form for sequences of at most `length` tokens: a little longer, if the model has the positions.

        Raises:
          SpanaxError: the model has fewer positions, or is not causal.
        """
        rounded = -(-length // BUCKET) * BUCKET
        try:
            return self._sized(rounded, inputs)
        except CausalityError:
            raise
        except SpanaxError:  # of a model with fewer positions
            return self._sized(length, inputs)

    def prefilled(
        self, form: Form, parameters: Sequence[Any], arrays: Sequence[Any], lengths: Any
    ) -> tuple[Any, dict[int, Any]]:
        """Returns the logits [sequences, vocabulary] after the last tokens, and the caches."""
        derived = self.derived(form)
        padded = []
        for array, is_per_token in zip(arrays, derived.forward.per_token, strict=True):
            missing = form.length - array.shape[1] if is_per_token else 0
            widths = [(0, missing if dim == 1 else 0) for dim in range(array.ndim)]
            padded.append(jnp.pad(jnp.asarray(array), widths))
        return prefilled(derived, parameters, padded, lengths)

    def stepped(
        self, form: Form, parameters: Sequence[Any], arrays: dict[int, Any], rows: Sequence[Any], positions: Any
    ) -> tuple[Any, dict[int, Any]]:
        """Returns the logits [sequences, vocabulary] of one more token at each position, and the caches."""
        return self.derived(form).step(parameters, arrays, rows, positions)


def check_tokens(name: str, tokens: Any, vocabulary: int) -> None:
    """Raises RangeError if a token id has no logit."""
    ids = np.asarray(tokens)
    if ids.size and (ids.min() < 0 or ids.max() >= vocabulary):
        wrong = int(ids.min() if ids.min() < 0 else ids.max())
        raise RangeError(f"`{name}` has token {wrong}; the model has {vocabulary} tokens.", fix="the model's tokenizer")


def _has_dropout(model: Any) -> bool:
    """Whether a model would drop activations."""
    dropouts = (module for _, module in nnx.iter_modules(model) if isinstance(module, nnx.Dropout))
    return any(not module.deterministic and module.rate > 0 for module in dropouts)


def called(model: Any, tokens: Any) -> Any:
    """Returns the logits of a model that takes tokens alone."""
    return model(tokens)


def decode(
    model: Any,
    function: Callable[..., Any] | None = None,
    *,
    length: int | None = None,
    per_token: Sequence[str] = (),
    fallback: bool = False,
) -> Decoder:
    """Returns prefill and decode step of a causal model, derived from its forward pass.

    Nothing is written for it in the model. The forward pass of one sequence is traced, in evaluation mode; an operation
    whose rows belong to positions is computed for one position, and what later positions read of it is cached. Before
    its first use, the result is compared with the forward pass, on random tokens.

    Args:
      model: an NNX model that maps tokens [batch, tokens] to logits [batch, tokens, vocabulary].
      function: a function of the model, the tokens, and other inputs by name, that returns the logits. By default, the
        model is called with the tokens.
      length: the most tokens of a sequence, prompt included. By default, twice those of a prefill.
      per_token: the names of inputs of `function` that have an element for each token, such as segment ids. Others,
        such as the states of an encoder, are the same for all tokens.
      fallback: where a causal model has no incremental form, warn with the reason, and compute the whole sequence for
        each token. By default, `prefill` raises it.

    Raises:
      SpanaxError: an argument is invalid. `prefill` raises it if the model is not causal, with the line of the model.

    Example:
      >>> import spanax
      >>> from flax import nnx
      >>> from spanax.models import gpt
      >>> model = gpt.GPT(gpt.GPTConfig(64, 16, num_layers=1, num_heads=2, embed_dim=16), nnx.Rngs(0))
      >>> decoder = spanax.decode(model, length=16)
      >>> tokens = np.array([[3, 1, 4, 1], [5, 9, 2, 0]])
      >>> logits, cache = decoder.prefill(tokens, lengths=np.array([4, 3]))
      >>> logits, cache = decoder.step(logits.argmax(-1), cache)
      >>> logits.shape, cache.positions.tolist()
      ((2, 64), [5, 4])
    """
    if not isinstance(model, nnx.Module):
        raise ArgumentError.of("model", model, "an nnx.Module")
    if length is not None and (not isinstance(length, int) or length < 2):
        raise RangeError(f"`length` is {length!r}.", fix="length=1024")
    return Decoder(lambda: model, function or called, length, per_token, fallback)
