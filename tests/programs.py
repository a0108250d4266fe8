"""Programs that several files of tests look at, each traced once in a process."""

import dataclasses
import functools
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import spanax
import zoo
from spanax.models import gpt
from spanax.models.workloads import load
from spanax.trace.analysis.step_analysis import StepAnalysis
from spanax.trace.axes.axes import Traced, discover
from spanax.trace.jaxpr.graph import Graph
from spanax.trace.jaxpr.permutations import step_graph
from spanax.trace.program import Program
from spanax.trace.variables import Leaf


class Net(nnx.Module):
    """Parameters, statistics, dropout keys and counts: all that a step can change."""

    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(16, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.dropout(self.norm(jnp.tanh(self.up(x)))))


@functools.cache
def workload(name: str, batch_size: int = 32, num_layers: int | None = None, remat: str | None = None) -> Program:
    """A named workload under AdamW."""
    result = load(name, batch_size=batch_size, num_layers=num_layers)
    return spanax.trace(
        build=result.build,
        optimizer=optax.adamw(1e-3),
        batch=result.batch,
        loss=result.loss,
        remat=remat,
        accumulate=result.accumulate,
    )


@functools.cache
def zoo_program(name: str) -> Program:
    """A model of the zoo on a batch of 16."""
    case = zoo.ZOO[name]
    return spanax.trace(build=case.build, optimizer=case.optimizer, batch=case.batch(16), loss=case.loss)


# Adam divides by the size of a gradient, and so blows up the rounding of those near zero: eps is far above it here.
CALM = optax.adamw(1e-2, eps=0.1)
CALMED = {
    "fused-qkv": optax.adamw(optax.warmup_cosine_decay_schedule(1e-3, 1e-2, warmup_steps=1, decay_steps=10), eps=0.1),
    "mixer": optax.chain(optax.clip_by_global_norm(1.0), CALM),
}


@functools.cache
def calm_program(name: str) -> Program:
    """A model of the zoo on a batch of 16, under an optimizer that rounding does not move."""
    case = zoo.ZOO[name]
    chosen = CALMED.get(name, CALM if case.optimizer is zoo.ADAMW else case.optimizer)
    optimizer: Any = chosen if case.wrt is nnx.Param else lambda model: nnx.Optimizer(model, chosen, wrt=case.wrt)
    return spanax.trace(build=case.build, optimizer=optimizer, batch=case.batch(16), loss=case.loss)


@functools.cache
def small_gpt(**changes: Any) -> Program:
    """The zoo's GPT under plain SGD, which has no arithmetic of its own to speak of."""
    config = dataclasses.replace(zoo.GPT_SCAN, **{"remat": False} | changes)
    return spanax.trace(
        build=functools.partial(gpt.GPT, config), optimizer=optax.sgd(0.1), batch=zoo.GPT_TEXT(16), loss=gpt.loss
    )


def array(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def graph_of(function: Any, *shapes: Any) -> Graph:
    """A function's graph; its inputs as shapes."""
    shapes = tuple(array(*shape) if isinstance(shape, tuple) else shape for shape in shapes)
    return step_graph(jax.make_jaxpr(function)(*shapes))


def leaf(shape: jax.ShapeDtypeStruct, kind: str, annotation: tuple[Any, ...] | None = None) -> Leaf:
    return Leaf(kind, shape.shape, np.dtype(shape.dtype), kind, annotation=annotation)


def step_of(
    function: Any, params: list[jax.ShapeDtypeStruct], batch: jax.ShapeDtypeStruct, *annotations: tuple[Any, ...]
) -> StepAnalysis:
    """A function of parameters and a batch as a step that returns its result and leaves the parameters unchanged."""
    graph = graph_of(lambda *args: (*args[:-1], function(*args)), *params, batch)
    leaves = [leaf(shape, "param", annotation) for shape, annotation in zip_longest(params, annotations)]
    axes = discover(graph, leaves, [leaf(batch, "batch")])
    result = jax.tree.structure(jax.eval_shape(function, *params, batch))
    return StepAnalysis(Traced(graph, axes, result))
