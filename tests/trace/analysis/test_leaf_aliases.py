"""Aliases of a leaf: its casts, transposes, gradient and update, but not activations."""

import jax
import jax.numpy as jnp

from programs import array, small_gpt, step_of
from spanax.trace.analysis.liveness import reachable
from spanax.trace.jaxpr.marks import GRADIENT


def test_a_cast_and_a_transpose_are_aliases_and_a_product_is_not() -> None:
    step = step_of(lambda w, x: x @ w.astype("bfloat16").T * w.sum(1), [array(5, 7)], array(3, 7, dtype="bfloat16"))
    aliases = step.leaf_aliases(0)
    avals = {(step.graph.shape(value), str(step.graph.avals[value].dtype)) for value in aliases}
    assert avals >= {((5, 7), "float32"), ((5, 7), "bfloat16")} and {shape for shape, _ in avals} <= {(5, 7), (7, 5)}
    (product,) = (op.outputs[0] for op in step.graph.ops() if op.name == "dot_general")
    assert product not in aliases


def test_one_layer_of_a_scan_is_an_alias_of_the_stack() -> None:
    def stack(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, weight: (jnp.tanh(x @ weight), None), x, weights)[0]

    step = step_of(stack, [array(4, 7, 7)], array(3, 7))
    assert {(4, 7, 7), (7, 7)} <= {step.graph.shape(value) for value in step.leaf_aliases(0)}


def test_gradient_and_update_of_a_leaf_are_aliases() -> None:
    program = small_gpt()
    graph = program.step.graph
    matrices = [index for index, leaf in enumerate(program.leaves) if leaf.kind == "param" and len(leaf.shape) > 2]
    assert matrices
    for index in matrices:
        aliases = program.step.leaf_aliases(index)
        gradient = graph.marks[GRADIENT + program.leaves[index].path]
        assert {graph.body.inputs[index], graph.body.outputs[index], gradient} <= aliases


def test_aliases_of_aliases_are_reachable() -> None:
    assert reachable(1, {1: [2], 2: [1, 3], 3: [2], 4: [5]}) == {1, 2, 3}
    assert reachable(9, {}) == {9}
