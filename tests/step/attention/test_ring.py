"""Attention on a sharded sequence gives the numbers of one device: in a ring, along heads, and in both."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from sampling import sampled
from spanax.errors import SpanaxError
from spanax.plan.layout import Layout
from spanax.plan.plan import Plan, Schedule
from spanax.stack.stack import Stack
from spanax.trace.optimizers.wrapped import PREFIX
from spanax.trace.program import Program
from spanax.train.run import Run

ROWS, LENGTH, WIDTH, HEADS, VOCAB = 4, 32, 16, 4, 32
TOLERANCE = 1e-5
"""Largest difference over the largest value, for the loss and each gradient, in float32."""

NOUGHT = 1e-6
"""A gradient that stays below this is rounding about zero (a key's bias under softmax), and is to stay below it."""

Given = dict[str, Any]


def plain(q: Any, k: Any, v: Any, inputs: Given) -> Any:
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k) / q.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores.astype(jnp.float32), -jnp.inf))
    return jnp.einsum("bhqs,bshk->bqhk", weights.astype(q.dtype), v)


def not_causal(q: Any, k: Any, v: Any, inputs: Given) -> Any:
    return jax.nn.dot_product_attention(q, k, v)


def causal(q: Any, k: Any, v: Any, inputs: Given) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def grouped(q: Any, k: Any, v: Any, inputs: Given) -> Any:
    return jax.nn.dot_product_attention(q, k[:, :, :2], v[:, :, :2], is_causal=True)


def padded(q: Any, k: Any, v: Any, inputs: Given) -> Any:
    # Rows of the padding are masked altogether: their softmax is that of equal logits.
    mask = nnx.combine_masks(nnx.make_causal_mask(inputs["x"]), nnx.make_attention_mask(inputs["real"], inputs["real"]))
    return nnx.dot_product_attention(q, k, v, mask=mask)


def masked(q: Any, k: Any, v: Any, inputs: Given) -> Any:
    return nnx.dot_product_attention(q, k, v, mask=inputs["mask"])


def biased(q: Any, k: Any, v: Any, inputs: Given) -> Any:
    return nnx.dot_product_attention(q, k, v, bias=inputs["bias"])


def sloped(q: Any, k: Any, v: Any, inputs: Given) -> Any:
    at, slopes = jnp.arange(q.shape[1]), 2.0 ** -(jnp.arange(q.shape[2]) + 1.0)
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k) - slopes[:, None, None] * (at[:, None] - at)
    return jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(jnp.where(at[:, None] >= at, scores, -1e9)), v)


def windowed(q: Any, k: Any, v: Any, inputs: Given) -> Any:
    at = jnp.arange(q.shape[1])
    seen = (at[:, None] >= at) & (at[:, None] - at < 6)
    scores = jnp.tanh(jnp.einsum("bqhk,bshk->bhqs", q, k) / 5) * 5
    return jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(jnp.where(seen, scores, -1e9)), v)


def pooled(q: Any, k: Any, v: Any, inputs: Given) -> Any:
    # One key per two queries.
    k, v = (item.reshape(item.shape[0], -1, 2, *item.shape[2:]).mean(2) for item in (k, v))
    return jax.nn.dot_product_attention(q, k, v)


ATTENTIONS = {
    item.__name__: item
    for item in (plain, not_causal, causal, grouped, padded, masked, biased, sloped, windowed, pooled)
}


class Block(nnx.Module):
    def __init__(self, attend: Callable[..., Any], rngs: nnx.Rngs):
        heads = (HEADS, WIDTH // HEADS)
        self.attend, self.norm = attend, nnx.LayerNorm(WIDTH, rngs=rngs)
        self.q, self.k, self.v = (nnx.LinearGeneral(WIDTH, heads, rngs=rngs) for _ in range(3))
        self.out = nnx.LinearGeneral(heads, WIDTH, axis=(-2, -1), rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 32, rngs=rngs), nnx.Linear(32, WIDTH, rngs=rngs)
        if attend is biased:
            self.bias = nnx.Param(jax.random.normal(rngs.params(), (1, HEADS, LENGTH, LENGTH)))

    def __call__(self, x: Any, inputs: Given) -> Any:
        h = self.norm(x)
        inputs = inputs | ({"bias": self.bias[...]} if self.attend is biased else {})
        x = x + self.out(self.attend(self.q(h), self.k(h), self.v(h), inputs))
        return x + self.down(jax.nn.gelu(self.up(x)))


class Model(nnx.Module):
    def __init__(self, attend: Callable[..., Any], rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.block, self.head = Block(attend, rngs), nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, inputs: Given) -> Any:
        return self.head(self.block(self.embed(inputs["x"]), inputs))


class Scanned(nnx.Module):
    def __init__(self, remat: str | None, rngs: nnx.Rngs):
        self.embed, self.head = nnx.Embed(VOCAB, WIDTH, rngs=rngs), nnx.Linear(WIDTH, VOCAB, rngs=rngs)
        self.blocks = Stack(functools.partial(_Masked), 2, rngs=rngs, remat=remat)

    def __call__(self, inputs: Given) -> Any:
        real = nnx.make_attention_mask(inputs["real"], inputs["real"])
        mask = nnx.combine_masks(nnx.make_causal_mask(inputs["x"]), real)  # once, for all layers
        return self.head(self.blocks(self.embed(inputs["x"]), mask))


class _Masked(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.block = Block(masked, rngs)

    def __call__(self, x: Any, mask: Any) -> Any:
        return self.block(x, {"mask": mask})


class Heads(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed, self.head = nnx.Embed(VOCAB, WIDTH, rngs=rngs), nnx.Linear(WIDTH, VOCAB, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)

    def __call__(self, inputs: Given) -> Any:
        x = self.embed(inputs["x"])
        return self.head(x + self.attend(x, mask=nnx.make_causal_mask(inputs["x"])))


def loss(model: Any, batch: Given) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch), batch["y"]).mean()


@functools.cache
def batch() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    tokens = {key: random.integers(0, VOCAB, (ROWS, LENGTH)).astype("int32") for key in "xy"}
    real = np.arange(LENGTH) < np.asarray([LENGTH, 20, 7, 31])[:, None]
    mask = (random.random((ROWS, 1, LENGTH, LENGTH)) > 0.4) | np.eye(LENGTH, dtype=bool)
    return tokens | {"real": real, "mask": mask}


BUILDS: dict[str, Callable[[nnx.Rngs], nnx.Module]] = {
    **{name: functools.partial(Model, attend) for name, attend in ATTENTIONS.items()},
    "scan": functools.partial(Scanned, None),
    "remat": functools.partial(Scanned, "full"),
    "heads": Heads,
}


@functools.cache
def program(name: str) -> Program:
    build = BUILDS[name]
    traced = spanax.trace(build=lambda rngs: build(rngs=rngs), optimizer=optax.sgd(0.1), batch=batch(), loss=loss)
    return traced.variant(records_gradients=True)


def ring_plan(name: str, mesh: str, **schedule: Any) -> Plan:
    return spanax.plan(program(name), spanax.cluster("cpu:8"), mesh=mesh, schedule=Schedule(context="ring", **schedule))


def numbers(run: Run) -> dict[str, np.ndarray]:
    """The loss of a step, the loss of an evaluation and every gradient of the step."""
    result = {"evaluated": run.evaluate(batch())["loss"], "loss": run.step(batch())["loss"]}
    result |= {path: array for path, array in run.arrays().items() if path.startswith(PREFIX)}
    return {path: np.asarray(array, np.float64) for path, array in result.items()}


@functools.cache
def on_one_device(name: str) -> dict[str, np.ndarray]:
    return numbers(spanax.start(program(name), spanax.plan(program(name), spanax.cluster("cpu:1"), layout="data")))


def differences(result: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, float]:
    assert result.keys() == expected.keys() and len(result) > 4
    sizes = {path: float(abs(array).max()) for path, array in expected.items()}
    return {
        path: float(abs(result[path] - array).max()) / sizes[path]
        if sizes[path] > NOUGHT
        else float(abs(result[path]).max() > NOUGHT)
        for path, array in expected.items()
    }


BOTH = Layout("both", computed=(("ring", ("seq",)), ("heads", ("seq",))))
"""Heads are sharded by the axis that divides them, and the sequence around a ring of the other."""

QUICK = [("ring", "padded", "data=2,context=4"), ("ulysses", "grouped", "context=4,model=2")]
"""Attention as models write it is in run/test_parity.py."""
CASES = [("ring", name, mesh) for name in BUILDS for mesh in ("context=8", "data=2,context=4", "context=4,model=2")]
CASES += [("ulysses", name, "context=4,model=2") for name in BUILDS]
CASES += [("ulysses", name, "data=2,context=4") for name in BUILDS if name != "grouped"]  # two heads of keys
CASES += [(BOTH, name, mesh) for name in ("causal", "biased", "scan") for mesh in ("ring=2,heads=4", "ring=8,heads=1")]


@pytest.mark.parametrize("form, name, mesh", sampled(CASES, QUICK))
def test_attention_on_a_sharded_sequence_gives_the_numbers_of_one_device(form: Any, name: str, mesh: str) -> None:
    schedule = Schedule(context="ulysses" if form is BOTH else "gathered")
    plan = spanax.plan(program(name), spanax.cluster("cpu:8"), layout=form, mesh=mesh, schedule=schedule)
    run = spanax.start(program(name), plan)
    problems = differences(numbers(run), on_one_device(name))
    assert max(problems.values()) < TOLERANCE, {path: item for path, item in problems.items() if item >= TOLERANCE}


def test_a_plan_records_its_ring(tmp_path: Any) -> None:
    plan = ring_plan("causal", "context=8")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan and plan.schedule.context == "ring"
    other = spanax.plan(program("causal"), spanax.cluster("cpu:8"), mesh="context=8")
    assert '"context":' not in other.to_json().split('"schedule"')[1].split("}")[0]
    assert "context: gathered -> ring" in other.diff(plan)


def test_a_ring_requires_attention() -> None:
    mlp = spanax.trace(
        build=lambda rngs: nnx.Linear(16, 16, rngs=rngs),
        optimizer=optax.sgd(0.1),
        batch=jax.ShapeDtypeStruct((8, 32, 16), "float32"),
        loss=lambda model, x: (model(x) ** 2).mean(),
    )
    with pytest.raises(SpanaxError, match="no softmax attention"):
        spanax.plan(mlp, spanax.cluster("cpu:8"), mesh="context=8", schedule=Schedule(context="ring"))


@functools.cache
def long_program(length: int, width: int = 8) -> Program:
    """One layer with tiny widths: memory is dominated by values that grow with the sequence."""

    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.embed, self.head = nnx.Embed(8, width, rngs=rngs), nnx.Linear(width, 8, rngs=rngs)
            self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)

        def __call__(self, tokens: Any) -> Any:
            x = self.embed(tokens)
            q, k, v = (item[:, :, None] for item in jnp.split(self.qkv(x), 3, -1))
            return self.head(x + jax.nn.dot_product_attention(q, k, v, is_causal=True)[:, :, 0])

    def loss(model: Any, batch: Given) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()

    tokens = {key: jax.ShapeDtypeStruct((1, length), "int32") for key in "xy"}
    return spanax.trace(build=lambda rngs: Layer(rngs), optimizer=optax.sgd(0.1), batch=tokens, loss=loss).variant(
        records_gradients=True
    )


def temporary_bytes(length: int, num_devices: int, layout: str) -> int:
    mesh = f"context={num_devices}"
    plan = spanax.plan(long_program(length), spanax.cluster(f"cpu:{num_devices}"), layout=layout, mesh=mesh)
    memory = spanax.start(long_program(length), plan).lower().compile().memory_analysis()
    return int(memory.temp_size_in_bytes)


@pytest.mark.slow
def test_memory_per_device_falls_with_the_size_of_the_ring() -> None:
    four, eight = (temporary_bytes(16384, num_devices, "ring") for num_devices in (4, 8))
    assert eight < 0.55 * four
    assert 40 * eight < temporary_bytes(16384, 8, "context")


@pytest.mark.slow
@pytest.mark.parametrize("form, kind", [("ring", "collective-permute"), ("ulysses", "all-to-all")])
@pytest.mark.parametrize("name, mesh", [("scan", "context=4,model=2"), ("biased", "data=2,context=4")])
def test_the_priced_communication_is_the_compiled(form: str, kind: str, name: str, mesh: str) -> None:
    """Bytes that go around or change places, sums and FLOPs: the plan's and the compiled program's, to the byte."""
    machine = spanax.cluster("cpu:8")
    plan = spanax.plan(program(name), machine, layout=form, mesh=mesh)
    report = spanax.check(program(name), plan, machine, cache=False)
    assert report.compiled is not None
    assert report.predicted.collectives == report.compiled.collectives
    assert report.predicted.collectives["context"][kind] > 0
    assert report.predicted.flops == report.compiled.flops


@pytest.mark.parametrize("form", ["ring", "ulysses"])
def test_a_form_of_attention_has_a_name_on_any_mesh(form: str) -> None:
    machine, built = spanax.cluster("cpu:8"), program("causal")
    plan = spanax.plan(built, machine, layout=form, mesh="fsdp=2,context=4")
    assert (plan.layout.name, plan.schedule.context, plan.layout.stored_params) == (f"fsdp+{form}", form, ("fsdp",))
    assert spanax.plan(built, machine, layout=form).mesh == spanax.plan(built, machine, layout="context").mesh


def test_a_ring_needs_a_sharded_sequence_and_heads_a_mesh_that_divides_them() -> None:
    machine, built = spanax.cluster("cpu:8"), program("causal")
    with pytest.raises(SpanaxError, match=r"heads or examples .*\n.*an attention of 4 x 4"):
        spanax.plan(built, machine, layout="ulysses", mesh="context=8")
    for asked in ({"layout": "ring", "mesh": "data=8"}, {"mesh": "data=8", "schedule": Schedule(context="ring")}):
        with pytest.raises(SpanaxError, match="context|shards sequences"):
            spanax.plan(built, machine, **asked)
    with pytest.raises(SpanaxError, match="unknown context form 'rings'"):
        spanax.plan(built, machine, mesh="context=8", schedule=Schedule(context="rings"))


def test_a_search_prices_a_ring() -> None:
    search_result = spanax.search(
        long_program(16384), spanax.cluster("h100:8"), layout="ring", microbatches=1, remat=("none",)
    )
    gathered = spanax.search(
        long_program(16384), "h100:8", layout="context", microbatches=1, remat=("none",), attention="plain"
    )
    assert search_result.best is not None and gathered.best is not None
    assert search_result.best.layout == "ring" and search_result.best.mesh == gathered.best.mesh
    assert search_result.model_flops == gathered.model_flops
    assert (
        search_result.best.flops < 0.75 * gathered.best.flops
        and search_result.best.peak_bytes < 0.1 * gathered.best.peak_bytes
    )
