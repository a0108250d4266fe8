"""Program: a train step traced once, without allocating arrays."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Any

import jax

from spanax.adapters.lora import packed_paths
from spanax.adapters.packed import PARTS, Packed
from spanax.batch_dims import num_examples
from spanax.displays import display
from spanax.errors import ObjectsError
from spanax.trace.analysis.computation import Computation
from spanax.trace.analysis.labels import Key, Labels, label_key
from spanax.trace.analysis.step_analysis import StepAnalysis
from spanax.trace.axes.axes import Axis, table
from spanax.trace.axes.retrace import Shapes
from spanax.trace.definition import ProgramDefinition, Results
from spanax.trace.initial_state import Initial
from spanax.trace.jaxpr.graph import PRODUCT, QUANTIZED
from spanax.trace.jaxpr.remat_policies import AS_WRITTEN
from spanax.trace.rewrites.attention.fuse import FusedAttention
from spanax.trace.rewrites.microbatches.accumulation import Microbatches
from spanax.trace.variables import Leaf, Variables
from spanax.trace.variant import Variant
from spanax.units import count_text


@dataclass(frozen=True, eq=False)
class Program:
    """A train step, its state and its batch, as shapes and axes.

    Attributes:
      leaves: the arrays of the state, in the order of the step's arguments.
      batch: the arrays of the batch, in the order of the step's arguments.
      step: the traced train step.
      attention: the fused attentions; empty if attention is computed as written in the model.
      options: with which the step was traced.
      definition: the arguments from which variants are traced.
      renames: the renamings of axes, in order.

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
    step: StepAnalysis
    attention: tuple[FusedAttention, ...]
    options: Variant
    definition: ProgramDefinition = field(repr=False)
    renames: tuple[Mapping[str, str], ...] = ()
    _variants: dict[Variant, "Program"] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        axes = ", ".join(f"{axis.name} {'/'.join(map(str, axis.sizes))}" for axis in self.axes)
        return f"Program({count_text(self.num_params)} parameters, axes: {axes})"

    def _repr_html_(self) -> str:
        return display(self)

    @property
    def remat(self) -> str:
        """Returns the remat policy, or `as written` if it is that of the model."""
        return AS_WRITTEN if self.options.remat is None else self.options.remat

    @property
    def microbatches(self) -> int:
        """Returns the number of microbatches over which gradients are accumulated."""
        return self.options.microbatches

    @property
    def context(self) -> str:
        """Returns how attention is computed: `ring`, a platform's kernel, or `gathered`."""
        return self.options.context

    @property
    def loss_chunks(self) -> int:
        """Returns the number of chunks in which the loss computes its logits."""
        return self.options.loss_chunks

    @property
    def compute_dtype(self) -> str | None:
        """Returns the dtype in which the loss is computed; None unless requested."""
        return self.options.compute_dtype

    @property
    def quantized(self) -> tuple[str, ...]:
        """Returns the paths of the weights whose matmuls are quantized, in the order of the step."""
        marks = self.step.graph.marks
        kinds = (QUANTIZED, PRODUCT)
        return tuple(mark.removeprefix(kind) for mark in marks for kind in kinds if mark.startswith(kind))

    @property
    def unpadded(self) -> "Program":
        """Returns the program without padded axes."""
        return self.variant(padded=())

    @property
    def variables(self) -> Variables:
        """Returns the structure of model and optimizer."""
        return self.definition.state(self.options).variables

    @property
    def init(self) -> Initial:
        """Returns the function that computes the initial state.

        Raises:
          SpanaxError: the program is a function of objects, whose state exists already.
        """
        init = self.definition.state(self.options).init
        if init is None:
            raise ObjectsError("the program is a function of objects that have their state.", fix="spanax.init")
        return init

    @property
    def has_evaluation(self) -> bool:
        """Whether the program was traced from a `loss`, so that `evaluation` is not None."""
        return self.definition.has_evaluation

    @cached_property
    def evaluation(self) -> StepAnalysis | None:
        """Returns the loss of the model in evaluation mode, traced on first access; None without a `loss`.

        Raises:
          SpanaxError: it cannot be traced.
        """
        traced = self.definition.evaluation(self.options)
        if traced is None:
            return None
        result = StepAnalysis(traced)
        for names in self.renames:
            known = set(result.axes.names.values())
            result = result.rename({old: new for old, new in names.items() if old in known})
        return result

    @property
    def rewrites_loss(self) -> bool:
        """Whether the program supports remat, microbatches, loss chunks and attention kernels."""
        return self.definition.rewrites_loss

    @property
    def batch_treedef(self) -> Any:
        """Returns the structure of the batch."""
        return self.definition.batch_treedef

    @property
    def run_loss(self) -> Callable[[list[Any], Any], Results] | None:
        """Returns the loss as a function of state and batch of any size; None for a user-defined `train_step`."""
        return self.definition.run_loss(self.options)

    @property
    def batch_size(self) -> int:
        """Returns the number of examples of the batch; 1 if the step takes none."""
        return num_examples([leaf.shape for leaf in self.batch], self.step.axes.examples)

    @property
    def run_evaluate(self) -> Callable[[list[Any], Any], Results] | None:
        """Returns the user's `evaluate` as a function of state and batch of any size; None if there is none."""
        return self.definition.run_evaluate(self.options)

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
        return self.definition.computation()

    @cached_property
    def params_by_class(self) -> dict[int, list[tuple[str, Labels]]]:
        """Returns, for every class, the weights with it as (path, classes); of weights with equal classes the first."""
        first: dict[Labels, str] = {}
        for leaf, value in zip(self.leaves, self.step.graph.body.inputs, strict=False):
            if leaf.kind == "param" or value in self.step.axes.other_weights:
                first.setdefault(self.step.axes.classes[value], leaf.path)
        weights: dict[int, list[tuple[str, Labels]]] = {}
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
    def param_keys(self) -> frozenset[Key]:
        """Returns the sorted classes of every parameter, both stacked and for one layer of a scan."""
        keys = set()
        for labels in {labels for rows in self.params_by_class.values() for _, labels in rows}:
            keys |= {label_key(labels), label_key([label for label in labels if label not in self.step.layer_labels])}
        return frozenset(keys - {()})

    @cached_property
    def frozen(self) -> frozenset[str]:
        """Returns the paths of the parameters that the step returns as they are, if it updates any other."""
        body = self.step.graph.body
        triples = zip(self.leaves, body.inputs, body.outputs, strict=False)
        params = {leaf.path: before == after for leaf, before, after in triples if leaf.kind == "param"}
        return frozenset(path for path, is_same in params.items() if is_same and not all(params.values()))

    @property
    def num_trained(self) -> int:
        """Returns the number of elements of the parameters that are not `frozen`."""
        leaves = (leaf for leaf in self.leaves if leaf.kind == "param" and leaf.path not in self.frozen)
        return sum(math.prod(leaf.shape) for leaf in leaves)

    @cached_property
    def abstract_model(self) -> Any:
        """Returns the model, or the first object, with shapes as the values of its Variables."""
        return self.variables.merge(self.variables.abstract())[0]

    @property
    def num_params(self) -> int:
        """Returns the number of elements of all parameters, of packed ones as they are unpacked."""
        sizes = {leaf.path: math.prod(leaf.shape) for leaf in self.leaves if leaf.kind == "param"}
        total = sum(sizes.values())
        if not any(path.endswith(f".{PARTS[0]}") for path in sizes):
            return total
        stored = sum(math.prod(packed.shape) - _num_stored(packed) for _, packed in packed_paths(self.abstract_model))
        return total + stored

    def rename(self, names: Mapping[str, str]) -> "Program":
        """Returns the program with renamed axes.

        Raises:
          SpanaxError: no axis has that name.
        """
        step = self.step.rename(names)
        leaves, batch = with_axes(step, self.leaves, self.batch)
        program = replace(self, leaves=leaves, batch=batch, step=step, _variants={})
        program = replace(program, renames=(*self.renames, names))
        program._variants[self.options] = program
        return program

    def with_batch(self, size: int) -> "Program":
        """Returns the program traced again with another number of examples.

        Raises:
          SpanaxError: it cannot be traced with that many.
        """
        shapes = [list(leaf.shape) for leaf in self.definition.batch_leaves]
        for shape, dim in zip(shapes, self.step.axes.examples, strict=True):
            if dim is not None:
                shape[dim] = size
        leaves = [
            replace(leaf, shape=tuple(shape)) for leaf, shape in zip(self.definition.batch_leaves, shapes, strict=True)
        ]
        batch = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        batch = jax.tree.unflatten(self.batch_treedef, batch)
        definition = replace(self.definition, batch=batch, batch_leaves=tuple(leaves), _memo={})
        return reduce(Program.rename, self.renames, program_of(definition, self.options))

    def variant(self, options: Variant | None = None, **changes: Any) -> "Program":
        """Returns the program under other options; each variant is traced once.

        State and fingerprint are equal: a checkpoint saved by one variant can be resumed by another.

        Args:
          options: those of the step; by default of this program.
          changes: fields of `Variant` that replace those of `options`.

        Raises:
          SpanaxError: the program does not support it: an unknown policy or context, a rewrite that does not apply to
            the loss, or a user-defined `train_step`.

        Example:
          >>> import jax, optax, spanax
          >>> from flax import nnx
          >>> program = spanax.trace(
          ...     build=lambda rngs: nnx.Linear(4, 2, rngs=rngs),
          ...     optimizer=optax.sgd(0.1),
          ...     batch=jax.ShapeDtypeStruct((8, 4), "float32"),
          ...     loss=lambda model, x: (model(x) ** 2).mean(),
          ... )
          >>> program.remat, program.variant(remat="dots", microbatches=2).remat
          ('as written', 'dots')
        """
        variant = replace(options or self.options, **changes)
        init = self.definition.state(self.options).init
        if init is None or init.seed is None:  # the seed is an argument of the traced `build`
            variant = replace(variant, seed=self.options.seed)
        if variant == self.options:
            return self
        if variant.remat == "none" and self._has_no_remat:
            written = self.variant(variant, remat=None)
            if written._has_no_remat:
                return written._without_remat
        if variant not in self._variants:
            program = reduce(Program.rename, self.renames, program_of(self.definition, variant))
            self._variants[variant] = replace(program, _variants=self._variants)
        return self._variants[variant]

    def attentions(self, variant: Variant) -> tuple[FusedAttention, ...]:
        """Returns the fused attentions of a variant of the program.

        Raises:
          SpanaxError: the program does not support it.
        """
        return self.definition.attentions(variant)

    @property
    def accumulates(self) -> Microbatches:
        """Returns whether the step supports microbatches, and if not, why."""
        return self.definition.microbatches(self.options)

    def resized(self, shapes: Shapes) -> StepAnalysis:
        """Returns the step with other shapes for the state's leaves, with the same operations and axes.

        Raises:
          SpanaxError: it cannot be traced with these shapes, or its operations differ.
        """
        return StepAnalysis(replace(self.step.traced, graph=self.definition.resized(self.options, shapes)))

    @property
    def _has_no_remat(self) -> bool:
        return self.options.remat is None and self.has_evaluation and not self.step.traced.has_remat

    @cached_property
    def _without_remat(self) -> "Program":
        """Returns a copy with equal operations and shared analyses."""
        return replace(self, options=replace(self.options, remat="none"))


def _num_stored(packed: Packed) -> int:
    """Returns the number of elements in which a packed parameter is stored."""
    return math.prod(packed.codes.shape) + math.prod(packed.scale.shape)


def program_of(definition: ProgramDefinition, variant: Variant) -> Program:
    """Returns a variant of the program that a definition defines.

    Raises:
      SpanaxError: it cannot be traced.
    """
    traced = definition.traced(variant)
    step = StepAnalysis(traced.step)
    leaves, batch = with_axes(step, definition.state(variant).variables.leaves, definition.batch_leaves)
    program = Program(leaves, batch, step, traced.attention, variant, definition)
    program._variants[variant] = program
    return program


def with_axes(
    step: StepAnalysis, leaves: Sequence[Leaf], batch: Sequence[Leaf]
) -> tuple[tuple[Leaf, ...], tuple[Leaf, ...]]:
    """Returns leaves and batch with the names of their axes in a step."""
    values = step.graph.body.inputs
    named = [replace(leaf, axes=step.axes.of(value)) for leaf, value in zip((*leaves, *batch), values, strict=True)]
    return tuple(named[: len(leaves)]), tuple(named[len(leaves) :])
