"""Traces build, optimizer, batch and loss into a `Program` without allocating arrays."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from spanax.trace.batch import AUTO, abstract_batch, checked_axes, spread
from spanax.trace.definition import Definition
from spanax.trace.initial_state import Eager
from spanax.trace.jaxpr.remat_policies import EXACT
from spanax.trace.loss.train_step import chosen_step
from spanax.trace.program import Program, program_of
from spanax.trace.user_mesh import UserMesh
from spanax.trace.variables import check_optimizer
from spanax.trace.variant import Variant


def trace(
    *,
    build: Callable[..., nnx.Module],
    optimizer: Any,
    batch: Any,
    loss: Callable[[nnx.Module, Any], Any] | None = None,
    train_step: Callable[[nnx.Module, nnx.Optimizer, Any], Any] | None = None,
    microbatches: int = 1,
    compute_dtype: Any = None,
    clip_norm: float | None = None,
    remat: str | None = None,
    accumulate: str = EXACT,
    eager_build: bool = False,
    evaluate: Callable[[nnx.Module, Any], Mapping[str, Any]] | None = None,
    batch_axes: Any = AUTO,
) -> Program:
    """Traces a train step into a Program. No array is allocated, and no device is needed.

    Args:
      build: returns an `nnx.Module`; takes nothing, or an `nnx.Rngs`.
      optimizer: an optax transformation, or a function from the model to an `nnx.Optimizer`.
      batch: a pytree of arrays or `jax.ShapeDtypeStruct`s.
      loss: `loss(model, batch) -> scalar` or `(scalar, dict of metrics)`; Spanax writes the step around it.
      train_step: your own `train_step(model, optimizer, batch) -> dict of metrics`, instead of a loss.
      microbatches: gradients are accumulated over this many parts of the batch (with `loss`).
      compute_dtype: dtype of floating parameters and batch in the loss (with `loss`); stored parameters keep theirs.
      clip_norm: largest global gradient norm (with `loss`).
      accumulate: how microbatches are combined. `exact` computes the loss, metrics, gradients and noise of the batch,
        and raises if it cannot (batch norm, contrastive losses); `mean` averages those of the microbatches.
      remat: what the forward pass stores for the backward pass (with `loss`); the rest is rematerialized. `none`
        stores everything and ignores remats of the model; `dots` stores the results of matmuls without batch dims and
        of convolutions; `full` stores only the inputs of a layer (one iteration of a scan, or a remat of the model);
        `offload` is `dots` in host memory. `dots:8` is for the first 8 layers, all others under `none`; `full:8,dots`
        has the others under `dots`. None: as written in the model.
      eager_build: run `build` operation by operation on the host's CPU, here and in `spanax.start`, if it reads
        the values of its parameters. The model must fit in host memory.
      evaluate: `evaluate(model, batch) -> dict of metrics`, with either of `loss` and `train_step`: `run.evaluate`
        returns them, computed in evaluation mode, in place of the loss.
      batch_axes: the dim with the examples of each array of the batch: an int, None for no examples, or a pytree prefix
        of the batch with such entries, as `in_axes` of `jax.vmap`. By default the program decides: dim 0, or the next
        one after the steps of a loop, as in `[steps, batch, ...]`.

    Raises:
      SpanaxError: neither or both of `loss` and `train_step`, or a step that cannot be traced.

    Example:
      >>> import jax, optax
      >>> from flax import nnx
      >>> program = trace(
      ...     build=lambda rngs: nnx.Linear(4, 2, rngs=rngs),
      ...     optimizer=optax.sgd(0.1),
      ...     batch=jax.ShapeDtypeStruct((8, 4), "float32"),
      ...     loss=lambda model, x: (model(x) ** 2).mean(),
      ... )
      >>> [(leaf.path, leaf.shape, leaf.kind) for leaf in program.leaves][:2]
      [('bias', (2,), 'param'), ('kernel', (4, 2), 'param')]
    """
    dtype = None if compute_dtype is None else jax.numpy.dtype(compute_dtype).name
    variant = Variant(remat=remat, microbatches=microbatches, compute_dtype=dtype)
    chosen_step(loss, train_step, clip_norm, accumulate, variant)  # raises before anything is traced
    shapes, batch_leaves, batch_treedef = abstract_batch(batch)
    dims = None if batch_axes == AUTO else checked_axes(spread(batch_axes, shapes, "batch"), batch_leaves)
    mesh = UserMesh.of(shapes)
    check_optimizer(optimizer)
    definition = Definition(
        build=Eager(build) if eager_build else build, optimizer=optimizer, batch=mesh.untyped(shapes),
        batch_leaves=batch_leaves, batch_treedef=batch_treedef, loss=loss, train_step=train_step, clip_norm=clip_norm,
        accumulate=accumulate, mesh=mesh, batch_axes=dims, evaluate=evaluate,
    )  # fmt: skip
    definition.check_evaluate(variant)
    return program_of(definition, variant)
