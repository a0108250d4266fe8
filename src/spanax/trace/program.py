"""Program: a train step traced once, without allocating anything."""

import hashlib
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.extend import core

from spanax.displays import display
from spanax.trace.attended import attended
from spanax.trace.axes import Axes, Axis, aligned, discover, table
from spanax.trace.batch import abstract_batch
from spanax.trace.census import label_key
from spanax.trace.chunked import chunked
from spanax.trace.gradients import recording
from spanax.trace.graph import REMAT, Graph, from_jaxpr
from spanax.trace.grown import grown
from spanax.trace.policies import AS_WRITTEN, GATHERED, known_context
from spanax.trace.resized import Shapes, resized_graph
from spanax.trace.step import as_metrics, chosen_step, with_extra
from spanax.trace.traced import Traced
from spanax.trace.variables import Leaf, Variables, make, take_apart
from spanax.units import count_text


@dataclass(frozen=True, eq=False)
class Program:
    """A train step, its state and its batch, as shapes and axes.

    `leaves` are the state's arrays, `batch` the batch's; both are in the order in which the step takes them.
    `remat` names what the backward pass keeps, `as written` where the model decides itself; `context` is `ring` where
    each attention is one operation that can go around a ring, or a platform's kernel; `attention` says what it took.
    The loss takes its logits in `loss_chunks`.

    Example:
      >>> import optax
      >>> program = trace(
      ...     build=lambda rngs: nnx.Embed(64, 16, rngs=rngs),
      ...     optimizer=optax.sgd(0.1),
      ...     batch=jax.ShapeDtypeStruct((8, 4), "int32"),
      ...     loss=lambda model, tokens: (model(tokens) ** 2).mean(),
      ... )
      >>> [(axis.name, axis.sizes) for axis in program.axes]
      [('batch', (8,)), ('embed', (16,)), ('seq', (4,)), ('vocab', (64,))]
      >>> program
      Program(1.02 k parameters, axes: batch 8, embed 16, seq 4, vocab 64)
    """

    leaves: tuple[Leaf, ...]
    batch: tuple[Leaf, ...]
    step: Traced
    evaluation: Traced | None
    init: core.ClosedJaxpr
    variables: Variables
    batch_treedef: Any
    remat: str
    microbatches: int
    context: str
    attention: tuple[str, ...]
    loss_chunks: int
    _retrace: Callable[[str | None, int, str, int], "Program"] = field(repr=False)
    _recorded: Callable[..., "Program"] = field(repr=False)
    _resized: Callable[[str | None, int, str, int, Shapes], Graph] = field(repr=False)

    def __repr__(self) -> str:
        count = sum(math.prod(leaf.shape) for leaf in self.leaves if leaf.kind == "param")
        axes = ", ".join(f"{axis.name} {'/'.join(map(str, axis.sizes))}" for axis in self.axes)
        return f"Program({count_text(count)} parameters, axes: {axes})"

    def _repr_html_(self) -> str | None:
        return display(self)

    @property
    def axes(self) -> list[Axis]:
        """The named axes of the state and the batch, the most used first."""
        return table(self.step.axes, zip((*self.leaves, *self.batch), self.step.graph.body.inputs, strict=True))

    @cached_property
    def fingerprint(self) -> str:
        """What ties a plan or a checkpoint to this program: its leaves' paths, shapes and dtypes."""
        text = repr([(leaf.path, leaf.shape, str(leaf.dtype)) for leaf in (*self.leaves, *self.batch)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def params_by_class(self) -> dict[int, list[tuple[str, tuple[int | None, ...]]]]:
        """For every class the weights that have it: path and classes, the first of those of the same classes."""
        first: dict[tuple[int | None, ...], str] = {}
        for leaf, value in zip(self.leaves, self.step.graph.body.inputs, strict=False):
            if leaf.kind == "param" or value in self.step.axes.frozen:
                first.setdefault(self.step.axes.classes[value], leaf.path)
        found: dict[int, list[tuple[str, tuple[int | None, ...]]]] = {}
        for labels, path in first.items():
            for label in {label for label in labels if label is not None}:
                found.setdefault(label, []).append((path, labels))
        return found

    @cached_property
    def size_by_class(self) -> dict[int, int]:
        """For every class how many numbers the weights of `params_by_class` hold."""
        sizes = {leaf.path: math.prod(leaf.shape) for leaf in self.leaves}
        return {label: sum(sizes[path] for path, _ in rows) for label, rows in self.params_by_class.items()}

    @cached_property
    def heavy(self) -> frozenset[int]:
        """The classes whose weights are more numbers than any one value of the batch that has them."""
        step = self.step
        of_batch: dict[int | None, int] = {}
        for value, labels in enumerate(step.axes.classes):
            if step.batch_labels.intersection(labels):
                size = math.prod(step.graph.shape(value))
                of_batch |= {label: max(size, of_batch.get(label, 0)) for label in labels}
        return frozenset(label for label, size in self.size_by_class.items() if size > of_batch.get(label, 0))

    @cached_property
    def param_keys(self) -> frozenset[tuple[int, ...]]:
        """The classes of every parameter, whole and as one layer of a scan sees it."""
        found = set()
        for labels in {labels for rows in self.params_by_class.values() for _, labels in rows}:
            found |= {label_key(labels), label_key([one for one in labels if one not in self.step.layer_labels])}
        return frozenset(found - {()})

    @property
    def num_params(self) -> int:
        """How many numbers the parameters hold."""
        return sum(int(np.prod(leaf.shape)) for leaf in self.leaves if leaf.kind == "param")

    def rename(self, names: Mapping[str, str]) -> "Program":
        """The same program with axes under other names.

        Raises:
          SpanaxError: there is no axis of that name.
        """
        step = replace(self.step, axes=self.step.axes.renamed(names))
        evaluation = self.evaluation
        if evaluation is not None:
            known = set(evaluation.axes.names.values())
            shared = {old: new for old, new in names.items() if old in known}
            evaluation = replace(evaluation, axes=evaluation.axes.renamed(shared))
        leaves, batch = _with_axes(step, self.leaves, self.batch)
        retrace = cache(lambda *asked: self._retrace(*asked).rename(names))
        recorded = lambda **asked: self._recorded(**asked).rename(names)  # noqa: E731
        named = replace(self, step=step, evaluation=evaluation, leaves=leaves, batch=batch)
        return replace(named, _retrace=retrace, _recorded=recorded)

    def with_remat(self, policy: str | None) -> "Program":
        """The same program with another policy of what the backward pass keeps; traced once for each.

        State and fingerprint are the same: what was saved under one policy goes on under another.

        Args:
          policy: as `remat` of `spanax.trace`.

        Raises:
          SpanaxError: there is no such policy, no layer to forget, or the program has a train step of its own.

        Example:
          >>> import optax
          >>> program = trace(
          ...     build=lambda rngs: nnx.Linear(4, 2, rngs=rngs),
          ...     optimizer=optax.sgd(0.1),
          ...     batch=jax.ShapeDtypeStruct((8, 4), "float32"),
          ...     loss=lambda model, x: (model(x) ** 2).mean(),
          ... )
          >>> program.remat, program.with_remat("dots").remat, program.with_remat("dots").with_remat(None) is program
          ('as written', 'dots', True)
        """
        if policy == "none" and self._forgets_nothing:
            return self._with_nothing_forgotten
        return self._varied(policy, self.microbatches, self.context, self.loss_chunks)

    def with_microbatches(self, microbatches: int) -> "Program":
        """The same program with gradients added up over so many parts of the batch; traced once for each number.

        Raises:
          SpanaxError: they do not divide the batch, or the program has a train step of its own.
        """
        return self._varied(self._policy, microbatches, self.context, self.loss_chunks)

    def with_context(self, form: str) -> "Program":
        """The same program with attentions as operations (`ring`, a kernel), or as written (`gathered`); traced once.

        Raises:
          SpanaxError: there is no such form, no attention, one that cannot go around a ring, or the program has a train
            step of its own.
        """
        return self._varied(self._policy, self.microbatches, known_context(form), self.loss_chunks)

    def with_loss_chunks(self, count: int) -> "Program":
        """The same program with its logits in so many chunks of tokens, never there as a whole; traced once for each.

        Raises:
          SpanaxError: the loss has no logits, some that cannot be taken so, tokens that the number does not divide, or
            the program has a train step of its own.
        """
        return self._varied(self._policy, self.microbatches, self.context, count)

    def with_gradients(self) -> "Program":
        """The same program with more state: the gradients that its optimizer was given in the last step.

        They are leaves of the optimizer; `gradients.PREFIX` and the parameter's path make up theirs.
        """
        recorded = self._recorded(remat=self._policy, microbatches=self.microbatches)
        return recorded.with_context(self.context).with_loss_chunks(self.loss_chunks)

    def resized(self, shapes: Shapes) -> Traced:
        """The step as it is where the state's leaves have other shapes: operation for operation the same, its axes too.

        Raises:
          SpanaxError: it cannot be traced so, or is another step then.
        """
        return replace(self.step, graph=self._resized(*self._variant, shapes))

    def _varied(self, *variant: Any) -> "Program":
        """This program, or the one that was or is now traced for another variant."""
        return self if variant == self._variant else self._retrace(*variant)

    @property
    def _variant(self) -> tuple[str | None, int, str, int]:
        return self._policy, self.microbatches, self.context, self.loss_chunks

    @cached_property
    def _forgets_nothing(self) -> bool:
        is_written = self.remat == AS_WRITTEN and self.evaluation is not None
        return is_written and not any(op.name in REMAT for op in self.step.graph.ops())

    @cached_property
    def _with_nothing_forgotten(self) -> "Program":
        """Operation for operation what it is already, and what is known of it is found once."""
        return replace(self, remat="none")

    @property
    def _policy(self) -> str | None:
        return None if self.remat == AS_WRITTEN else self.remat


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
) -> Program:
    """Trace a train step into a Program. Nothing is allocated, and no device is needed.

    Args:
      build: returns an `nnx.Module`; takes nothing, or an `nnx.Rngs`.
      optimizer: an optax transformation, or a function from the model to an `nnx.Optimizer`.
      batch: a pytree of arrays or `jax.ShapeDtypeStruct`s, examples along dim 0 of each.
      loss: `loss(model, batch) -> scalar` or `(scalar, dict of metrics)`; Spanax writes the step around it.
      train_step: your own `train_step(model, optimizer, batch) -> dict of metrics`, instead of a loss.
      microbatches: gradients are accumulated over this many parts of the batch (with `loss`).
      compute_dtype: what the loss sees of floating parameters and batch (with `loss`); parameters keep theirs.
      clip_norm: largest global gradient norm (with `loss`).
      remat: what the backward pass keeps (with `loss`), the rest being computed once more: `none` forgets nothing,
        whatever the model says; `dots` keeps the results of matmuls without batch dims and of convolutions; `full`
        only what enters a layer (one turn of a scan, or what the model has under a remat); `offload` is `dots` in
        host memory. None: as the model has it.

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
    chosen = partial(chosen_step, loss, train_step, compute_dtype, clip_norm)
    chosen(remat, microbatches, GATHERED, 1)  # a wrong request is told before anything is traced
    batch, batch_leaves, batch_treedef = abstract_batch(batch)
    variables, init = _initial(build, optimizer)
    state = variables.abstract()

    given = {"loss": loss, "train_step": train_step, "compute_dtype": compute_dtype, "clip_norm": clip_norm}
    recorded = partial(trace, build=build, optimizer=recording(optimizer), batch=batch, **given)
    run_loss = partial(_run_loss, variables, loss)
    evaluate = lambda context: run_loss if context == GATHERED else attended(run_loss, context)  # noqa: E731

    @cache
    def trace_evaluation(context: str, loss_chunks: int) -> Traced:
        return _traced(chunked(evaluate(context), loss_chunks), state, batch, variables, batch_leaves)

    @cache
    def retrace(policy: str | None, microbatches: int, context: str, loss_chunks: int) -> Program:
        told: list[str] = []
        step = partial(_run_step, variables, chosen(policy, microbatches, context, loss_chunks, told))
        traced = _traced(step, state, batch, variables, batch_leaves)
        _say_unknown(traced.axes)
        evaluation = None if loss is None else trace_evaluation(context, loss_chunks)
        if evaluation is not None:
            axes = aligned(evaluation.axes, evaluation.graph.body.inputs, traced.axes, traced.graph.body.inputs)
            evaluation = replace(evaluation, axes=axes)
        named = _with_axes(traced, variables.leaves, batch_leaves)
        name = AS_WRITTEN if policy is None else policy
        return Program(
            *named, traced, evaluation, init, variables, batch_treedef, name, microbatches, context,
            tuple(dict.fromkeys(told)), loss_chunks, retrace, recorded, resized,
        )  # fmt: skip

    @cache
    def resized(policy: str | None, microbatches: int, context: str, loss_chunks: int, shapes: Shapes) -> Graph:
        other, asked = variables.of_shapes(shapes), (policy, microbatches, context, loss_chunks)
        return resized_graph(
            retrace(*asked).step.graph, partial(_run_step, other, chosen(*asked)), other.abstract(), batch
        )

    return retrace(remat, microbatches, GATHERED, 1)


def _run_step(variables: Variables, step: Any, values: list[Any], batch: Any) -> tuple[list[Any], dict[str, Any]]:
    model, optimizer = variables.merge(values)
    metrics = as_metrics(step(model, optimizer, batch))
    return variables.split(model, optimizer), metrics


def _run_loss(variables: Variables, loss: Any, values: list[Any], batch: Any) -> tuple[list[Any], dict[str, Any]]:
    model, _ = variables.merge(values)
    model.eval()
    scalar, extra = with_extra(loss(model, batch))
    return [], {"loss": scalar} | extra


def _initial(build: Callable[..., nnx.Module], optimizer: Any) -> tuple[Variables, core.ClosedJaxpr]:
    """What the state consists of, and the function from a seed to its values."""
    # make_jaxpr keeps only arrays; how they fit together comes out on the side, once.
    taken: list[Variables] = []

    def init(seed: Any) -> list[Any]:
        variables, values = take_apart(*make(build, optimizer, seed))
        taken.append(variables)
        return values

    jaxpr = jax.make_jaxpr(init)(jax.ShapeDtypeStruct((), "uint32"))
    return taken[0], jaxpr


def _traced(
    function: Callable[..., Any], state: list[Any], batch: Any, variables: Variables, batch_leaves: tuple[Leaf, ...]
) -> Traced:
    with nnx.use_eager_sharding(False):  # variables that the step makes are like those that the model was built with
        jaxpr, (_, result) = jax.make_jaxpr(function, return_shape=True)(state, batch)
    graph = from_jaxpr(jaxpr)
    axes = discover(graph, variables.leaves, batch_leaves)
    if more := grown(graph, axes, function, state, batch, batch_leaves):
        axes = discover(graph, variables.leaves, batch_leaves, more)
    return Traced(graph, axes, jax.tree.structure(result))


def _say_unknown(axes: Axes) -> None:
    if axes.unknown:
        listed = ", ".join(f"'{name}' ({count} times)" for name, count in sorted(axes.unknown.items()))
        warnings.warn(
            f"no rule for the primitives {listed}: their dims stay unsplit, which is right and may be slow; "
            "give them one with spanax.rule",
            stacklevel=4,
        )


def _with_axes(
    step: Traced, leaves: tuple[Leaf, ...], batch: tuple[Leaf, ...]
) -> tuple[tuple[Leaf, ...], tuple[Leaf, ...]]:
    values = step.graph.body.inputs
    named = [replace(leaf, axes=step.axes.of(value)) for leaf, value in zip((*leaves, *batch), values, strict=True)]
    return tuple(named[: len(leaves)]), tuple(named[len(leaves) :])
