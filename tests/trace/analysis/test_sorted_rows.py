"""Rows sorted by expert: which programs let each device sort its own, and what only looks like it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from programs import array, step_of
from spanax.trace.analysis.sorted_rows import SortedRows

NUM_TOKENS, DIM, EXPERTS, TOP = 12, 6, 4, 2
UP, DOWN, ROUTER, X = array(EXPERTS, DIM, 5), array(EXPERTS, 5, DIM), array(DIM, EXPERTS), array(NUM_TOKENS, DIM)

Weights = dict[str, jax.Array]


def counted(chosen: jax.Array) -> jax.Array:
    return jnp.bincount(chosen.reshape(-1), length=EXPERTS).astype(jnp.int32)


def ordered(chosen: jax.Array) -> jax.Array:
    return jnp.argsort(chosen.reshape(-1))


def unchanged(rows: jax.Array) -> jax.Array:
    return rows


def added(out: jax.Array, order: jax.Array) -> jax.Array:
    return jnp.zeros((NUM_TOKENS, DIM)).at[order // TOP].add(out)


def found(
    sort: Callable[[jax.Array], jax.Array] = ordered,
    count: Callable[[jax.Array], jax.Array] = counted,
    change: Callable[[jax.Array], jax.Array] = unchanged,
    combine: Callable[[jax.Array, jax.Array], jax.Array] = added,
) -> SortedRows:
    """The sorted rows of a step with two matmuls of experts, and what differs in it."""

    def experts(up: jax.Array, down: jax.Array, router: jax.Array, x: jax.Array) -> jax.Array:
        chosen = jax.lax.top_k(x @ router, TOP)[1]
        order, sizes = sort(chosen), count(chosen)
        rows = change(jnp.tanh(jax.lax.ragged_dot(x[order // TOP], up, sizes)))
        return jnp.square(x + combine(jax.lax.ragged_dot(rows, down, sizes), order)).sum()

    return step_of(jax.grad(experts, (0, 1, 3)), [UP, DOWN, ROUTER], X).sorted_rows


def by_sort(chosen: jax.Array) -> jax.Array:
    flat = chosen.reshape(-1)
    return jax.lax.sort((flat, flat * 2, jnp.arange(len(flat))), num_keys=1)[2]


def by_one_hots(chosen: jax.Array) -> jax.Array:
    return jax.nn.one_hot(chosen, EXPERTS).sum(1).sum(0).astype(jnp.int32)


def by_scatter(chosen: jax.Array) -> jax.Array:
    return jnp.zeros(EXPERTS, jnp.int32).at[chosen].add(1)


def by_inverse(out: jax.Array, order: jax.Array) -> jax.Array:
    return jnp.take(out, jnp.argsort(order), axis=0).reshape(NUM_TOKENS, TOP, DIM).sum(1)


def by_set(out: jax.Array, order: jax.Array) -> jax.Array:
    return jnp.zeros_like(out).at[order].set(out, unique_indices=True).reshape(NUM_TOKENS, TOP, DIM).sum(1)


def by_last_set(out: jax.Array, order: jax.Array) -> jax.Array:
    return jnp.zeros_like(out).at[order].set(out).reshape(NUM_TOKENS, TOP, DIM).sum(1)


FORMS: dict[str, dict[str, Callable[..., jax.Array]]] = {
    "argsort, bincount, scatter-add": {},
    "a sort of several operands": {"sort": by_sort},
    "one-hots": {"count": by_one_hots},
    "a scatter of ones": {"count": by_scatter},
    "the inverse permutation": {"combine": by_inverse},
    "a scatter by choice": {"combine": by_set},
    "a scatter whose indices might repeat": {"combine": by_last_set},
    "a bias per row": {"change": lambda rows: jax.nn.softmax(rows) + 1.0},
}

OTHERS: dict[str, dict[str, Callable[..., jax.Array]]] = {
    "rows summed up to each": {"change": lambda rows: jnp.cumsum(rows, axis=0)},
    "rows by their number": {"change": lambda rows: rows * jnp.arange(len(rows))[:, None]},
    "the first rows": {"change": lambda rows: rows.at[:3].set(0.0)},
    "neighbors": {"change": lambda rows: rows + jnp.roll(rows, 1, axis=0)},
    "pairs": {"change": lambda rows: (rows.reshape(-1, 2, 5) * jnp.ones((1, 2, 1))).reshape(rows.shape)},
    "another key": {"sort": lambda chosen: jnp.argsort(EXPERTS - 1 - chosen.reshape(-1))},
    "a key of floats": {"sort": lambda chosen: jnp.argsort(chosen.reshape(-1).astype(jnp.float32))},
    "choices in another order": {"sort": lambda chosen: jnp.argsort(chosen.T.reshape(-1))},
    "equal sizes": {"count": lambda chosen: jnp.full(EXPERTS, NUM_TOKENS * TOP // EXPERTS, jnp.int32)},
    "sizes of other experts": {"count": lambda chosen: counted((chosen + 1) % EXPERTS)},
    "sizes in another order": {"count": lambda chosen: counted(chosen)[::-1]},
    "sizes of some": {"count": lambda chosen: counted(chosen[:, :1])},
    "places as numbers": {"combine": lambda out, order: by_inverse(out, order) + jnp.argsort(order)[:NUM_TOKENS, None]},
}


@pytest.mark.parametrize("form", FORMS)
def test_each_device_may_sort_its_own_rows(form: str) -> None:
    rows = found(**FORMS[form])
    names = [op.name for op in rows.ops]
    assert names.count("ragged_dot_general") == 6
    assert "sort" in names and rows.can_stay
    assert rows.groups and rows.counts


@pytest.mark.parametrize("other", OTHERS)
def test_what_depends_on_the_order_of_rows_is_gathered(other: str) -> None:
    assert found(**OTHERS[other]).ops == {}


def test_sums_over_rows_are_computed_with_experts_gathered() -> None:
    def experts(up: jax.Array, scale: jax.Array, router: jax.Array, x: jax.Array) -> jax.Array:
        chosen = jax.lax.top_k(x @ router, TOP)[1]
        order = ordered(chosen)
        rows = jax.lax.ragged_dot(x[order // TOP], up, counted(chosen)) * scale  # its gradient is a sum over rows
        return jnp.square(jnp.zeros((NUM_TOKENS, 5)).at[order // TOP].add(rows)).sum()

    rows = step_of(jax.grad(experts, (0, 1)), [UP, array(5), ROUTER], X).sorted_rows
    assert rows.ops and not rows.can_stay


def test_counts_are_added_where_anything_else_reads_them() -> None:
    rows = found()
    assert not rows.added

    def experts(up: jax.Array, bias: jax.Array, router: jax.Array, x: jax.Array) -> jax.Array:
        chosen = jax.lax.top_k(x @ router, TOP)[1]
        order = ordered(chosen)
        sizes = counted(chosen)
        rows = jax.lax.ragged_dot(x[order // TOP], up, sizes)
        return jnp.zeros((NUM_TOKENS, 5)).at[order // TOP].add(rows) + (bias * sizes).sum()

    assert step_of(experts, [UP, array(EXPERTS), ROUTER], X).sorted_rows.added
