"""A program of any function of NNX objects and arrays, traced without allocating arrays."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax

from spanax.batch_dims import ExampleDims, num_examples
from spanax.errors import PipelineError, SpanaxError, VariantError
from spanax.trace.analysis.computation import Computation
from spanax.trace.axes.axes import warn_of_unknown
from spanax.trace.axes.retrace import Shapes
from spanax.trace.definition import State, TracedVariant, traced_function
from spanax.trace.jaxpr.graph import Graph
from spanax.trace.loss.value_and_grad import loss_form
from spanax.trace.program import Program, program_of
from spanax.trace.rewrites.microbatches.support import Microbatches
from spanax.trace.rewrites.padding.padded_step import padded_step
from spanax.trace.user_function import UserFunction
from spanax.trace.user_mesh import UserMesh, outside_meshes
from spanax.trace.variables import Leaf, Owner, Variables, take_apart
from spanax.trace.variant import Variant

AS_WRITTEN = Variant()

Function = Callable[[tuple[Any, ...], list[Any]], Any]
"""A function of a tuple of NNX objects, which it may update in place, and of a list of arrays; returns a pytree."""


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
      variant: the form of the losses that the function differentiates by `spanax.value_and_grad`.
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


@dataclass(frozen=True, eq=False)
class FunctionDefinition:
    """What `trace_function` traces.

    Attributes:
      user: the function.
      values: the structure of the objects.
      batch: shapes and dtypes of the arrays.
      batch_leaves: the same as leaves.
      batch_axes: the dim with the examples of each array, if the user says it.
    """

    user: UserFunction
    values: State
    batch: list[jax.ShapeDtypeStruct]
    batch_leaves: tuple[Leaf, ...]
    batch_axes: ExampleDims | None = None
    _memo: dict[Variant, TracedVariant] = field(default_factory=dict, repr=False)
    _num_losses: list[int] = field(default_factory=list, repr=False)

    @property
    def batch_treedef(self) -> Any:
        """Returns the structure of the arrays, a list."""
        return jax.tree.structure(self.batch)

    def state(self, variant: Variant) -> State:
        """Returns the structure of the objects."""
        return self.values

    def traced(self, variant: Variant) -> TracedVariant:
        """Returns the traced function.

        Raises:
          SpanaxError: it cannot be traced, or the variant requires a loss and the function has none.
        """
        if variant not in self._memo and variant.padded:
            plain = self.traced(replace(variant, padded=()))
            step = padded_step(plain.step, self.values.variables.leaves, self.batch_leaves, variant.padded)
            self._memo[variant] = plain._replace(step=step)
        elif variant not in self._memo:
            run = partial(_run, self.values.variables, self.user.function)
            with loss_form(variant) as form:
                step = outside_meshes(traced_function)(
                    self.values, run, self.batch, self.batch_leaves, self.user, self.batch_axes
                )
            if replace(variant, seed=0) != AS_WRITTEN and not form.num_losses:
                raise VariantError(
                    "remat, microbatches, attention and loss chunks apply to a loss, and the function has none.",
                    fix="spanax.value_and_grad(loss) instead of nnx.value_and_grad(loss) in the function",
                )
            warn_of_unknown(step.axes)
            self._memo[variant] = TracedVariant(step, None, tuple(dict.fromkeys(form.attentions)))
            self._num_losses.append(form.num_losses)
        return self._memo[variant]

    @property
    def rewrites_loss(self) -> bool:
        """Whether the function computes a loss by `spanax.value_and_grad`."""
        return any(self._num_losses)

    def microbatches(self, variant: Variant) -> Microbatches:
        """Returns whether the losses of the function support microbatches."""
        size = num_examples([leaf.shape for leaf in self.batch_leaves], self.traced(AS_WRITTEN).step.axes.examples)
        count = next((count for count in range(2, size + 1) if size % count == 0), None)
        if not self.rewrites_loss or count is None:
            return Microbatches(
                error=VariantError(
                    "the function does not run in microbatches.", fix="spanax.value_and_grad(loss) in it"
                )
            )
        try:
            self.traced(replace(variant, microbatches=count))
        except SpanaxError as error:
            return Microbatches(error=error)
        return Microbatches()

    def computation(self) -> Computation:
        """Returns the fingerprint of the function."""
        return Computation.of(self.traced(AS_WRITTEN).step, self.values.variables.leaves)

    def run_loss(self, variant: Variant) -> None:
        """Returns None: a function has no evaluation mode."""

    def run_evaluate(self, variant: Variant) -> None:
        """Returns None: a function has no evaluation mode."""

    def resized(self, variant: Variant, shapes: Shapes) -> Graph:
        """Raises: only a pipeline traces a step with other shapes, and it requires a loss."""
        raise PipelineError("a pipeline requires a loss.", fix="spanax.trace(loss=...), or a mesh without 'pipe'")


def _run(variables: Variables, function: Function, values: list[Any], arrays: list[Any]) -> tuple[list[Any], Any]:
    nodes = variables.merge(values)
    result = function(nodes, arrays)
    return variables.split(*nodes, by="the function"), result


def _short(names: Sequence[str]) -> list[str]:
    """Returns the names of arrays without the name of the argument, if they are the items of one dict."""
    heads, tails = ({part[index] for part in (name.partition(".") for name in names)} for index in (0, 2))
    if len(heads) != 1 or any(not tail or tail[0].isdecimal() for tail in tails):
        return list(names)
    return [name.partition(".")[2] for name in names]
