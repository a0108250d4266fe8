"""Names of axes on functions of a few operations, each with one piece of evidence."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from programs import array, step_of
from spanax.trace.axes.axes import Axes

Names = tuple[str | None, ...]


def axes_of(
    function: Callable[..., Any],
    params: list[jax.ShapeDtypeStruct],
    batch: jax.ShapeDtypeStruct,
    *annotations: tuple[Any, ...],
) -> tuple[Axes, list[Names]]:
    """The axes of a function of parameters and a batch, and the names of these arguments."""
    axes, inputs = (step := step_of(function, params, batch, *annotations)).axes, step.graph.body.inputs
    return axes, [axes.of(value) for value in inputs]


def attention(wq: Any, wk: Any, wv: Any, x: Any) -> Any:
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, w) for w in (wq, wk, wv))
    scores = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
    return jnp.einsum("bhts,bshk->bthk", scores, v)


def stack(ups: Any, downs: Any, x: Any) -> Any:
    layer = lambda x, weights: (x + jnp.tanh(x @ weights[0]) @ weights[1], None)  # noqa: E731
    return jax.lax.scan(layer, x, (ups, downs))[0]


def blocks(up: Any, down: Any, second_up: Any, second_down: Any, x: Any) -> Any:
    x = x + jnp.tanh(x @ up) @ down
    return x + jnp.tanh(x @ second_up) @ second_down


def convolution(kernel: Any, image: Any) -> Any:
    return jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def recurrence(weight: Any, x: Any) -> Any:
    step = lambda state, row: (jnp.tanh(state @ weight + row), None)  # noqa: E731
    return jax.lax.scan(step, jnp.zeros((3, 5)), x.swapaxes(0, 1))[0]


def routed(router: Any, experts: Any, x: Any) -> Any:
    gates, _ = jax.lax.top_k(x @ router, 2)
    return jnp.einsum("ebd,edf->ebf", jnp.broadcast_to(x, (4, *x.shape)), experts) * gates.sum()


def by_one_hot(router: Any, experts: Any, x: Any) -> Any:
    """Every expert computes every token; the chosen ones are weighted."""
    weights, chosen = jax.lax.top_k(x @ router, 2)
    return combined((jax.nn.one_hot(chosen, 4) * weights[..., None]).sum(1), experts, x)


def by_scatter(router: Any, experts: Any, x: Any) -> Any:
    weights, chosen = jax.lax.top_k(x @ router, 2)
    return combined(jnp.zeros((3, 4)).at[jnp.arange(3)[:, None], chosen].set(weights), experts, x)


def by_lookup(router: Any, experts: Any, x: Any) -> Any:
    """Looks up the weights of the chosen experts for each token."""
    weights, chosen = jax.lax.top_k(x @ router, 2)
    return jnp.einsum("bk,bkdf,bd->bf", weights, experts[chosen], x)


def combined(weights: Any, experts: Any, x: Any) -> Any:
    return jnp.einsum("be,bef,efd->bd", weights, jnp.tanh(jnp.einsum("bd,edf->bef", x, experts)), experts.mT)


def in_slots(router: Any, experts: Any, x: Any) -> Any:
    """Writes tokens into slots by index; returns the slots and the gates, so that their names are those of results."""
    gates_BTK, chosen_BTK = jax.lax.top_k(x @ router, 2)
    place_BTK = jnp.cumsum(chosen_BTK, axis=1)
    write = lambda x, chosen, place: jnp.zeros((4, 3, 7)).at[chosen, place].add(x[:, None], mode="drop")  # noqa: E731
    slots_BECD = jax.vmap(write)(x, chosen_BTK, place_BTK)
    return jnp.einsum("becd,edf->becf", slots_BECD, experts), (gates_BTK[..., None] * x[:, :, None]).sum(2), gates_BTK


def by_all(experts: Any, x: Any) -> Any:
    """Every expert computes the sequence."""
    return jnp.einsum("ebtd,edf->ebtf", jnp.broadcast_to(x, (4, *x.shape)), experts)


CHOSEN = (
    [array(7, 4), array(4, 7, 5)], array(3, 7),
    [("features", "experts"), ("experts", "features", "features"), ("batch", "features")],
)  # fmt: skip
FOUR = [array(7, 11), array(11, 7)] * 2
CASES: dict[str, tuple[Callable[..., Any], list[jax.ShapeDtypeStruct], jax.ShapeDtypeStruct, list[Names]]] = {
    "a table indexed by the batch": (
        lambda table, tokens: table[tokens], [array(13, 5)], array(3, 7, dtype="int32"),
        [("vocab", "embed"), ("batch", "seq")],
    ),
    "a table indexed by positions": (
        lambda table, x: table[jnp.arange(7)[::-1]] + x, [array(13, 5)], array(3, 7, 5),
        [("positions", "features"), ("batch", "seq", "features")],
    ),
    "attention": (
        attention, [array(7, 2, 5)] * 3, array(3, 11, 7),
        [("features", "heads", "head_dim")] * 2 + [("features", "heads", "features"), ("batch", "seq", "features")],
    ),
    "a residual stream": (blocks, FOUR, array(3, 7), [("embed", "mlp"), ("mlp", "embed")] * 2 + [("batch", "embed")]),
    "a scan over weights": (
        stack, [array(5, 7, 11), array(5, 11, 7)], array(3, 7),
        [("layers", "features", "hidden"), ("layers", "hidden", "features"), ("batch", "features")],
    ),
    "a convolution": (
        convolution, [array(2, 2, 5, 7)], array(3, 11, 13, 5),
        [("window", "window", "channels", "channels"), ("batch", "height", "width", "channels")],
    ),
    "a scan over the batch": (
        recurrence, [array(5, 5)], array(3, 11, 5), [("features", "features"), ("batch", "seq", "features")],
    ),
    "experts": (
        routed, [array(7, 4), array(4, 7, 5)], array(3, 7),
        [("features", "experts"), ("experts", "features", "features"), ("batch", "features")],
    ),
    "experts weighted by one-hot choices": (by_one_hot, *CHOSEN),
    "experts weighted by a scatter": (by_scatter, *CHOSEN),
    "experts looked up by their choices": (
        by_lookup, [array(7, 4), array(4, 7, 5)], array(3, 7),
        [("embed", "experts"), ("experts", "embed", "embed"), ("batch", "embed")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("function, params, batch, expected", CASES.values(), ids=CASES)
def test_the_use_of_a_dim_names_it(
    function: Callable[..., Any], params: list[jax.ShapeDtypeStruct], batch: jax.ShapeDtypeStruct, expected: list[Names]
) -> None:
    assert axes_of(function, params, batch)[1] == expected


def test_slots_of_experts_and_choices_of_a_token_are_not_a_sequence() -> None:
    step = step_of(in_slots, [array(7, 4), array(4, 7, 5)], array(3, 11, 7))
    slots, _, gates = (step.axes.of(value) for value in step.graph.body.outputs[-3:])
    assert slots == ("batch", "experts", "slots", "features") and gates == ("batch", "seq", "choices")


def test_a_sequence_that_every_expert_computes_has_no_slots() -> None:
    step = step_of(by_all, [array(4, 7, 5)], array(3, 11, 7))
    assert step.axes.of(step.graph.body.outputs[-1]) == ("experts", "batch", "seq", "features")


def test_an_annotation_is_stronger_than_any_use_but_the_batch() -> None:
    axes, names = axes_of(blocks, FOUR, array(3, 7), ("stream", "model"), ("wide", None))
    assert names[0] == ("stream", "wide") and names[2] == ("stream", "mlp") and names[4] == ("batch", "stream")
    assert sorted(axes.uses.values()) == ["embed", "mlp"]


def test_an_annotation_with_a_standard_name_has_no_other_use() -> None:
    axes, names = axes_of(blocks, FOUR, array(3, 7), ("hidden", "heads"))
    assert names[0] == ("hidden", "heads") and axes.uses == {}
