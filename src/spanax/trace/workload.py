"""Workload: what to train. A model, a loss or step, a batch, an optimizer, and where the data comes from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optax
from flax import nnx

from spanax.trace.program import Program, trace
from spanax.trace.variables import num_wanted


def adamw(learning_rate: float, num_steps: int) -> optax.GradientTransformation:
    """AdamW with a tenth of the run (100 steps at most) to warm up and a cosine down to a tenth of the rate."""
    warmup = max(1, min(100, num_steps // 10))
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, warmup, max(num_steps, warmup + 1), end_value=learning_rate / 10
    )
    return optax.adamw(schedule, b2=0.95, weight_decay=0.1)


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
        `spanax.trace` takes beside: a function of the model alone.
      source: what `spanax.batches` takes: a path, `"python"`, a Grain dataset, an iterable of dicts.
      validation: the same for held-out data; a text or token source holds out its own.
      learning_rate: used where `optimizer` is a function.
      num_steps: how many steps to train where nobody says.
      tokenizer: for text; `bytes`, `bpe`, `bpe:4096` or a tokenizer.json.
      vocab_size: how many tokens the model knows; None where the batch is not tokens.
      microbatches: gradients are accumulated over this many parts of the batch.
      init: a checkpoint that the parameters begin from; left out, they begin at random.

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
    init: str | None = None

    def trace(
        self, *, learning_rate: float, num_steps: int, compute_dtype: Any = None, remat: str | None = None
    ) -> Program:
        """The workload's train step as a Program; `compute_dtype` and `remat` as in `spanax.trace`."""
        takes_rate = callable(self.optimizer) and num_wanted(self.optimizer) != 1
        return trace(
            build=self.build,
            optimizer=self.optimizer(learning_rate, num_steps) if takes_rate else self.optimizer,
            batch=self.batch,
            loss=self.loss,
            train_step=self.train_step,
            microbatches=self.microbatches,
            compute_dtype=compute_dtype,
            remat=remat,
        )
