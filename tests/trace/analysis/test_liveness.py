"""Live ranges of the values of small functions, with positions worked out by hand."""

import jax
import jax.numpy as jnp

from programs import array, step_of
from spanax.trace.analysis.step_analysis import StepAnalysis

W = array(7, 7)


def ranges(step: StepAnalysis, *, in_matmuls: bool = False) -> list[tuple[str, str]]:
    """The first and the last operation of the step for which each stored value is live; `end` for a result."""
    live = (step.tpu_liveness if in_matmuls else step.liveness)[step.graph.body]
    names = [*(op.name for op in step.order[step.graph.body]), "end"]
    return [(names[first], names[last]) for first, last in zip(live.first, live.last, strict=True)]


def test_a_product_is_live_until_the_last_kernel_that_reads_it() -> None:
    step = step_of(lambda w, x: jnp.sort(jnp.cumsum(x @ w, axis=1)), [W], array(3, 7))
    assert ranges(step) == [("dot_general", "cumsum"), ("cumsum", "sort"), ("sort", "end")]


def test_state_and_batch_are_not_counted() -> None:
    step = step_of(lambda w, x: x @ w, [W], array(3, 7))
    values = step.liveness[step.graph.body].values
    assert len(values) == 1 and not set(values) & {*step.graph.body.inputs}


def test_a_value_inside_a_kernel_takes_no_memory() -> None:
    step = step_of(lambda w, x: jnp.exp(jnp.tanh(x @ w)), [W], array(3, 7))
    assert ranges(step) == [("dot_general", "exp"), ("exp", "end")]


def test_a_producer_is_fused_into_its_matmul_on_a_tpu() -> None:
    step = step_of(lambda w, x: jnp.tanh(x @ w) @ w, [W], array(3, 7))
    product, last = ("dot_general", "tanh"), ("dot_general", "end")
    assert ranges(step) == [product, ("tanh", "dot_general"), last]
    assert ranges(step, in_matmuls=True) == [("dot_general", "dot_general"), last]


def test_values_of_one_sharding_key_and_size_are_one_group() -> None:
    step = step_of(lambda w, x: (x @ w @ w).astype("bfloat16"), [W], array(3, 7))
    live = step.liveness[step.graph.body]
    assert live.group.tolist() == [0, 0, 1] and live.num_bytes.tolist() == [84, 42]


def test_the_bytes_of_a_group_are_those_of_its_values() -> None:
    step = step_of(lambda w, x: x @ w, [array(7, 5, dtype="bfloat16")], array(3, 7, dtype="bfloat16"))
    assert step.liveness[step.graph.body].num_bytes.tolist() == [3 * 5 * 2]


def test_the_body_of_a_scan_has_live_ranges() -> None:
    def stack(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, weight: (jnp.cumsum(x @ weight, axis=1), None), x, weights)[0]

    step = step_of(stack, [array(4, 7, 7)], array(3, 7))
    (body,) = (op.bodies[0] for op in step.graph.ops() if op.name == "scan")
    shapes = [step.graph.shape(value) for value in step.liveness[body].values]
    assert (7, 7) in shapes and (3, 7) in shapes
