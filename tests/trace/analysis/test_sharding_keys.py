"""Sharding keys: which values have equal shardings, and which are computed rather than stored."""

import jax
import jax.numpy as jnp

from programs import array, step_of
from spanax.trace.analysis.sharding_keys import ShardingKey
from spanax.trace.analysis.step_analysis import StepAnalysis

W, X = array(7, 5), array(3, 7)


def keys_of(step: StepAnalysis, primitive: str) -> list[ShardingKey]:
    """The keys of the results of a primitive, in order."""
    return [step.sharding_keys[value] for op in step.graph.ops() if op.name == primitive for value in op.outputs]


def test_a_moved_weight_that_feeds_an_activation_is_computed() -> None:
    step = step_of(lambda w, x: (x @ w.T, (2 * w).T), [array(5, 7)], X)
    assert sorted(key.is_computed for key in keys_of(step, "transpose")) == [False, True]
    assert [key.is_computed for key in keys_of(step, "mul")] == [False]


def test_a_widened_weight_is_computed_and_a_narrowed_one_is_stored() -> None:
    narrow, wide = array(7, 5, dtype="bfloat16"), array(7, 5)
    widened = step_of(lambda w, x: x @ (w.astype("float32") * 2), [narrow], X)
    assert [key.is_computed for key in keys_of(widened, "convert_element_type") + keys_of(widened, "mul")] == [True] * 2
    narrowed = step_of(lambda w, x: x @ (w.astype("bfloat16") * 2), [wide], array(3, 7, dtype="bfloat16"))
    assert not any(key.is_computed for key in keys_of(narrowed, "convert_element_type") + keys_of(narrowed, "mul"))


def test_a_value_that_selects_experts_is_routed() -> None:
    def experts(router: jax.Array, weights: jax.Array, x: jax.Array) -> jax.Array:
        gates = jax.nn.one_hot(jax.lax.top_k(x @ router, 1)[1][:, 0], 4)
        return jnp.einsum("be,bd,edf->bf", gates, x, weights)

    step = step_of(experts, [array(7, 4), array(4, 7, 5)], X)
    router, weights, _ = (step.sharding_keys[value] for value in step.graph.body.inputs)
    assert router.is_routed and not weights.is_routed


def test_a_uniform_constant_of_a_loop_is_uniform_in_it_and_its_carry_is_not() -> None:
    def function(w: jax.Array, x: jax.Array) -> jax.Array:
        zeros, start = jnp.zeros(x.shape), jnp.ones(x.shape)
        return jax.lax.scan(lambda total, _: (total * x + zeros, None), start, None, length=3)[0] @ w

    step = step_of(function, [W], X)
    (loop,) = (op for op in step.graph.ops() if op.name == "scan")
    wires = step.graph.wires(loop)
    carried = {first for first, _ in wires.carried}
    is_uniform = {inner in carried: inner in step.uniform for outer, inner in wires.inputs if outer in step.uniform}
    assert is_uniform == {False: True, True: False}
