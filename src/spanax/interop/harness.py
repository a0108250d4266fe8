"""A model for lm-evaluation-harness: `lm_eval.simple_evaluate(SpanaxLM.load("runs/a"), tasks=[...])`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spanax.errors import UnsupportedError
from spanax.interop.language_model import LanguageModel
from spanax.interop.loaded_model import load_model
from spanax.interop.tasks import FreeText
from spanax.jit.sharded_function import ShardedFunction
from spanax.train.data.text.tokenizer import begin_ids

try:
    from lm_eval.api.model import LM
except ImportError:  # the methods below do not need the harness
    LM = object

MAX_NEW_TOKENS = 256
"""The most tokens of a generation whose task does not limit them, as in other models of the harness."""


class SpanaxLM(LM):
    """A causal model as the `LM` of lm-evaluation-harness.

    Args:
      model: as in `spanax.decode`.
      tokenizer: of the library `tokenizers` or `transformers`.
      length: the number of positions of the model.
      end_id: the end-of-text token; None if there is none.
      like: a function of `spanax.jit` whose mesh and layout are used. By default, the parameters remain where they are.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        length: int,
        end_id: int | None = None,
        like: ShardedFunction | None = None,
    ):
        super().__init__()
        self.texts = LanguageModel(model, tokenizer, length, begin_ids(tokenizer), end_id, like)

    @classmethod
    def load(cls, checkpoint: str | Path, **options: Any) -> "SpanaxLM":
        """Returns the model of a run, of a folder of checkpoints, or of imported weights.

        Args:
          checkpoint: the folder.
          **options: `workload`, `layout` and `mesh`, as the flags of `spanax evaluate`.
        """
        texts = LanguageModel.of(load_model(Path(checkpoint), **options))
        return cls(texts.model, texts.tokenizer, length=texts.length, end_id=texts.end_id, like=texts.like)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Returns the log-probability of each continuation, and whether it is the most likely one."""
        likelihoods = self.texts.log_likelihoods([request.args for request in requests])
        return [(likelihood.log_probability, likelihood.is_greedy) for likelihood in likelihoods]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Returns the log-probability of each text."""
        return self.texts.log_likelihoods_of([request.args[0] for request in requests])

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Returns the most likely text after each prompt, up to a stop.

        Raises:
          SpanaxError: a task samples.
        """
        asked = [_request(*request.args) for request in requests]
        return [continuation.text for continuation in self.texts.continued(asked)]


def _request(prompt: str, options: dict[str, Any]) -> FreeText:
    if options.get("do_sample"):
        raise UnsupportedError("the task samples, with do_sample: true.", fix="do_sample: false in generation_kwargs")
    until = options.get("until") or ()
    stop = (until,) if isinstance(until, str) else tuple(until)
    return FreeText("", prompt, stop, int(options.get("max_gen_toks", MAX_NEW_TOKENS)))
