"""Workload: a model with its loss or train step, batch, optimizer and data source."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optax
from flax import nnx

from spanax.errors import SpanaxError, nearest
from spanax.trace.optimizers.learning_rates import logged
from spanax.trace.optimizers.moment_dtype import STATE_DTYPES, stored_as
from spanax.trace.program import Program
from spanax.trace.rewrites.remat_policies import EXACT
from spanax.trace.tracing import trace
from spanax.trace.variables import num_wanted


def adamw(learning_rate: float, num_steps: int, *, state_dtype: Any = None) -> optax.GradientTransformation:
    """AdamW with a tenth of the run (100 steps at most) to warm up and a cosine down to a tenth of the rate.

    Its means go over 10 and 20 steps, and may both lie in bfloat16. Source of that: DeepSeek-V3, 2024 (arXiv
    2412.19437), section 3.3.
    """
    warmup = max(1, min(100, num_steps // 10))
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, warmup, max(num_steps, warmup + 1), end_value=learning_rate / 10
    )
    made = optax.adamw(logged(schedule), b2=0.95, weight_decay=0.1)
    return made if state_dtype is None else stored_as(state_dtype, made)


@dataclass(frozen=True)
class Workload:
    """What `spanax train` trains, and what a `file.py:name` on its command line names.

    The name may also be a function that returns a Workload; it is called with those of `batch_size`, `seq_len`,
    `vocab_size`, `num_layers` and `embed_dim` that it takes, so that the command line can change them.

    Attributes:
      build: returns an `nnx.Module`; takes nothing, or an `nnx.Rngs`.
      batch: one batch, as arrays or `jax.ShapeDtypeStruct`s, examples along dim 0.
      loss: `loss(model, batch) -> scalar` or `(scalar, dict)`; or
      train_step: your own `train_step(model, optimizer, batch) -> dict`.
      optimizer: an optax transformation, or a function of (learning rate, number of steps) that returns one, or what
        `spanax.trace` takes beside: a function of the model alone. One with a keyword `state_dtype` lets the user
        choose what the optimizer's state is kept in.
      source: what `spanax.batches` takes: a path, `"python"`, a Grain dataset, an iterable of dicts.
      validation: the same for held-out data; a text or token source holds out its own.
      learning_rate: used where `optimizer` is a function.
      num_steps: how many steps to train where nobody says.
      tokenizer: for text; `bytes`, `bpe`, `bpe:4096` or a tokenizer.json.
      vocab_size: how many tokens the model knows; None where the batch is not tokens.
      microbatches: gradients are accumulated over this many parts of the batch.
      accumulate: how microbatches are combined, as in `spanax.trace`.
      init: a checkpoint that the parameters begin from; left out, they begin at random.
      eager_build: run `build` on the host, as in `spanax.trace`.

    Example:
      >>> import jax
      >>> workload = Workload(
      ...     build=lambda rngs: nnx.Linear(4, 2, rngs=rngs),
      ...     batch=jax.ShapeDtypeStruct((8, 4), "float32"),
      ...     loss=lambda model, x: (model(x) ** 2).mean(),
      ... )
      >>> workload.trace(learning_rate=0.1, num_steps=10).num_params
      10
    """

    build: Callable[..., nnx.Module]
    batch: Any
    loss: Callable[[nnx.Module, Any], Any] | None = None
    train_step: Callable[[nnx.Module, nnx.Optimizer, Any], Any] | None = None
    optimizer: Any = adamw
    source: Any = None
    validation: Any = None
    learning_rate: float = 1e-3
    num_steps: int = 100
    tokenizer: str = "bytes"
    vocab_size: int | None = None
    microbatches: int = 1
    accumulate: str = EXACT
    init: str | None = None
    eager_build: bool = False

    def trace(
        self,
        *,
        learning_rate: float,
        num_steps: int,
        compute_dtype: Any = None,
        remat: str | None = None,
        optimizer_state: str | None = None,
        accumulate: str | None = None,
    ) -> Program:
        """The workload's train step as a Program; `compute_dtype`, `remat`, `accumulate` as in `spanax.trace`.

        `optimizer_state` is what the optimizer's state is kept in, `float32` or `bfloat16`; as it says if left out.

        Raises:
          SpanaxError: the optimizer has no choice of it, or the step cannot be traced.
        """
        takes_rate = callable(self.optimizer) and num_wanted(self.optimizer) != 1
        chosen = self._state_dtype(optimizer_state)
        return trace(
            build=self.build,
            optimizer=self.optimizer(learning_rate, num_steps, **chosen) if takes_rate else self.optimizer,
            batch=self.batch,
            loss=self.loss,
            train_step=self.train_step,
            microbatches=self.microbatches,
            compute_dtype=compute_dtype,
            remat=remat,
            accumulate=accumulate or self.accumulate,
            eager_build=self.eager_build,
        )

    def _state_dtype(self, wanted: str | None) -> dict[str, Any]:
        """What is said to the optimizer about the dtype of its state; float32 is what all of them begin from."""
        if wanted not in (None, *STATE_DTYPES):
            raise SpanaxError(f"unknown optimizer state '{wanted}'.", fix=nearest(wanted, STATE_DTYPES))
        if wanted in (None, "float32"):
            return {}
        if not callable(self.optimizer) or "state_dtype" not in inspect.signature(self.optimizer).parameters:
            raise SpanaxError(
                f"this workload's optimizer cannot keep its state in {wanted}.",
                fix="optimizer=a function of (learning_rate, num_steps, state_dtype=None) in the spanax.Workload",
            )
        return {"state_dtype": wanted}
