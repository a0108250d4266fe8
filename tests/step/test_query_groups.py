"""Fewer keys than devices along `model`: `groups` shards the queries of a key, in the numbers of one device."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from sampling import sampled
from spanax.check.lint.lint import lint
from spanax.errors import MeshError
from spanax.plan.space import num_groups

DIM, HEADS, KEYS, SIZE, LENGTH, HIDDEN = 32, 8, 4, 4, 8, 64
WIDTHS = (HEADS * SIZE, KEYS * SIZE, KEYS * SIZE)


def causal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def by_key(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Queries as a dim of their own, behind that of the keys."""
    q = q.reshape(*q.shape[:2], KEYS, HEADS // KEYS, SIZE)
    weights = jax.nn.softmax(jnp.einsum("btkgh,bskh->bkgts", q, k))
    return jnp.einsum("bkgts,bskh->btkgh", weights, v)


def repeated(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Keys and values repeated to all heads, as in Hugging Face's `repeat_kv`."""
    wide = (*q.shape[:2], KEYS, HEADS // KEYS, SIZE)
    k, v = (jnp.broadcast_to(y[:, :, :, None], wide).reshape(q.shape) for y in (k, v))
    return causal(q, k, v)


FORMS = {
    "heads": ("heads", causal),
    "merged": ("merged", causal),
    "merged, by key": ("merged", by_key),
    "merged, repeated": ("merged", repeated),
    "fused": ("fused", causal),
}
"""The weights of queries, keys and values, and their attention."""


class Block(nnx.Module):
    """Attention with fewer keys than queries, and an MLP."""

    def __init__(self, form: str, rngs: nnx.Rngs):
        self.weights, self.attend = FORMS[form]
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        general = partial(nnx.LinearGeneral, use_bias=False, rngs=rngs)
        if self.weights == "fused":
            self.qkv = linear(DIM, sum(WIDTHS))
        elif self.weights == "merged":
            self.q, self.k, self.v = (linear(DIM, width) for width in WIDTHS)
        else:
            self.q, self.k, self.v = (general(DIM, (width // SIZE, SIZE)) for width in WIDTHS)
        self.out, self.up, self.down = linear(WIDTHS[0], DIM), linear(DIM, HIDDEN), linear(HIDDEN, DIM)

    def __call__(self, x: jax.Array) -> jax.Array:
        fused = self.weights == "fused"
        parts = jnp.split(self.qkv(x), np.cumsum(WIDTHS)[:2], -1) if fused else (self.q(x), self.k(x), self.v(x))
        heads = [y.reshape(*x.shape[:2], -1, SIZE) for y in parts]
        x = x + self.out(self.attend(*heads).reshape(*x.shape[:2], WIDTHS[0]))
        return x + self.down(nnx.gelu(self.up(x)))


def batch() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: random.normal(size=(8, LENGTH, DIM)).astype(np.float32) for name in ("x", "y")}


@cache
def traced(form: str) -> spanax.Program:
    return spanax.trace(
        build=partial(Block, form), optimizer=optax.sgd(0.1), batch=batch(),
        loss=lambda model, batch: jnp.square(model(batch["x"]) - batch["y"]).mean(),
    )  # fmt: skip


def parameters(program: spanax.Program, plan: spanax.Plan) -> list[np.ndarray]:
    run = spanax.start(program, plan, seed=1)
    for _ in range(2):
        run.step(batch())
    return [np.asarray(array) for array in run.state]


@pytest.mark.parametrize("form", sampled(FORMS, ["heads", "merged"]))
def test_every_device_computes_its_queries_in_what_the_plan_counts(form: str) -> None:
    program = traced(form)
    plan = spanax.plan(program, "cpu:8", layout="tensor")
    assert str(plan.mesh) == "model=4,groups=2"
    report = spanax.check(program, plan, "cpu:8", level=2)
    assert report.predicted.collectives == report.compiled.collectives
    assert report.predicted.flops == report.compiled.flops
    whole = spanax.check(program, spanax.plan(program, "cpu:1", layout="data"), "cpu:1", level=0).predicted
    shared = 2 * 2 * 8 * LENGTH * DIM * (WIDTHS[1] + WIDTHS[2])  # keys and values, whose dims `groups` does not divide
    assert report.predicted.flops == whole.flops / 8 + (shared / 8 if form == "heads" else 0)


@pytest.mark.parametrize(
    ("form", "options"),
    sampled(
        [(form, {"sequence_parallel": value}) for form in FORMS for value in (False, True)],
        [("heads", {"sequence_parallel": True}), ("fused", {"sequence_parallel": False})],
    ),
)
def test_the_numbers_are_those_of_one_device(form: str, options: dict[str, Any]) -> None:
    program = traced(form)
    whole = parameters(program, spanax.plan(program, "cpu:1", layout="data"))
    parts = parameters(program, spanax.plan(program, "cpu:8", mesh="model=4,groups=2", **options))
    for before, after in zip(whole, parts, strict=True):
        assert np.abs(before - after).max() <= 1e-5 * np.abs(before).max()


def test_a_value_that_groups_alone_shards_is_an_inner_part_of_the_sequence() -> None:
    program = traced("heads")
    plan = spanax.plan(program, "cpu:8", mesh="model=4,groups=2", sequence_parallel=True)
    assert plan["q.kernel"].spec == ((), ("model", "groups"), ()) and plan["k.kernel"].spec == ((), ("model",), ())
    assert plan["up.kernel"].spec == ((), ("model", "groups"))


def test_only_devices_with_one_key_each_share_its_queries() -> None:
    program = traced("heads")
    assert [num_groups(program, ways) for ways in (1, 2, 4, 8, 12, 16)] == [0, 0, 0, 2, 0, 0]
    uneven = spanax.plan(program, "cpu:16", mesh="model=4,groups=4")
    assert uneven["q.kernel"].spec == ((), ("model",), ()) and uneven["up.kernel"].spec == ((), ("model", "groups"))
    assert uneven["q.kernel"].reason == "heads (4) is not divisible by 16"
    assert str(spanax.search(program, "cpu:8", layout="tensor").best.mesh) == "model=4,groups=2"  # type: ignore[union-attr]


def test_groups_without_model_is_refused_and_model_alone_is_told_of_groups() -> None:
    program = traced("heads")
    with pytest.raises(MeshError, match="further what 'model' shards"):
        spanax.plan(program, "cpu:2", mesh="groups=2")
    cluster = spanax.cluster("cpu:8")
    findings = lint(program, spanax.plan(program, cluster, mesh="model=8"), cluster)
    fixes = [finding.fix for finding in findings if finding.code == "SPX006"]
    assert fixes == ["mesh model=4,groups=2, or 4 shards"]
