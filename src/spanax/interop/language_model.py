"""A causal model with its tokenizer, which scores and continues texts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from spanax.decoding.generate import generate
from spanax.decoding.likelihood import Likelihood, batch_rows, log_likelihoods
from spanax.errors import MissingError, RangeError, WorkloadError
from spanax.interop.loaded_model import LoadedModel
from spanax.jit.sharded_function import ShardedFunction
from spanax.train.data.text.tokenizer import begin_ids, plain_ids

GENERATIONS = 32
"""The most sequences of a device that are generated together."""


@dataclass(frozen=True)
class Continuation:
    """The most likely text after a prompt, without the stop.

    Attributes:
      text: the text.
      is_stopped: whether a stop ended it, rather than the number of tokens.
      num_cut: the number of tokens of the prompt that the model did not read, for want of positions.
    """

    text: str
    is_stopped: bool
    num_cut: int


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A causal model with its tokenizer.

    Attributes:
      model: as in `spanax.decode`.
      tokenizer: of the library `tokenizers` or `transformers`.
      length: the number of positions of the model.
      begin: the token ids before each text.
      end_id: the end-of-text token, which ends a continuation, and precedes a text where `begin` is empty.
      like: a function of `spanax.jit` whose mesh and layout are used; None where the parameters are.
    """

    model: Any
    tokenizer: Any
    length: int
    begin: tuple[int, ...] = ()
    end_id: int | None = None
    like: ShardedFunction | None = None

    @classmethod
    def of(cls, saved: LoadedModel, *, is_chat: bool = False) -> "LanguageModel":
        """Returns a loaded model; a chat template writes the begin token itself.

        Raises:
          SpanaxError: the checkpoint has no tokenizer, or no length.
        """
        if saved.tokenizer is None:
            raise MissingError("the checkpoint has no tokenizer.", fix="spanax.decoding.likelihood in Python")
        if saved.length is None:
            raise WorkloadError("the workload has no batch of tokens [examples, positions].")
        begin = () if is_chat else begin_ids(saved.tokenizer)
        return cls(saved.model, saved.tokenizer, saved.length, begin, saved.end_id, saved.forward)

    def log_likelihoods(self, pairs: Sequence[tuple[str, str]], names: Sequence[str] = ()) -> list[Likelihood]:
        """Returns the likelihood of each continuation after its context, which may be empty.

        Spaces at the end of a context belong to the continuation, whose first token usually includes them.

        Raises:
          SpanaxError: a continuation has no token, or more than the model has positions.
        """
        names = names or [f"pair {index}" for index in range(len(pairs))]
        ids = [self._split(*pair, name) for pair, name in zip(pairs, names, strict=True)]
        return log_likelihoods(self.model, ids, length=self.length, like=self.like, names=names)

    def log_likelihoods_of(self, texts: Sequence[str]) -> list[float]:
        """Returns the log-probability of each text; one longer than the model is read in windows.

        Each window has as many tokens before those that it adds as fit.
        """
        pairs = []
        owners = []
        for index, text in enumerate(texts):
            before = self._begun("", f"text {index}")
            ids = [*before, *self.encoded(text)]
            for begin in range(len(before), len(ids), self.length):
                end = min(begin + self.length, len(ids))
                pairs.append((ids[max(end - self.length - 1, 0) : begin], ids[begin:end]))
                owners.append(index)
        totals = [0.0] * len(texts)
        likelihoods = log_likelihoods(self.model, pairs, length=self.length, like=self.like)
        for index, likelihood in zip(owners, likelihoods, strict=True):
            totals[index] += likelihood.log_probability
        return totals

    def continued(self, requests: Sequence[Any], names: Sequence[str] = ()) -> list[Continuation]:
        """Returns the most likely continuation of the `prompt` of each request, of at most its `max_new_tokens`.

        It is cut at the first of the texts in its `stop`.

        Raises:
          SpanaxError: more tokens are requested than the model has positions.
        """
        names = names or [f"request {index}" for index in range(len(requests))]
        groups: dict[tuple[tuple[str, ...], int], list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault((request.stop, request.max_new_tokens), []).append(index)
        prompts = [self._begun(request.prompt, name) for request, name in zip(requests, names, strict=True)]
        results: dict[int, Continuation] = {}
        for (stop, most), chosen in groups.items():
            if most >= self.length:
                what = f"{names[chosen[0]]}: max_new_tokens is {most}; the model has {self.length} positions."
                raise RangeError(what, fix=f"max_new_tokens {self.length // 2}")
            chosen.sort(key=lambda index: -len(prompts[index]))
            count = batch_rows(len(chosen), GENERATIONS, self.like)
            for begin in range(0, len(chosen), count):
                part = chosen[begin : begin + count]
                texts = self._continued([prompts[index] for index in part], count, stop, most)
                results.update(zip(part, texts, strict=True))
        return [results[index] for index in range(len(requests))]

    def _continued(
        self, prompts: Sequence[list[int]], count: int, stop: Sequence[str], most: int
    ) -> Iterator[Continuation]:
        """Yields the continuations of at most `count` prompts."""
        ids = [prompt[most - self.length :] for prompt in prompts]
        ids += ids[-1:] * (count - len(ids))
        # A stop that is no sequence of tokens is found in the text afterwards.
        encoded = [self.encoded(text) for text in stop]
        ends = [each for text, each in zip(stop, encoded, strict=True) if each and self._decoded(each, False) == text]
        ends += [[each] for each in self._end_ids()]
        generations = generate(self.model, ids, most, temperature=0, stop=ends, like=self.like)
        for prompt, generation in zip(prompts, generations, strict=False):
            text = self._decoded(generation.tokens)
            place = min((place for each in stop if (place := text.find(each)) >= 0), default=len(text))
            is_stopped = generation.is_stopped or place < len(text)
            yield Continuation(text[:place], is_stopped, max(len(prompt) + most - self.length, 0))

    def encoded(self, text: str) -> list[int]:
        """Returns the token ids of a text, without any before or after it."""
        return plain_ids(self.tokenizer, text, add_special_tokens=False)

    def _decoded(self, ids: Sequence[int], is_plain: bool = True) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=is_plain))

    def _end_ids(self) -> list[int]:
        return [] if self.end_id is None else [self.end_id]

    def _split(self, context: str, continuation: str, name: str) -> tuple[list[int], list[int]]:
        kept = context.rstrip()
        after = self.encoded(context + continuation)[len(self.encoded(kept)) :] if continuation else []
        return self._begun(kept, name), after

    def _begun(self, text: str, name: str) -> list[int]:
        """Returns the token ids of a text, with those before it.

        Raises:
          SpanaxError: there is none.
        """
        ids = [*self.begin, *self.encoded(text)] or self._end_ids()
        if not ids:
            what = f"{name} has an empty context, and the tokenizer has neither a begin nor an end token."
            raise MissingError(what, fix="a context of at least one token")
        return ids
