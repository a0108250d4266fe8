"""Fusion: memory traffic between kernels, compared with the known behavior of fusing compilers."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from programs import graph_of, small_gpt
from spanax.trace.analysis.fusion import Kept, accesses, memory_plan
from spanax.trace.jaxpr.graph import Graph


def memory_traffic(function: Any, *shapes: Any) -> tuple[Graph, Kept]:
    graph = graph_of(function, *shapes)
    return graph, Kept(graph, graph.body)


def made_by(graph: Graph, name: str, which: int = 0) -> int:
    """The result of the operation of a name."""
    return [op.outputs[0] for op in graph.ops() if op.name == name][which]


def traffic(graph: Graph) -> tuple[dict[int, tuple[int, int]], int]:
    """Value -> (writes, reads) of the outermost body, and its kernels."""
    result, num_kernels = accesses(graph, graph.body)
    return {access.value: (access.writes, access.reads) for access in result}, num_kernels


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale + bias


def test_an_elementwise_chain_is_one_kernel_that_stores_only_its_ends() -> None:
    graph, result = memory_traffic(lambda x: jnp.exp(x) * 2 + 1, (8, 4))
    (x,), (out,) = graph.body.inputs, graph.body.outputs
    assert result.kept == {x, out} and result.written == {out}
    assert traffic(graph) == ({x: (0, 1), out: (1, 0)}, 1)


def test_softmax_between_matmuls_reads_its_scores_once() -> None:
    graph, result = memory_traffic(lambda q, k, v: jax.nn.softmax(q @ k.T) @ v, (8, 4), (16, 4), (16, 4))
    scores, weights = made_by(graph, "dot_general"), made_by(graph, "div")
    assert result.kept == {*graph.body.inputs, scores, weights, *graph.body.outputs}
    assert traffic(graph) == ({scores: (0, 1), weights: (1, 0)}, 1)


def test_a_norm_along_the_last_dim_is_one_kernel() -> None:
    graph, result = memory_traffic(layer_norm, (8, 16), (16,), (16,))
    (out,) = graph.body.outputs
    assert result.kept == {*graph.body.inputs, out}
    assert traffic(graph) == ({**dict.fromkeys(graph.body.inputs, (0, 1)), out: (1, 0)}, 1)


def test_bias_and_gelu_between_matmuls_are_one_kernel() -> None:
    graph, result = memory_traffic(lambda x, w, b, u: jax.nn.gelu(x @ w + b) @ u, (8, 4), (4, 16), (16,), (16, 4))
    before, after = made_by(graph, "dot_general"), made_by(graph, "mul", -1)
    assert result.kept == {*graph.body.inputs, before, after, *graph.body.outputs}
    assert traffic(graph) == ({graph.body.inputs[2]: (0, 1), before: (0, 1), after: (1, 0)}, 1)


def test_a_matmul_is_not_fused_with_the_kernel_of_its_operand() -> None:
    graph, result = memory_traffic(lambda x, w: jnp.exp(jnp.exp(x) @ w), (8, 4), (4, 4))
    first, second = (made_by(graph, "exp", at) for at in (0, 1))
    assert {first, second} <= result.written
    assert result.level[first] < result.level[made_by(graph, "dot_general")] == result.level[second]
    assert traffic(graph)[1] == 2


@pytest.mark.parametrize(("axis", "ends"), [(0, True), (1, False), ((0, 1), True), (None, True)])
def test_a_reduction_ends_a_kernel_unless_it_runs_along_the_last_dims(axis: Any, ends: bool) -> None:
    graph, result = memory_traffic(lambda x: jnp.exp(x - x.sum(axis, keepdims=True)), (8, 4))
    total = made_by(graph, "reduce_sum")
    assert (total in result.kept) == ends
    assert result.level[made_by(graph, "exp")] == ends


def test_a_value_read_by_two_kernels_is_stored_if_smaller_than_its_operands() -> None:
    def twice(make: Any) -> Any:
        return lambda x, y, w: (lambda both: (jnp.sin(both), jnp.sin(jnp.cos(both) @ w) * both))(make(x, y))

    graph, result = memory_traffic(twice(lambda x, y: x + y), (8, 4), (8, 4), (4, 4))
    both = made_by(graph, "add")
    assert both in result.written and result.sources(both) == set(graph.body.inputs[:2])
    assert traffic(graph)[0][both] == (1, 1)
    graph, result = memory_traffic(twice(lambda x, y: x + 1), (8, 4), (8, 4), (4, 4))
    assert made_by(graph, "add") not in result.kept


def test_every_body_has_a_plan_with_its_residuals() -> None:
    traced = small_gpt().step
    bodies = memory_plan(traced.graph)
    assert traced.graph.body in bodies and len(bodies) == 1 + sum(len(op.bodies) for op in traced.graph.ops())
    for body, result in bodies.items():
        inside = {*body.inputs, *(value for op in body.ops for value in op.outputs), *traced.graph.constants}
        assert {*body.inputs, *map(result.of, body.outputs)} <= result.kept <= inside
        # A kernel can run: all its operands were stored before it.
        for value in result.written:
            assert result.sources(value) <= result.kept
            assert all(result.level[source] <= result.level[value] for source in result.sources(value))
