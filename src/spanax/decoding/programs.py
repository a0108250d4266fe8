"""Prefill and decode step of a workload as programs, which are planned and priced like a train step."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spanax.decoding.decoder import called
from spanax.decoding.derive.candidates import candidates
from spanax.decoding.derive.forward import forward_of, resized
from spanax.decoding.derive.sequences import Incremental, Recomputation, prefilled
from spanax.errors import DecodeError
from spanax.plan.advice.generation import GenerationPrograms
from spanax.trace.initial_state import Eager
from spanax.trace.program import Program
from spanax.trace.tracing import trace_function
from spanax.trace.variables import Owner, model_of, take_apart
from spanax.trace.workload import Workload

CACHES = "caches"
"""What the paths of the caches begin with."""


class Caches(nnx.Module):
    """The caches of sequences as state, which a step replaces."""

    def __init__(self, arrays: dict[int, Any]):
        self.values = nnx.Dict({f"value{value}": nnx.Variable(array) for value, array in arrays.items()})

    def arrays(self) -> dict[int, Any]:
        """Returns the arrays by value of the forward pass."""
        return {int(name.removeprefix("value")): variable.get_raw_value() for name, variable in self.values.items()}

    def update(self, arrays: dict[int, Any]) -> None:
        """Replaces the arrays."""
        for value, array in arrays.items():
            self.values[f"value{value}"].set_raw_value(array)


def generation_programs(workload: Workload, dtype: str | None = None, num_devices: int = 1) -> GenerationPrograms:
    """Returns the programs that generate with the model of a workload, for sequences like those of its batch.

    No array is allocated, and the derivation is not compared with the forward pass.

    Args:
      workload: a language model, called with tokens alone.
      dtype: that of the parameters; as in the model by default.
      num_devices: the most devices of a cluster. Twice as many sequences are traced, or more: with one sequence on a
        device, no dim is known to be that of the sequences.

    Raises:
      SpanaxError: the model does not map tokens to logits, or has no incremental form.
    """
    tokens = tokens_of(workload.batch)
    if tokens is None:
        raise DecodeError("the batch of this workload has no tokens [batch, tokens].", fix="a language model")
    count, length = tokens
    rows = count * math.ceil(2 * num_devices / count)
    model = _abstract(workload, dtype)
    forward = forward_of(called, model, [jax.ShapeDtypeStruct((1, length), "int32")], ["tokens"], [True])
    derived, *_ = candidates(forward, partial(resized, forward, called, model))
    prefill, step = programs_of(model, derived, rows)
    caches = [leaf.num_bytes for leaf in step.leaves[len(forward.parameters) :]]
    return GenerationPrograms(prefill, step, count, length, sum(caches) // rows)


def programs_of(model: nnx.Module, derived: Incremental | Recomputation, num_sequences: int) -> tuple[Program, Program]:
    """Returns prefill and decode step of several sequences as programs; their state are the model and the caches.

    The prefill takes the inputs and the numbers of tokens, the step its inputs for a token and the positions.
    """
    forward = derived.forward
    paths = dict(zip(forward.arrays, (leaf.path for leaf in forward.program.batch), strict=True))
    avals = forward.graph.avals
    positions = jax.ShapeDtypeStruct((num_sequences,), "int32")

    def shapes(values: Sequence[int], rest: int) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct((num_sequences, *avals[each].shape[rest:]), avals[each].dtype) for each in values]

    parameters = [jax.ShapeDtypeStruct(avals[each].shape, avals[each].dtype) for each in forward.parameters]
    caches = jax.eval_shape(derived.fill, parameters, shapes(forward.arrays, 1), positions)
    owners = [Owner(model), Owner(Caches(caches), CACHES, name=CACHES)]

    def prefill(nodes: Sequence[Any], values: Sequence[Any]) -> Any:
        model, caches = nodes
        *arrays, lengths = values
        logits, filled = prefilled(derived, arrays_of(model), arrays, lengths)
        caches.update(filled)
        return logits

    def step(nodes: Sequence[Any], values: Sequence[Any]) -> Any:
        model, caches = nodes
        *rows, positions = values
        logits, after = derived.step(arrays_of(model), caches.arrays(), rows, positions)
        caches.update(after)
        return logits

    def traced(function: Callable[..., Any], inputs: Sequence[int], rest: int) -> Program:
        arrays = [*shapes(inputs, rest), positions]
        names = [*(paths[value] for value in inputs), f"{CACHES}.positions"]
        return trace_function(function, owners, arrays, names, batch_axes=(0,) * len(arrays))

    return traced(prefill, forward.arrays, 1), traced(step, forward.token_arrays, 2)


def arrays_of(model: nnx.Module) -> list[Any]:
    """Returns the arrays of a model in the order in which NNX flattens it."""
    return take_apart([Owner(model)])[1]


def tokens_of(batch: Any) -> tuple[int, int] | None:
    """Returns the number of sequences and of tokens of a batch; None if it has no tokens."""
    leaves = jax.tree.leaves(batch)
    shapes = (leaf.shape for leaf in leaves if len(leaf.shape) == 2 and np.issubdtype(leaf.dtype, np.integer))
    return next(shapes, None)


def _abstract(workload: Workload, dtype: str | None) -> nnx.Module:
    """Returns the model with shapes in place of arrays."""
    build = workload.build
    model = Eager(build).model() if workload.eager_build else nnx.eval_shape(partial(model_of, build, 0))
    for _, variable in nnx.iter_graph(model) if dtype is not None else ():
        if isinstance(variable, nnx.Variable) and jnp.issubdtype(variable.get_raw_value().dtype, jnp.floating):
            variable.set_raw_value(jax.ShapeDtypeStruct(variable.get_raw_value().shape, dtype))
    assert isinstance(model, nnx.Module)
    return model
