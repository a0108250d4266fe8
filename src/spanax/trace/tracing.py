"""Traces build, optimizer, batch and loss into a `Program` without allocating arrays."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from flax import nnx

from spanax.batch_dims import ExampleDims
from spanax.trace.batch import AUTO, abstract_batch, checked_axes, spread
from spanax.trace.definition import AS_WRITTEN, Definition, Function, FunctionDefinition, State
from spanax.trace.initial_state import Eager
from spanax.trace.jaxpr.remat_policies import EXACT, known_policy
from spanax.trace.loss import chosen_step
from spanax.trace.program import Program, program_of
from spanax.trace.user_function import UserFunction
from spanax.trace.user_mesh import UserMesh
from spanax.trace.variables import Leaf, Owner, check_optimizer, take_apart
from spanax.trace.variant import Variant


def trace(  # noqa: PLR0913
    *,
    build: Callable[..., nnx.Module],
    optimizer: Any,
    batch: Any,
    loss: Callable[[nnx.Module, Any], Any] | None = None,
    train_step: Callable[[nnx.Module, nnx.Optimizer, Any], Any] | None = None,
    microbatches: int = 1,
    compute_dtype: Any = None,
    quantize: str | None = None,
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
      quantize: `int8`, `fp8` or `nvfp4`: the matmuls of weights take operands quantized by Qwix (with `loss`), forward
        and, but for nvfp4, backward; see docs/quantize.md. Stored parameters keep their dtype.
      clip_norm: largest global gradient norm (with `loss`).
      accumulate: how microbatches are combined. `exact` computes the loss, metrics, gradients and noise of the batch,
        and raises if it cannot (batch norm, contrastive losses); `mean` averages those of the microbatches.
      remat: what the forward pass stores for the backward pass (with `loss`); the rest is rematerialized. `none`
        stores everything and ignores remats of the model; `dots` stores the results of matmuls without batch dims and
        of convolutions; `full` stores only the inputs of a layer (one iteration of a scan, or a remat of the model);
        `attention.1+dot_general.2-3@host` stores these results of a layer, those with `@host` in host memory. `dots:8`
        is for the first 8 layers, all others under `none`; `full:8,dots` has the others under `dots`. None: as written
        in the model.
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
    variant = Variant(remat=known_policy(remat), microbatches=microbatches, compute_dtype=dtype, quantize=quantize)
    chosen_step(loss, train_step, clip_norm, accumulate, variant)  # raises before anything is traced
    shapes, batch_leaves, batch_treedef = abstract_batch(batch)
    dims = None if batch_axes == AUTO else checked_axes(spread(batch_axes, shapes, "batch"), batch_leaves)
    mesh = UserMesh.of(shapes)
    check_optimizer(optimizer)
    definition = Definition(
        build=Eager(build) if eager_build else build,
        optimizer=optimizer,
        batch=mesh.untyped(shapes),
        batch_leaves=batch_leaves,
        batch_treedef=batch_treedef,
        loss=loss,
        train_step=train_step,
        clip_norm=clip_norm,
        accumulate=accumulate,
        mesh=mesh,
        batch_axes=dims,
        evaluate=evaluate,
    )
    definition.check_evaluate(variant)
    return program_of(definition, variant)


def trace_function(
    function: Function,
    owners: Sequence[Owner],
    arrays: Sequence[jax.ShapeDtypeStruct],
    names: Sequence[str],
    variant: Variant = AS_WRITTEN,
    batch_axes: ExampleDims | None = None,
) -> Program:
    """Returns the program of one call of a function on NNX objects and arrays.

    Args:
      function: the function.
      owners: the objects, with arrays or with shapes as the values of their Variables.
      arrays: shapes and dtypes of the arrays.
      names: a name for each, which begins with that of the argument: `batch.image`.
      variant: the options of the losses that the function differentiates by `spanax.value_and_grad`.
      batch_axes: the dim with the examples of each array, None for none; by default, as the function uses them.

    Raises:
      SpanaxError: the function changes the set of the objects' variables, or uses a traced array that NNX does not
        track.

    Example:
      >>> from flax import nnx
      >>> model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
      >>> call = lambda nodes, arrays: nodes[0](arrays[0])
      >>> program = trace_function(call, [Owner(model)], [jax.ShapeDtypeStruct((8, 4), "float32")], ["x"])
      >>> [(leaf.path, leaf.axes) for leaf in (*program.leaves, *program.batch)]
      [('bias', ('...',)), ('kernel', ('...', '...')), ('x', ('batch', '...'))]
    """
    shapes = list(arrays)
    variables, values = take_apart(owners)
    mesh = UserMesh.of(shapes, values)
    weak = [
        replace(leaf, weak_type=getattr(jax.typeof(value), "weak_type", False))
        for leaf, value in zip(variables.leaves, values, strict=True)
    ]
    variables = replace(variables, leaves=tuple(weak))
    state = State(variables, None, mesh.with_state(variables.leaves))
    leaves = tuple(
        Leaf(name, shape.shape, shape.dtype, "batch") for name, shape in zip(_short(names), shapes, strict=True)
    )
    user = UserFunction(function, (*variables.names, *names))
    return program_of(FunctionDefinition(user, state, mesh.untyped(shapes), leaves, batch_axes), variant)


def _short(names: Sequence[str]) -> list[str]:
    """Returns the names of arrays without the name of the argument, if they are the items of one dict."""
    heads, tails = ({part[index] for part in (name.partition(".") for name in names)} for index in (0, 2))
    if len(heads) != 1 or any(not tail or tail[0].isdecimal() for tail in tails):
        return list(names)
    return [name.partition(".")[2] for name in names]
