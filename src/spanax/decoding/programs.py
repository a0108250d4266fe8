"""Prefill and decode step of a workload as programs, which are planned and priced like a train step."""

import math
from collections.abc import Sequence
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
from spanax.trace.tracing import trace_function
from spanax.trace.variables import Owner, model_of, take_apart
from spanax.trace.workload import Workload


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
    arrays, each = step_arguments(derived, rows)
    owners = [Owner(model), Owner(Caches(arrays), name="caches")]
    whole = jax.ShapeDtypeStruct((rows, length), "int32")

    def prefill(nodes: Sequence[Any], values: Sequence[Any]) -> Any:
        model, caches = nodes
        logits, filled = prefilled(derived, arrays_of(model), values[:1], values[1])
        caches.update(filled)
        return logits

    def step(nodes: Sequence[Any], values: Sequence[Any]) -> Any:
        model, caches = nodes
        logits, after = derived.step(arrays_of(model), caches.arrays(), values[:1], values[1])
        caches.update(after)
        return logits

    traced = partial(trace_function, owners=owners, batch_axes=(0, 0))
    return GenerationPrograms(
        traced(prefill, arrays=[whole, each[1]], names=["tokens", "lengths"]),
        traced(step, arrays=each, names=["token", "position"]),
        count,
        length,
        sum(array.size * array.dtype.itemsize for array in arrays.values()) // rows,
    )


def step_arguments(
    derived: Incremental | Recomputation, num_sequences: int
) -> tuple[dict[int, Any], list[jax.ShapeDtypeStruct]]:
    """Returns the shapes of the caches of a decode step, and of its other arguments: per-token inputs, positions."""
    forward = derived.forward
    avals = forward.graph.avals
    position = jax.ShapeDtypeStruct((num_sequences,), "int32")
    parameters = [jax.ShapeDtypeStruct(avals[value].shape, avals[value].dtype) for value in forward.parameters]
    shapes = [(num_sequences, *avals[value].shape[1:]) for value in forward.arrays]
    arrays = [
        jax.ShapeDtypeStruct(shape, avals[value].dtype) for shape, value in zip(shapes, forward.arrays, strict=True)
    ]
    caches = jax.eval_shape(derived.fill, parameters, arrays, position)
    rows = [
        jax.ShapeDtypeStruct((num_sequences, *avals[value].shape[2:]), avals[value].dtype)
        for value in forward.token_arrays
    ]
    return caches, [*rows, position]


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
