"""Producers, readers, slices, sizes, source lines and inlining of a graph."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from spanax.trace.jaxpr.graph import CALLS, INLINED, Graph, from_jaxpr
from spanax.trace.jaxpr.marks import marked

X = jax.ShapeDtypeStruct((4, 4), "float32")


def traced(function: Callable[..., Any], *args: Any, **options: Any) -> Graph:
    return from_jaxpr(jax.make_jaxpr(function)(*args), **options)


def names(graph: Graph, values: Any = (), **options: Any) -> list[str]:
    return [op.name for op in graph.slice(values, **options)]


def looped(x: Any) -> Any:
    return lax.scan(lambda carry, row: (jnp.sin(carry) * row, carry), x[0], x)


@pytest.mark.parametrize("function", [lambda x: jnp.sin(x) + x, looped])
def test_every_value_is_an_input_a_constant_or_a_result(function: Callable[..., Any]) -> None:
    graph = traced(function, X)
    bodies = [graph.body, *(body for op in graph.ops() for body in op.bodies)]
    inputs = {value for body in bodies for value in body.inputs}
    assert all(graph.producers[value] is op for op in graph.ops() for value in op.outputs)
    assert not graph.producers.keys() & (inputs | graph.constants.keys())
    assert graph.producers.keys() | inputs | graph.constants.keys() == {*range(len(graph.avals))}


def test_a_value_has_a_reader_for_each_operand() -> None:
    graph = traced(lambda x: (jnp.sin(x) * jnp.sin(x), x * x), X)
    (x,) = graph.body.inputs
    assert [op.name for op in graph.readers[x]] == ["sin", "sin", "mul", "mul"]
    assert all(not graph.readers[value] for value in graph.body.outputs)


def test_readers_inside_a_body() -> None:
    graph = traced(looped, X)
    (scan,) = (op for op in graph.ops() if op.name == "scan")
    carry, row = scan.bodies[0].inputs
    assert [[op.name for op in graph.readers[value]] for value in (carry, row)] == [["sin"], ["mul"]]


def test_a_program_slice_has_the_ancestors_of_a_value_in_order() -> None:
    def function(x: Any) -> Any:
        y = jnp.exp(x)
        return jnp.cos(y) + jnp.sin(y), jnp.tan(x)

    graph = traced(function, X)
    total, tangent = graph.body.outputs
    assert names(graph, [total]) == ["exp", "cos", "sin", "add"]
    assert names(graph, [tangent]) == ["tan"]
    assert names(graph, [tangent, total]) == ["exp", "cos", "sin", "add", "tan"]
    (y,) = graph.body.ops[0].outputs
    assert names(graph, [total], known={y}) == ["cos", "sin", "add"]
    assert names(graph, [y], known={y}) == names(graph, graph.body.inputs) == []
    assert names(graph, roots=graph.readers[y][:1]) == ["exp", "cos"]


def test_a_slice_inside_a_body_stays_there() -> None:
    graph = traced(looped, X)
    (scan,) = (op for op in graph.ops() if op.name == "scan")
    inner = graph.within(scan.bodies[0])
    assert names(graph, inner.body.outputs) == names(inner, inner.body.outputs) == ["sin", "mul"]
    assert [op.name for op in inner.ops()] == ["sin", "mul"] and inner.avals is graph.avals


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


@pytest.mark.parametrize(
    ("aval", "num_bytes"),
    [
        (X, 64),
        (jax.ShapeDtypeStruct((3, 5), "bfloat16"), 30),
        (jax.ShapeDtypeStruct((7,), bool), 7),
        (jax.ShapeDtypeStruct((), "int32"), 4),
        (jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3)), 24),
    ],
)
def test_bytes_of_a_value(aval: Any, num_bytes: int) -> None:
    graph = traced(lambda x: x, aval)
    assert graph.num_bytes(graph.body.inputs[0]) == num_bytes


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
