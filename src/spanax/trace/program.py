"""Program: a train step traced once, without allocating arrays."""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import numpy as np

from spanax.displays import display
from spanax.trace.analysis.computation import Computation
from spanax.trace.analysis.op_groups import label_key
from spanax.trace.axes.axes import Axis, table
from spanax.trace.initial_state import Initial
from spanax.trace.jaxpr.graph import Graph
from spanax.trace.pipeline.retrace import Shapes
from spanax.trace.rewrites.attention.fuse import FusedAttention
from spanax.trace.rewrites.microbatches.support import Microbatches
from spanax.trace.rewrites.remat_policies import AS_WRITTEN, known_context
from spanax.trace.traced import Traced
from spanax.trace.variables import Leaf, Variables
from spanax.units import count_text


@dataclass(frozen=True, eq=False)
class Program:
    """A train step, its state and its batch, as shapes and axes.

    `leaves` are the arrays of the state and `batch` those of the batch, both in the order of the step's arguments.
    `remat` names what the backward pass stores, or is `as written` where the model decides; `context` is `ring` where
    each attention is one operation that supports ring attention, or a platform's kernel; `attention` lists these.
    The loss computes its logits in `loss_chunks`; `run_loss` evaluates it on a state and a batch of any size.
    `compute_dtype` is None unless requested.

    Example:
      >>> import jax, optax, spanax
      >>> from flax import nnx
      >>> program = spanax.trace(
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
    init: Initial
    variables: Variables
    batch_treedef: Any
    remat: str
    microbatches: int
    context: str
    attention: tuple[FusedAttention, ...]
    loss_chunks: int
    compute_dtype: str | None
    _retrace: Callable[[str | None, int, str, int], "Program"] = field(repr=False)
    _recorded: Callable[..., "Program"] = field(repr=False)
    _seeded: Callable[[int], "Program"] = field(repr=False)
    _computed_in: Callable[[str | None, str | None, int], "Program"] = field(repr=False)
    _resized: Callable[[str | None, int, str, int, Shapes], Graph] = field(repr=False)
    _accumulates: Callable[[], Microbatches] = field(repr=False)
    _computes: Callable[[], Computation] = field(repr=False)
    run_loss: Callable[[list[Any], Any], tuple[list[Any], dict[str, Any]]] | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        count = sum(math.prod(leaf.shape) for leaf in self.leaves if leaf.kind == "param")
        axes = ", ".join(f"{axis.name} {'/'.join(map(str, axis.sizes))}" for axis in self.axes)
        return f"Program({count_text(count)} parameters, axes: {axes})"

    def _repr_html_(self) -> str | None:
        return display(self)

    @property
    def axes(self) -> list[Axis]:
        """Returns the named axes of the state and the batch, the most used first."""
        return table(self.step.axes, zip((*self.leaves, *self.batch), self.step.graph.body.inputs, strict=True))

    @cached_property
    def fingerprint(self) -> str:
        """Returns a hash of the paths, shapes and dtypes of the leaves; plans and checkpoints must match it."""
        text = repr([(leaf.path, leaf.shape, str(leaf.dtype)) for leaf in (*self.leaves, *self.batch)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def computation(self) -> Computation:
        """Returns what the step computes, equal for every variant of the program: layout, remat, microbatches, dtype.

        The first call may trace the step again.
        """
        return self._computes()

    @cached_property
    def params_by_class(self) -> dict[int, list[tuple[str, tuple[int | None, ...]]]]:
        """Returns, for every class, the weights with it as (path, classes); of weights with equal classes the first."""
        first: dict[tuple[int | None, ...], str] = {}
        for leaf, value in zip(self.leaves, self.step.graph.body.inputs, strict=False):
            if leaf.kind == "param" or value in self.step.axes.frozen:
                first.setdefault(self.step.axes.classes[value], leaf.path)
        weights: dict[int, list[tuple[str, tuple[int | None, ...]]]] = {}
        for labels, path in first.items():
            for label in {label for label in labels if label is not None}:
                weights.setdefault(label, []).append((path, labels))
        return weights

    @cached_property
    def size_by_class(self) -> dict[int, int]:
        """Returns, for every class, the number of elements of its weights in `params_by_class`."""
        sizes = {leaf.path: math.prod(leaf.shape) for leaf in self.leaves}
        return {label: sum(sizes[path] for path, _ in rows) for label, rows in self.params_by_class.items()}

    @cached_property
    def heavy(self) -> frozenset[int]:
        """Returns the classes whose weights have more elements than any value with a batch dim and this class."""
        step = self.step
        largest: dict[int | None, int] = {}
        for value, labels in enumerate(step.axes.classes):
            if step.batch_labels.intersection(labels):
                size = math.prod(step.graph.shape(value))
                largest |= {label: max(size, largest.get(label, 0)) for label in labels}
        return frozenset(label for label, size in self.size_by_class.items() if size > largest.get(label, 0))

    @cached_property
    def param_keys(self) -> frozenset[tuple[int, ...]]:
        """Returns the sorted classes of every parameter, both stacked and for one layer of a scan."""
        keys = set()
        for labels in {labels for rows in self.params_by_class.values() for _, labels in rows}:
            keys |= {label_key(labels), label_key([label for label in labels if label not in self.step.layer_labels])}
        return frozenset(keys - {()})

    @property
    def num_params(self) -> int:
        """Returns the number of elements of all parameters."""
        return sum(int(np.prod(leaf.shape)) for leaf in self.leaves if leaf.kind == "param")

    def rename(self, names: Mapping[str, str]) -> "Program":
        """Returns the program with renamed axes.

        Raises:
          SpanaxError: no axis has that name.
        """
        step = replace(self.step, axes=self.step.axes.renamed(names))
        evaluation = self.evaluation
        if evaluation is not None:
            known = set(evaluation.axes.names.values())
            shared = {old: new for old, new in names.items() if old in known}
            evaluation = replace(evaluation, axes=evaluation.axes.renamed(shared))
        leaves, batch = with_axes(step, self.leaves, self.batch)
        retrace = cache(lambda *variant: self._retrace(*variant).rename(names))
        recorded = lambda **variant: self._recorded(**variant).rename(names)  # noqa: E731
        seeded = cache(lambda seed: self._seeded(seed).rename(names))
        computed_in = cache(lambda *variant: self._computed_in(*variant).rename(names))
        named = replace(self, step=step, evaluation=evaluation, leaves=leaves, batch=batch)
        return replace(named, _retrace=retrace, _recorded=recorded, _seeded=seeded, _computed_in=computed_in)

    def with_remat(self, policy: str | None) -> "Program":
        """Returns the program with another remat policy; each policy is traced once.

        State and fingerprint are equal: a checkpoint saved under one policy can be resumed under another.

        Args:
          policy: as `remat` of `spanax.trace`.

        Raises:
          SpanaxError: the policy is unknown, no layer can be rematerialized, or the `train_step` is user-defined.

        Example:
          >>> import jax, optax, spanax
          >>> from flax import nnx
          >>> program = spanax.trace(
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
        """Returns the program with gradients accumulated over microbatches; each number is traced once.

        Raises:
          SpanaxError: they do not divide the batch, or the `train_step` is user-defined.
        """
        return self._varied(self._policy, microbatches, self.context, self.loss_chunks)

    @property
    def accumulates(self) -> Microbatches:
        """Returns whether the step supports microbatches, and if not, why."""
        return self._accumulates()

    def with_context(self, form: str) -> "Program":
        """Returns the program with fused attention (`ring`, a kernel), or as written (`gathered`); traced once.

        Raises:
          SpanaxError: the form is unknown, there is no attention, one does not support ring attention, or the
            `train_step` is user-defined.
        """
        return self._varied(self._policy, self.microbatches, known_context(form), self.loss_chunks)

    def with_loss_chunks(self, count: int) -> "Program":
        """Returns the program with logits computed in chunks of tokens, not all materialized; traced once for each.

        Raises:
          SpanaxError: the loss has no logits or cannot be chunked, the number does not divide the tokens, or the
            `train_step` is user-defined.
        """
        return self._varied(self._policy, self.microbatches, self.context, count)

    def with_compute_dtype(self, dtype: str | None) -> "Program":
        """Returns the program with its loss computed in `dtype`, as `compute_dtype` of `spanax.trace`.

        Raises:
          SpanaxError: the `train_step` is user-defined.
        """
        if dtype == self.compute_dtype:
            return self
        retraced = self._computed_in(dtype, self._policy, self.microbatches)
        return retraced.with_context(self.context).with_loss_chunks(self.loss_chunks)

    def with_gradients(self) -> "Program":
        """Returns the program with the gradients of the last step, as passed to the optimizer, in its state.

        They are leaves of the optimizer; their path is `gradients.PREFIX` followed by the parameter's path.
        """
        recorded = self._recorded(remat=self._policy, microbatches=self.microbatches)
        return recorded.with_context(self.context).with_loss_chunks(self.loss_chunks)

    def with_seed(self, seed: int) -> "Program":
        """Returns the program for another seed where `build` runs eagerly and may read values that depend on it."""
        return self if self.init.seed in (None, seed) else self._seeded(seed)._varied(*self._variant)

    def resized(self, shapes: Shapes) -> Traced:
        """Returns the step with other shapes for the state's leaves, with the same operations and axes.

        Raises:
          SpanaxError: it cannot be traced with these shapes, or its operations differ.
        """
        return replace(self.step, graph=self._resized(*self._variant, shapes))

    def _varied(self, *variant: Any) -> "Program":
        """Returns this program, or the cached or newly traced program of another variant."""
        return self if variant == self._variant else self._retrace(*variant)

    @property
    def _variant(self) -> tuple[str | None, int, str, int]:
        return self._policy, self.microbatches, self.context, self.loss_chunks

    @cached_property
    def _forgets_nothing(self) -> bool:
        if self.remat != AS_WRITTEN or self.evaluation is None:
            return False
        return not self.step.has_remat and not self.evaluation.has_remat

    @cached_property
    def _with_nothing_forgotten(self) -> "Program":
        """Returns a copy with equal operations and shared analyses."""
        return replace(self, remat="none")

    @property
    def _policy(self) -> str | None:
        return None if self.remat == AS_WRITTEN else self.remat


def with_axes(
    step: Traced, leaves: tuple[Leaf, ...], batch: tuple[Leaf, ...]
) -> tuple[tuple[Leaf, ...], tuple[Leaf, ...]]:
    """Returns leaves and batch with the names of their axes in a step."""
    values = step.graph.body.inputs
    named = [replace(leaf, axes=step.axes.of(value)) for leaf, value in zip((*leaves, *batch), values, strict=True)]
    return tuple(named[: len(leaves)]), tuple(named[len(leaves) :])
