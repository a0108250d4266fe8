"""Matmuls: sums over several dims become one where no device loses sight of its part; the numbers stay."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from spanax.plan.sharding.resolve import Constraint
from spanax.step.replay.replay import Replay
from spanax.step.replay.single_contraction import single_contraction
from spanax.trace.jaxpr.graph import Graph, from_jaxpr

REPLICATED = Constraint(((), (), ()))
NUMBERS = {
    "a weight's gradient": (((0, 1), (0, 1)), ((), ())),
    "heads summed in the projection": (((1, 2), (0, 1)), ((), ())),
    "not side by side": (((0, 2), (0, 1)), ((), ())),
    "in another order": (((0, 1), (1, 0)), ((), ())),
    "one dim": (((0,), (0,)), ((), ())),
    "a batch": (((1, 2), (1, 2)), ((0,), (0,))),
}
MERGED = {"a weight's gradient", "heads summed in the projection"}


def product(numbers: Any, x: Any, y: Any) -> Graph:
    return from_jaxpr(jax.make_jaxpr(lambda x, y: lax.dot_general(x, y, numbers))(x, y))


@pytest.mark.parametrize("name", NUMBERS)
def test_a_single_contraction_equals_dot_general(name: str, devices: Any) -> None:
    x, y = jax.random.normal(jax.random.key(0), (2, 4, 4, 4))
    graph = product(NUMBERS[name], x, y)
    expected = lax.dot_general(x, y, NUMBERS[name])
    result = single_contraction(graph.body.ops[0], [x, y], [REPLICATED, REPLICATED])
    assert (result is not None) == (name in MERGED)
    if result is not None:
        np.testing.assert_allclose(result[0], expected, rtol=1e-6)
    mesh = jax.sharding.Mesh(np.array(devices[:1]), ("data",))
    replayed = Replay(graph, [None] * 3, {}, mesh).body(graph.body, [x, y])
    np.testing.assert_allclose(replayed[0], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("lhs", "rhs", "manual", "is_merged"),
    [
        ((("data",), (), ()), (("data",), (), ()), frozenset(), True),
        ((("data",), ("seq",), ()), (("data",), ("seq",), ()), frozenset(), False),
        ((("data",), ("seq",), ()), (("data",), ("seq",), ()), frozenset({"seq"}), True),
        (((), (), ("model",)), ((), (), ()), frozenset(), True),
    ],
)
def test_a_sharded_dim_remains_the_leading_one(
    lhs: Any, rhs: Any, manual: frozenset[str], is_merged: bool, devices: Any
) -> None:
    x = jnp.ones((4, 4, 4))
    (op,) = product(NUMBERS["a weight's gradient"], x, x).body.ops
    assert (single_contraction(op, [x, x], [Constraint(lhs), Constraint(rhs)], manual) is not None) == is_merged


@pytest.mark.parametrize("unknown", [None, Constraint(((), (), ()), is_open=True)])
def test_products_of_unknown_sharding_are_not_rewritten(unknown: Constraint | None, devices: Any) -> None:
    x = jnp.ones((4, 4, 4))
    (op,) = product(NUMBERS["a weight's gradient"], x, x).body.ops
    assert single_contraction(op, [x, x], [REPLICATED, unknown]) is None
