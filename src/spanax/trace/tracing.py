"""Traces build, optimizer, batch and loss into a `Program` without allocating arrays."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import jax
from flax import nnx

from spanax.errors import SpanaxError
from spanax.trace.analysis.computation import Computation
from spanax.trace.axes.axes import aligned, discover, warn_of_unknown
from spanax.trace.axes.batch_sized_dims import batch_sized_dims
from spanax.trace.batch import abstract_batch
from spanax.trace.initial_state import Eager, Initial, initial
from spanax.trace.jaxpr.graph import Graph, contains, from_jaxpr, remat_of
from spanax.trace.optimizers.gradient_recording import recording
from spanax.trace.optimizers.learning_rates import injected_rate, with_logged
from spanax.trace.optimizers.validation import of_loss
from spanax.trace.pipeline.retrace import Shapes, retraced_graph
from spanax.trace.program import Program, with_axes
from spanax.trace.pure_loss import with_extra
from spanax.trace.rewrites.attention.fuse import FusedAttention, fuse_attention
from spanax.trace.rewrites.chunked_loss.chunked import chunked_loss
from spanax.trace.rewrites.microbatches.support import Microbatches, microbatches_of
from spanax.trace.rewrites.remat_policies import AS_WRITTEN, EXACT, GATHERED
from spanax.trace.traced import Traced
from spanax.trace.train_step import as_metrics, chosen_step
from spanax.trace.user_mesh import UserMesh, outside_meshes
from spanax.trace.variables import (
    Leaf,
    Variables,
    check_optimizer,
    lowered,
    plain_variables,
    wants_hijax,
    with_defaults,
)


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
) -> Program:
    """Traces a train step into a Program. No array is allocated, and no device is needed.

    Args:
      build: returns an `nnx.Module`; takes nothing, or an `nnx.Rngs`.
      optimizer: an optax transformation, or a function from the model to an `nnx.Optimizer`.
      batch: a pytree of arrays or `jax.ShapeDtypeStruct`s, examples along dim 0 of each.
      loss: `loss(model, batch) -> scalar` or `(scalar, dict of metrics)`; Spanax writes the step around it.
      train_step: your own `train_step(model, optimizer, batch) -> dict of metrics`, instead of a loss.
      microbatches: gradients are accumulated over this many parts of the batch (with `loss`).
      compute_dtype: dtype of floating parameters and batch in the loss (with `loss`); stored parameters keep theirs.
      clip_norm: largest global gradient norm (with `loss`).
      accumulate: how microbatches are combined. `exact` computes the loss, metrics, gradients and noise of the batch,
        and raises where it cannot (batch norm, contrastive losses); `mean` averages those of the microbatches.
      remat: what the forward pass stores for the backward pass (with `loss`); the rest is rematerialized. `none`
        stores everything and ignores remats of the model; `dots` stores the results of matmuls without batch dims and
        of convolutions; `full` stores only the inputs of a layer (one iteration of a scan, or a remat of the model);
        `offload` is `dots` in host memory. None: as written in the model.
      eager_build: run `build` operation by operation on the host's CPU, here and in `spanax.start`, if it reads
        the values of its parameters. The model must fit in host memory.

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
    return _trace(
        build=build, optimizer=optimizer, batch=batch, loss=loss, train_step=train_step, microbatches=microbatches,
        compute_dtype=compute_dtype, clip_norm=clip_norm, remat=remat, accumulate=accumulate, eager_build=eager_build,
    )  # fmt: skip


def _trace(
    *,
    build: Any,
    optimizer: Any,
    batch: Any,
    loss: Any,
    train_step: Any,
    clip_norm: float | None,
    accumulate: str,
    microbatches: int = 1,
    compute_dtype: Any = None,
    remat: str | None = None,
    eager_build: bool = False,
    computes: Callable[[], Computation] | None = None,
) -> Program:
    """Traces as `trace` does; a variant takes `computes` from its original program."""
    chosen = partial(chosen_step, loss, train_step, compute_dtype, clip_norm)
    chosen(remat, microbatches, GATHERED, 1, accumulate)  # raises on a wrong request before anything is traced
    typed, batch_leaves, batch_treedef = abstract_batch(batch)
    mesh = UserMesh.of(typed)
    check_optimizer(optimizer)
    source: Any = Eager(build) if eager_build and not isinstance(build, Eager) else build
    variables, init = initial(source, optimizer if loss is None else of_loss(optimizer), mesh)
    # A user's step may write to hijax Variables inside `jax.grad`; the step that Spanax writes around a loss does not.
    variables = replace(variables, is_hijax=train_step is not None and wants_hijax())
    state, batch, mesh = variables.abstract(), mesh.untyped(typed), mesh.with_state(variables.leaves)
    again = partial(
        mesh.within(with_defaults(_trace)), batch=typed, loss=loss, train_step=train_step, compute_dtype=compute_dtype,
        clip_norm=clip_norm, accumulate=accumulate, computes=computes or (lambda: tracing.computes()),
    )  # fmt: skip
    tracing = _Tracing(
        loss, compute_dtype, accumulate, chosen, variables, mesh, state, batch, batch_leaves,
        recorded=partial(again, build=source, optimizer=recording(optimizer)),
        seeded=cache(lambda seed: again(build=replace(source, seed=seed), optimizer=optimizer)),
        computed_in=cache(
            lambda dtype, policy, microbatches: again(
                build=source, optimizer=optimizer, compute_dtype=dtype, remat=policy, microbatches=microbatches
            )
        ),
        program=partial(_program, init, batch_treedef, computes),
    )  # fmt: skip
    return tracing.retrace(remat, microbatches, GATHERED, 1)


@dataclass(frozen=True, eq=False)
class _Tracing:
    """The inputs from which the variants of a program are traced, each once."""

    loss: Any
    compute_dtype: Any
    accumulate: str
    chosen: Callable[..., Any]
    variables: Variables
    mesh: UserMesh
    state: list[Any]
    batch: Any
    batch_leaves: tuple[Leaf, ...]
    recorded: Callable[..., Program]
    seeded: Callable[[int], Program]
    computed_in: Callable[[str | None, str | None, int], Program]
    program: Callable[..., Program]

    @cached_property
    def retrace(self) -> Callable[[str | None, int, str, int], Program]:
        """Returns a function of (remat policy, microbatches, attention form, loss chunks) that traces the program."""

        @cache
        @outside_meshes
        def retrace(policy: str | None, microbatches: int, context: str, loss_chunks: int) -> Program:
            attentions: list[FusedAttention] = []
            step = self.chosen(policy, microbatches, context, loss_chunks, self.accumulate, attentions)
            traced = self._traced(partial(_run_step, self.variables, step))
            warn_of_unknown(traced.axes)
            evaluation = None if self.loss is None else self._evaluation(context, loss_chunks)
            if evaluation is not None:
                axes = aligned(evaluation.axes, evaluation.graph.body.inputs, traced.axes, traced.graph.body.inputs)
                evaluation = replace(evaluation, axes=axes)
            return self.program(
                self, traced, evaluation, remat=AS_WRITTEN if policy is None else policy, microbatches=microbatches,
                context=context, attention=tuple(dict.fromkeys(attentions)), loss_chunks=loss_chunks,
            )  # fmt: skip

        return retrace

    @cached_property
    def resized(self) -> Callable[[str | None, int, str, int, Shapes], Graph]:
        """Returns a function that traces the graph of a variant with other state shapes."""

        @cache
        @outside_meshes
        def resized(policy: str | None, microbatches: int, context: str, loss_chunks: int, shapes: Shapes) -> Graph:
            variables, variant = self.variables.of_shapes(shapes), (policy, microbatches, context, loss_chunks)
            step = self.mesh.traced(partial(_run_step, variables, self.chosen(*variant, self.accumulate)))
            return retraced_graph(self.retrace(*variant).step.graph, step, variables.abstract(), self.batch)

        return resized

    @cached_property
    def accumulates(self) -> Callable[[], Microbatches]:
        """Returns a function that checks whether microbatches compute the results of the batch."""

        @cache
        @outside_meshes
        def accumulates() -> Microbatches:
            return microbatches_of(self.loss, self.compute_dtype, self.accumulate, self.batch, self._shapes)

        return accumulates

    @cached_property
    def computes(self) -> Callable[[], Computation]:
        """Returns a function that computes the fingerprint of the step in its default variant."""

        @cache
        def computes() -> Computation:
            variant = (None, 1, GATHERED, 1)
            program = self.retrace(*variant) if self.compute_dtype is None else self.computed_in(None, None, 1)
            return Computation.of(program.step, program.leaves)

        return computes

    @cached_property
    def run_loss(self) -> Callable[[list[Any], Any], tuple[list[Any], dict[str, Any]]] | None:
        """Returns the loss as a function of state and batch of any size; None without a `loss`."""
        return None if self.loss is None else self.mesh.traced(partial(_run_loss, self.variables, self.loss))

    @cached_property
    def _evaluation(self) -> Callable[[str, int], Traced]:
        run_loss = partial(_run_loss, self.variables, self.loss)

        @cache
        def evaluation(context: str, loss_chunks: int) -> Traced:
            return self._traced(
                chunked_loss(run_loss if context == GATHERED else fuse_attention(run_loss, context), loss_chunks)
            )

        return evaluation

    def _shapes(self, step: Any) -> Any:
        with plain_variables():
            return jax.eval_shape(self.mesh.traced(partial(_run_step, self.variables, step)), self.state, self.batch)

    def _traced(self, function: Callable[..., Any]) -> Traced:
        return _traced(self.mesh.traced(function), self.state, self.batch, self.variables, self.batch_leaves)


def _program(
    init: Initial,
    batch_treedef: Any,
    computes: Callable[[], Computation] | None,
    tracing: _Tracing,
    traced: Traced,
    evaluation: Traced | None,
    **variant: Any,
) -> Program:
    dtype = None if tracing.compute_dtype is None else jax.numpy.dtype(tracing.compute_dtype).name
    leaves, batch = with_axes(traced, tracing.variables.leaves, tracing.batch_leaves)
    return Program(
        leaves=leaves, batch=batch, step=traced, evaluation=evaluation, init=init, variables=tracing.variables,
        batch_treedef=batch_treedef, _retrace=tracing.retrace, _recorded=tracing.recorded, _seeded=tracing.seeded,
        _computed_in=tracing.computed_in, compute_dtype=dtype,
        _resized=tracing.resized, _accumulates=tracing.accumulates, run_loss=tracing.run_loss,
        _computes=computes or tracing.computes, **variant,
    )  # fmt: skip


def _run_step(variables: Variables, step: Any, values: list[Any], batch: Any) -> tuple[list[Any], dict[str, Any]]:
    def run(values: list[Any], batch: Any) -> tuple[list[Any], dict[str, Any]]:
        with nnx.var_defaults(hijax=variables.is_hijax):
            model, optimizer = variables.merge(values)
            metrics = as_metrics(step(model, optimizer, batch))
            after = variables.split(model, optimizer)
        return after, injected_rate(variables.leaves, after) | metrics

    return (lowered(run) if variables.is_hijax else run)(values, batch)


def _run_loss(variables: Variables, loss: Any, values: list[Any], batch: Any) -> tuple[list[Any], dict[str, Any]]:
    model, _ = variables.merge(values)
    model.eval()
    scalar, extra = with_extra(loss(model, batch))
    return [], {"loss": scalar} | extra


def _traced(
    function: Callable[..., Any], state: list[Any], batch: Any, variables: Variables, batch_leaves: tuple[Leaf, ...]
) -> Traced:
    with plain_variables():  # Variables created in the step have the same type as those of the model
        jaxpr, (_, result) = jax.make_jaxpr(function, return_shape=True)(state, batch)
    graph = from_jaxpr(jaxpr)
    if any(isinstance(value, jax.core.Tracer) for value in graph.constants.values()):
        raise SpanaxError(
            "the train step uses an array that `build` made and NNX does not carry: one in a closure or a global.",
            fix="self.name = array in a module, or eager_build=True",
        )
    axes = discover(graph, variables.leaves, batch_leaves)
    if batch_dims := batch_sized_dims(graph, axes, function, state, batch, batch_leaves):
        axes = discover(graph, variables.leaves, batch_leaves, batch_dims)
    num_state = len(jaxpr.out_avals) - len(jax.tree.leaves(result))
    graph, structure = with_logged(graph, num_state, jax.tree.structure(result))
    return Traced(graph, axes, structure, any(remat_of(eqn) or contains(eqn, remat_of) for eqn in jaxpr.eqns))
