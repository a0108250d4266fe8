"""Samples of the model in training: continuations of prompts, every `--sample-every` steps."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from flax import nnx

from spanax.errors import DataError, MissingError, RangeError
from spanax.processes.processes import from_first
from spanax.train.data.batches import Batches
from spanax.train.data.text.prompts import read_prompts
from spanax.train.job.job import Job
from spanax.train.record.telemetry import SAMPLE, Telemetry
from spanax.train.run import Run

MAX_NEW_TOKENS = 64
"""The most tokens after a prompt; a sequence is at most as long as those of training."""

Generate = Callable[..., Sequence[Any]]
"""`spanax.generate`, which is built on this folder and therefore passed in."""


@dataclass(eq=False)
class Samples:
    """Continues prompts by the model of a run.

    Attributes:
      generate: `spanax.generate`.
      prompts: the prompts.
      options: its options.
      seed: the seed of the run; that of the samples is the sum of this and the step.
      telemetry: receives an event for each sample.
    """

    generate: Generate
    prompts: list[str]
    options: dict[str, Any]
    seed: int
    telemetry: Telemetry
    _model: nnx.Module | None = field(default=None, init=False)

    @classmethod
    def of(cls, job: Job, data: Batches, generate: Generate | None, telemetry: Telemetry) -> "Samples | None":
        """Returns the samples that a job requests, if any.

        Raises:
          SpanaxError: there is no tokenizer, or no token could follow a prompt.
          DataError: the file of prompts cannot be read, or has none.
        """
        path = job.config.sample_prompts
        if path is None:
            return None
        assert generate is not None
        prompts = from_first(lambda: "\n".join(read_prompts(path)), DataError).split("\n")
        tokenizer = data.tokens and data.tokens.tokenizer
        if not tokenizer:
            raise MissingError(
                "the training data has no tokenizer for the prompts.",
                where=f"--sample-prompts {path}, --data {data.source}",
                fix="--data with a text, or no --sample-prompts",
            )
        import tokenizers

        engine = tokenizers.Tokenizer.from_str(tokenizer.to_json())
        length = job.program.batch[0].shape[-1]
        longest = max(len(engine.encode(prompt).ids) for prompt in prompts)
        if longest >= length:
            raise RangeError(
                f"a prompt has {longest} tokens, and the sequences of this run have {length}.",
                where=f"--sample-prompts {path}",
                fix=f"shorter prompts, or --seq-len {longest + MAX_NEW_TOKENS}",
            )
        options = {
            "max_new_tokens": min(MAX_NEW_TOKENS, length - longest),
            "tokenizer": engine,
            "stop": [] if tokenizer.end_id is None else [tokenizer.end_id],
        }
        return cls(generate, prompts, options, job.config.seed, telemetry)

    def draw(self, run: Run) -> Sequence[Any]:
        """Returns a generation for each prompt; compiled by the first call, which checks that the model is causal.

        Raises:
          SpanaxError: the model cannot generate.
        """
        (model, *_) = run.program.variables.merge([*run.arrays().values()])  # the arrays are not copied
        if self._model is None:
            model.eval()
            self._model = model
        else:  # `generate` knows the model by its identity
            nnx.update(self._model, nnx.state(model))
        seed = (self.seed + run.num_steps) % (1 << 31)
        return self.generate(self._model, self.prompts, seed=seed, **self.options)

    def report(self, run: Run) -> None:
        """Reports the samples of the step that a run has reached."""
        for prompt, generation in zip(self.prompts, self.draw(run), strict=True):
            event = {"event": SAMPLE, "step": run.num_steps, "prompt": prompt, "text": generation.text}
            self.telemetry.report(event | asdict(generation))
