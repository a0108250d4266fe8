"""Producers, readers, slices, sizes, source lines and inlining of a graph."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

import spanax
from spanax.trace.jaxpr.graph import CALLS, INLINED, Graph, from_jaxpr, marked

X = jax.ShapeDtypeStruct((4, 4), "float32")


def traced(function: Callable[..., Any], *args: Any, **options: Any) -> Graph:
    return from_jaxpr(jax.make_jaxpr(function)(*args), **options)


def test_origin_follows_named_operations() -> None:
    def function(x: Any, y: Any) -> Any:
        x, y = lax.optimization_barrier((jnp.sin(x), y.astype("bfloat16")))
        return x * 2, y.T

    graph = traced(function, X, X)
    _, y = graph.body.inputs
    double, transposed = graph.body.outputs
    assert graph.origin(transposed, {"transpose", "optimization_barrier", "convert_element_type"}) == y
    assert graph.origin(transposed, {"convert_element_type"}) == transposed
    through = graph.origin(double, {"mul", "optimization_barrier"})
    assert graph.producers[through].name == "sin"


def activated(x: Any) -> Any:
    return jax.jit(lambda y: jax.nn.relu(jnp.sin(y)))(x)


@pytest.mark.parametrize(
    ("inlined", "ops"),
    [
        (INLINED, ["sin", "max"]),
        (CALLS, ["sin", "custom_jvp_call", "max"]),
        (frozenset(), ["jit", "sin", "custom_jvp_call", "jit", "max"]),
    ],
)
def test_calls_that_are_not_inlined_have_a_body(inlined: frozenset[str], ops: list[str]) -> None:
    graph = traced(activated, X, inlined=inlined)
    assert [op.name.replace("pjit", "jit") for op in graph.ops()] == ops
    for op in graph.ops():
        assert len(op.bodies) == (op.name.endswith(("jit", "call")))
        for outer, inner in graph.wires(op).inputs if op.bodies else ():
            assert graph.shape(outer) == graph.shape(inner)


def test_dead_code_and_marks_remain_as_traced() -> None:
    def function(x: Any) -> Any:
        jnp.cos(x)
        return marked(jnp.sin(x), "sine") * 2

    program, verbatim = traced(function, X), traced(function, X, as_traced=True)
    assert [op.name for op in program.ops()] == ["sin", "mul"] and list(program.marks) == ["sine"]
    assert [op.name for op in verbatim.ops()] == ["cos", "sin", "name", "mul"] and not verbatim.marks


def test_the_line_of_an_operation_inside_a_jax_function_is_that_of_the_call() -> None:
    def function(x: Any) -> Any:
        return jnp.tan(x), jax.nn.relu(x)

    graph = traced(function, X)
    line = function.__code__.co_firstlineno + 1
    assert [op.where.split(" ")[0].rpartition(":")[0] for op in graph.ops()] == [f"{Path(__file__)}:{line}"] * 2
    assert [len(op.callers) > 0 for op in graph.ops()] == [False, True]


def test_the_line_of_a_loop_over_layers_is_that_of_the_call() -> None:
    def function(x: Any) -> Any:
        layers = spanax.Stack(lambda rngs: nnx.Linear(4, 4, rngs=rngs), 2, rngs=nnx.Rngs(0))
        return layers(x)

    loop = next(op for op in traced(function, X).ops() if op.name == "scan" and op.params["length"] == 2)
    assert loop.where.startswith(f"{Path(__file__)}:{function.__code__.co_firstlineno + 2}:")
