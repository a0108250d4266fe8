"""Workload: a model with its loss or train step, batch, optimizer and data source."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np
import optax
from flax import nnx

from spanax.adapters.lora import RATE, LoRA, with_adapters
from spanax.errors import OptimizerError, UnknownNameError, WorkloadError, nearest
from spanax.trace.batch import AUTO
from spanax.trace.jaxpr.remat_policies import EXACT
from spanax.trace.optimizers.named import NAMED, adamw, averaging
from spanax.trace.optimizers.recipe import AS_DEFINED, Recipe
from spanax.trace.optimizers.wrapped import STATE_DTYPES
from spanax.trace.program import Program
from spanax.trace.tracing import trace
from spanax.trace.variables import built_from, num_wanted
from spanax.usage import flag

DENSE_PAIRS = 1 << 24
"""Up to this many possible pairs are counted in a dense table (128 MiB of int64); beyond, only pairs that occur."""

MAX_TRAIN_TOKENS = 1 << 25
"""The model is fitted on at most this many tokens; more would take longer than the evaluation itself."""


def bigram_loss(
    train_tokens: np.ndarray, validation_tokens: np.ndarray, vocab_size: int, smoothing: float = 2.0
) -> float:
    """Returns the cross-entropy, in nats per token, of a smoothed bigram model on the validation tokens.

    The probability of b after a is `(count(ab) + s * p(b)) / (count(a) + s)`, with p(b) the unigram probability after
    adding one to every count, and s equal to `smoothing` times the number of different tokens seen after a (Witten-Bell
    smoothing). One value of `smoothing` serves every vocabulary size.

    Args:
      train_tokens: token ids to fit the model on, of shape [N]; the first `MAX_TRAIN_TOKENS` are used.
      validation_tokens: token ids to evaluate the model on, of shape [M], M >= 2.
      vocab_size: the number of token ids.
      smoothing: the weight of the unigram probability; 0 gives unseen pairs a probability of zero.

    Returns:
      The mean over the M - 1 pairs; log(vocab_size) for a model without training tokens.

    Example:
      >>> text = np.frombuffer(b"abababababababab" * 64, np.uint8)
      >>> bigram_loss(text, text, vocab_size=256) < 0.05
      True
    """
    train = np.asarray(train_tokens[:MAX_TRAIN_TOKENS]).astype(np.int64)
    validation = np.asarray(validation_tokens).astype(np.int64)
    if len(validation) < 2:
        raise ValueError(f"a bigram needs two validation tokens, and there are {len(validation)}")
    highest = int(max(train.max(initial=0), validation.max()))
    if highest >= vocab_size:
        raise ValueError(f"token {highest} is outside a vocabulary of {vocab_size}")

    before = validation[:-1]
    after = validation[1:]
    num_tokens = np.bincount(train, minlength=vocab_size)
    num_before = np.bincount(train[:-1], minlength=vocab_size)
    unigram = (num_tokens + 1) / (len(train) + vocab_size)
    num_pairs, num_followers = _count_pairs(train, before * vocab_size + after, vocab_size)
    weight = smoothing * np.maximum(num_followers[before], 1)
    probabilities = (num_pairs + weight * unigram[after]) / (num_before[before] + weight)
    return float(-np.log(probabilities).mean())


def _count_pairs(tokens: np.ndarray, queries: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts the occurrences of each queried pair (first * vocab_size + second), and the followers of each token."""
    seen = tokens[:-1] * vocab_size + tokens[1:]
    if vocab_size**2 <= DENSE_PAIRS:
        counts = np.bincount(seen, minlength=vocab_size**2)
        return counts[queries], np.count_nonzero(counts.reshape(vocab_size, vocab_size), axis=1)
    pairs, counts = np.unique(seen, return_counts=True)
    num_followers = np.bincount(pairs // vocab_size, minlength=vocab_size)
    if not len(pairs):
        return np.zeros(len(queries), np.int64), num_followers
    positions = np.minimum(np.searchsorted(pairs, queries), len(pairs) - 1)
    return np.where(pairs[positions] == queries, counts[positions], 0), num_followers


@dataclass(frozen=True)
class Workload:
    """A training job for `spanax train`, passed on the command line as `file.py:name`.

    The name may also refer to a function that returns a Workload; it is called with its parameters among `batch_size`,
    `seq_len`, `vocab_size`, `num_layers` and `embed_dim`, so that the command line can set them, and `is_chat`: whether
    the data are conversations.

    Attributes:
      build: returns an `nnx.Module`; takes nothing, or an `nnx.Rngs`.
      batch: one batch, as arrays or `jax.ShapeDtypeStruct`s.
      loss: `loss(model, batch) -> scalar` or `(scalar, dict)`; instead of `train_step`.
      train_step: your own `train_step(model, optimizer, batch) -> dict`.
      optimizer: an optax transformation, or a function of (learning rate, number of steps) that returns one, or a
        function of the model, as in `spanax.trace`. Its keywords `state_dtype`, `schedule`, `warmup_steps` and
        `weight_decay` let the user choose these.
      source: as in `spanax.batches`: a path, `"python"`, a Grain dataset, an iterable of dicts.
      validation: the same for held-out data; text and token sources hold out data themselves.
      learning_rate: passed to `optimizer` if it is a function.
      num_steps: default number of steps.
      tokenizer: for text; `bytes`, `bpe`, `bpe:4096` or a tokenizer.json.
      vocab_size: vocabulary size of the model; None if the batch is not tokens.
      microbatches: gradients are accumulated over this many parts of the batch.
      accumulate: how microbatches are combined, as in `spanax.trace`.
      init: a checkpoint to initialize the parameters from; None for random initialization.
      eager_build: run `build` on the host, as in `spanax.trace`.
      baseline: `baseline(train_tokens, validation_tokens, vocab_size) -> loss` for text and token sources, reported as
        `bigram_loss` with each evaluation; None for no baseline.
      evaluate: `evaluate(model, batch) -> dict of metrics` on held-out batches, in evaluation mode; None to report the
        loss and its metrics. Each metric is averaged over the examples.
      batch_axes: the dim with the examples of each array of the batch, as in `spanax.trace`.
      wrt: an NNX filter of the parameters that `optimizer` updates, such as `nnx.LoRAParam`; the others are frozen.

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
    baseline: Callable[[np.ndarray, np.ndarray, int], float] | None = bigram_loss
    evaluate: Callable[[nnx.Module, Any], Mapping[str, Any]] | None = None
    batch_axes: Any = AUTO
    wrt: Any = nnx.Param

    def adapted(self, adapters: LoRA, *, quantize: str | None = None, dtype: Any = None) -> Self:
        """Returns the workload that trains low-rank adapters of the model, whose own parameters are frozen.

        Args:
          adapters: the adapters.
          quantize: `nf4` or `int8`, for the frozen weights.
          dtype: the dtype of the frozen parameters; that of the model by default.

        Raises:
          WorkloadError: the workload has its own train step, which decides what is trained.
        """
        if self.train_step is not None:
            raise WorkloadError("--lora needs a loss, and this workload has a train_step.", fix="spanax.lora in it")
        build = AdaptedBuild(self.build, adapters, quantize, dtype)
        return replace(self, build=build, wrt=nnx.LoRAParam, learning_rate=RATE * self.learning_rate)

    @property
    def adapters(self) -> LoRA | None:
        """The adapters that the workload trains, if any."""
        return self.build.adapters if isinstance(self.build, AdaptedBuild) else None

    def trace(
        self,
        *,
        learning_rate: float | None = None,
        num_steps: int | None = None,
        compute_dtype: Any = None,
        quantize: str | None = None,
        remat: str | None = None,
        optimizer_state: str | None = None,
        accumulate: str | None = None,
        recipe: Recipe = AS_DEFINED,
    ) -> Program:
        """Traces the train step into a Program; `compute_dtype`, `quantize`, `remat`, `accumulate` as in
        `spanax.trace`.

        The learning rate and the number of steps are by default those of the workload. `optimizer_state` is the dtype
        of the optimizer state, `float32` or `bfloat16`; None for its default. `recipe` replaces the optimizer or its
        parts, or adds adapters; then `quantize` is the storage of the frozen weights, `nf4` or `int8`.

        Raises:
          SpanaxError: the optimizer does not support that dtype or recipe, or the step cannot be traced.
        """
        if recipe.lora is not None:
            dtype = compute_dtype or "bfloat16"
            adapted = self.adapted(LoRA.parse(recipe.lora), quantize=quantize, dtype=dtype)
            return adapted.trace(
                learning_rate=learning_rate,
                num_steps=num_steps,
                compute_dtype=dtype,
                remat=remat,
                optimizer_state=optimizer_state,
                accumulate=accumulate,
                recipe=replace(recipe, lora=None),
            )
        traced = partial(
            trace,
            build=self.build,
            batch=self.batch,
            loss=self.loss,
            train_step=self.train_step,
            microbatches=self.microbatches,
            compute_dtype=compute_dtype,
            quantize=quantize,
            clip_norm=recipe.max_grad_norm,
            remat=remat,
            accumulate=accumulate or self.accumulate,
            eager_build=self.eager_build,
            evaluate=self.evaluate,
            batch_axes=self.batch_axes,
        )
        recipe.check_names()
        make = NAMED[recipe.optimizer] if recipe.optimizer else self.optimizer
        options = _options(make, recipe, optimizer_state)
        if recipe.optimizer == "muon":
            options["axes"] = {leaf.path: leaf.axes for leaf in traced(optimizer=optax.sgd(0.0)).leaves}
        takes_rate = callable(make) and num_wanted(make) != 1
        rate = self.learning_rate if learning_rate is None else learning_rate
        steps = self.num_steps if num_steps is None else num_steps
        optimizer = make(rate, steps, **options) if takes_rate else make
        if recipe.ema is not None:
            optimizer = averaging(recipe.ema, _optax(optimizer, "--ema averages the parameters"))
        if self.wrt is not nnx.Param:
            _optax(optimizer, "--lora trains adapters by that")
            optimizer = partial(nnx.Optimizer, tx=optimizer, wrt=self.wrt)
        return traced(optimizer=optimizer)


@dataclass(frozen=True)
class AdaptedBuild:
    """A `build` whose model has adapters."""

    build: Callable[..., nnx.Module]
    adapters: LoRA
    quantize: str | None = None
    dtype: Any = None

    def __call__(self, rngs: nnx.Rngs) -> nnx.Module:
        model: nnx.Module = built_from(self.build, rngs)
        return with_adapters(model, self.adapters, rngs, quantize=self.quantize, dtype=self.dtype)


def _options(make: Any, recipe: Recipe, state_dtype: str | None) -> dict[str, Any]:
    """Returns the keywords of an optimizer for the recipe and for the dtype of its state; none for float32.

    Raises:
      SpanaxError: the optimizer does not have such a keyword.
    """
    if state_dtype not in (None, *STATE_DTYPES):
        raise UnknownNameError(f"unknown optimizer state '{state_dtype}'.", fix=nearest(state_dtype, STATE_DTYPES))
    options = recipe.options | ({} if state_dtype in (None, "float32") else {"state_dtype": state_dtype})
    known = inspect.signature(make).parameters if options and callable(make) else {}
    for name in options:
        if name not in known:
            owner = f"'{recipe.optimizer}'" if recipe.optimizer else "this workload's optimizer"
            what = f"cannot store its state in {state_dtype}" if name == "state_dtype" else f"takes no {flag(name)}"
            function = f", or optimizer=a function of (learning_rate, num_steps, {name}=None) in the spanax.Workload"
            raise OptimizerError(f"{owner} {what}.", fix=f"--optimizer adamw{'' if recipe.optimizer else function}")
    return options


def _optax(optimizer: Any, use: str) -> optax.GradientTransformation:
    """Returns an optimizer; raises unless it is an optax transformation; `use` says what for."""
    if hasattr(optimizer, "init") and hasattr(optimizer, "update"):
        return optimizer
    raise OptimizerError(
        f"this workload's optimizer is a function of the model, and {use} of a transformation.",
        fix="--optimizer adamw, or an optax transformation in the spanax.Workload",
    )
