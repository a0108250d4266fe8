"""Sharding keys: which values have equal shardings, and which are computed rather than stored."""

import jax
import jax.numpy as jnp

from programs import array, step_of
from spanax.trace.analysis.sharding_keys import ShardingKey
from spanax.trace.analysis.step_analysis import StepAnalysis
from spanax.trace.jaxpr.provenance import Origin

W, X = array(7, 5), array(3, 7)


def keys_of(step: StepAnalysis, primitive: str) -> list[ShardingKey]:
    """The keys of the results of a primitive, in order."""
    return [step.sharding_keys[value] for op in step.graph.ops() if op.name == primitive for value in op.outputs]


def test_the_attributes_of_a_product() -> None:
    step = step_of(lambda w, x: x @ w, [W], X)
    weight, batch = (step.sharding_keys[value] for value in step.graph.body.inputs)
    (product,) = keys_of(step, "dot_general")
    assert weight.labels == (batch.labels[1], product.labels[1]) and product.labels[0] == batch.labels[0]
    assert (weight.shape, weight.origin, weight.is_computed) == ((7, 5), Origin.PARAM, False)
    assert (product.shape, product.origin, product.is_computed) == ((3, 5), Origin.PARAM | Origin.BATCH, True)


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


def test_a_statistic_of_the_batch_is_computed() -> None:
    step = step_of(lambda w, x: (x - x.mean(0)) @ w, [W], X)
    (mean,) = keys_of(step, "reduce_sum")
    assert mean.origin == Origin.BATCH and mean.is_computed


def test_a_dim_along_which_an_operation_runs_is_replicated() -> None:
    step = step_of(lambda w, x: jnp.sort(x @ w, axis=1), [W], X)
    assert [key.replicated for key in keys_of(step, "sort")] == [frozenset({1})]


def test_equal_keys_have_one_number() -> None:
    step = step_of(lambda w, x: jnp.tanh(x @ w) + jnp.exp(x @ w), [W], X)
    tanh, exp = (
        [value for op in step.graph.ops() if op.name == name for value in op.outputs] for name in ("tanh", "exp")
    )
    keys = step.sharding_keys
    assert keys[tanh[0]].number == keys[exp[0]].number != keys[step.graph.body.inputs[0]].number
    assert [key.number for key in keys] == [list(dict.fromkeys(keys)).index(key) for key in keys]


def test_a_value_that_selects_experts_is_routed() -> None:
    def experts(router: jax.Array, weights: jax.Array, x: jax.Array) -> jax.Array:
        gates = jax.nn.one_hot(jax.lax.top_k(x @ router, 1)[1][:, 0], 4)
        return jnp.einsum("be,bd,edf->bf", gates, x, weights)

    step = step_of(experts, [array(7, 4), array(4, 7, 5)], X)
    router, weights, _ = (step.sharding_keys[value] for value in step.graph.body.inputs)
    assert router.is_routed and not weights.is_routed


def test_only_scalars_yield_uniform_values() -> None:
    step = step_of(lambda w, x: (jnp.full((3, 5), 2.0) * 3, x @ w), [W], X)
    uniform = {op.name for op in step.graph.ops() if step.uniform.issuperset(op.outputs)}
    assert "broadcast_in_dim" in uniform and "dot_general" not in uniform
    assert not step.uniform.intersection(step.graph.body.inputs)


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
