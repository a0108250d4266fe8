"""Remat on devices: a step returns equal values under every policy, on one device and on eight."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import spanax
import zoo
from sampling import sampled
from spanax.models import gpt
from spanax.trace.program import Program
from spanax.trace.rewrites.remat import rematerialized
from spanax.train.config import TrainConfig
from spanax.train.trainer import train

SIZE, STEPS = 8, 2
TOLERANCE = 1e-6
"""Largest difference over the largest value of the array (or over 1e-3), for two orders of the same float32 sums."""

TINY = gpt.GPTConfig(vocab_size=64, seq_len=16, num_layers=2, num_heads=4, embed_dim=32)
TEXT = zoo.batches(inputs=zoo.ints(64, 16), targets=zoo.ints(64, 16))


def case(loss: Any, batch: Any, build: Any) -> zoo.Case:
    return zoo.Case(build, loss, batch, optax.sgd(1.0))  # the state after a step holds the gradient


def of_gpt(**changes: Any) -> zoo.Case:
    return case(gpt.loss, TEXT, functools.partial(gpt.GPT, dataclasses.replace(TINY, **changes)))


CASES: dict[str, zoo.Case] = {
    "scanned": of_gpt(),
    "scanned, three layers, dropout": of_gpt(num_layers=3, dropout=0.2),
    "scanned, its own remat, dropout": of_gpt(remat=True, dropout=0.2),
    "unrolled, its own remat": of_gpt(scan_layers=False, remat=True),
    "mlp with dropout": case(zoo.squared_error, zoo.VECTORS, functools.partial(zoo.MLP, rate=0.3)),
    "cnn with batch norm": case(zoo.cross_entropy, zoo.IMAGES, zoo.CNN),
}
ON_HOST = "tanh.1+dot_general.1@host"

TRIED = [
    (name, policy) for name in (*CASES,)[:4] if "three" not in name for policy in ("none", "dots", "full", ON_HOST)
]
TRIED += [("mlp with dropout", "dots"), ("cnn with batch norm", "dots")]

TRIED += [("scanned, three layers, dropout", policy) for policy in ("dots:1", "full:2", "full:2,dots", f"{ON_HOST}:1")]
TRIED += [("scanned, three layers, dropout", ON_HOST + "+input.1@host:2,input.1@host")]
TRIED += [("scanned, three layers, dropout", "dot_general.1-2+tanh.1"), ("scanned", "full:1,add.1-3+dot_general.1")]
TRIED += [(name, "full:1") for name in ("scanned", "scanned, its own remat, dropout", "unrolled, its own remat")]

# Every kind of layers, and of what the forward pass draws and changes; `slow` is all of it.
QUICK = [
    ("scanned", "full"),
    ("cnn with batch norm", "dots"),
    ("scanned, three layers, dropout", ON_HOST + "+input.1@host:2,input.1@host"),
    ("scanned", "full:1,add.1-3+dot_general.1"),
    ("unrolled, its own remat", "full:1"),
]


@functools.cache
def program(name: str) -> Program:
    built = CASES[name]
    return spanax.trace(
        build=built.build, optimizer=built.optimizer, batch=built.batch(SIZE), loss=built.loss, clip_norm=0.5
    )


def numbers(array: Any) -> np.ndarray:
    is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array).astype(np.float64)


def trained(name: str, policy: str | None, layout: str = "data", mesh: str = "") -> dict[str, np.ndarray]:
    """Loss and gradient norm of every step, and all of the state after the last."""
    built = program(name).variant(remat=policy)
    cluster = spanax.cluster("cpu", spanax.MeshShape.of(mesh).size)
    run = spanax.start(built, spanax.plan(built, cluster, layout=layout, **({"mesh": mesh} if mesh else {})), seed=3)
    rows = CASES[name].batch(STEPS * SIZE)
    reported = [run.step({key: value[index * SIZE :][:SIZE] for key, value in rows.items()}) for index in range(STEPS)]
    metrics = {key: np.array([float(each[key]) for each in reported]) for key in reported[0]}
    return metrics | {path: numbers(array) for path, array in run.arrays().items()}


@functools.cache
def as_written(name: str) -> dict[str, np.ndarray]:
    return trained(name, None)


def furthest(expected: dict[str, np.ndarray], result: dict[str, np.ndarray]) -> dict[str, float]:
    assert expected.keys() == result.keys()
    scale = {path: max(np.abs(value).max(initial=0), 1e-3) for path, value in expected.items()}
    return {path: float(np.abs(value - result[path]).max(initial=0) / scale[path]) for path, value in expected.items()}


@pytest.mark.parametrize(("name", "policy"), sampled(TRIED, QUICK))
def test_the_same_numbers(name: str, policy: str) -> None:
    result = furthest(as_written(name), trained(name, policy))
    assert {"loss", "grad_norm"} <= result.keys()
    assert {path: much for path, much in result.items() if not much <= TOLERANCE} == {}


SPLIT = [
    (policy, *cell)
    for policy in ("full", "dots", ON_HOST + "+input.1@host", "full:1")
    for cell in (("fsdp", "fsdp=8"), ("fsdp+tensor", "fsdp=4,model=2"))
]


@pytest.mark.parametrize(("policy", "layout", "mesh"), sampled(SPLIT, [SPLIT[7]]))
def test_a_layout_gives_the_numbers_of_one_device(policy: str, layout: str, mesh: str) -> None:
    result = furthest(as_written("scanned"), trained("scanned", policy, layout, mesh))
    assert {path: much for path, much in result.items() if not much <= 10 * TOLERANCE} == {}


@pytest.mark.parametrize(
    ("name", "policy", "moves"),
    [
        pytest.param("scanned, its own remat, dropout", "full", "count", marks=pytest.mark.slow),
        ("mlp with dropout", "dots", "count"),
        ("cnn with batch norm", "dots", "mean"),
    ],
)
def test_the_forward_pass_updates_state_once(name: str, policy: str, moves: str) -> None:
    """Counts of random numbers and running averages: though the forward pass ran twice."""
    after = []
    for built in (program(name), program(name).variant(remat=policy)):
        run = spanax.start(built, spanax.plan(built, spanax.cluster("cpu:1")))
        before = {path: numbers(array) for path, array in run.arrays("other").items() if path.endswith(moves)}
        run.step(CASES[name].batch(SIZE))
        after.append({path: numbers(run.arrays()[path]) for path in before})
    assert after[0] and all(np.any(after[0][path] != before[path]) for path in before)
    for path in before:
        np.testing.assert_allclose(after[1][path], after[0][path], rtol=TOLERANCE)


@jax.custom_vjp
def sine(x: Any) -> Any:
    return jnp.sin(x)


sine.defvjp(lambda x: (sine(x), x), lambda x, g: (3 * g,))  # not the derivative: to see that it is this one


@pytest.mark.parametrize("policy", ["none", "dots", "full", "mul.1@host+input.1@host", "mul.1"])
def test_a_custom_derivative_is_preserved(policy: str) -> None:
    def loss(w: Any, x: Any) -> Any:
        return lax.scan(lambda x, w: (jax.jit(sine)(jax.nn.silu(x) @ w), None), x, w)[0].sum()

    w, x = (np.random.default_rng(0).normal(size=shape).astype(np.float32) for shape in ((3, 8, 8), (4, 8)))
    expected = jax.jit(jax.value_and_grad(loss))(w, x)
    result = jax.jit(jax.value_and_grad(rematerialized(loss, policy)))(w, x)
    for item, other in zip(expected, result, strict=True):
        np.testing.assert_allclose(other, item, rtol=TOLERANCE, atol=TOLERANCE * float(np.abs(item).max()))


@pytest.mark.parametrize("is_reverse", [False, True])
@pytest.mark.parametrize("policy", ["full:1", "dots:3", "full:2,dots", "mul.1+sin.1:2,dot_general.1"])
def test_a_loop_in_two_parts_equals_one_loop(policy: str, is_reverse: bool) -> None:
    """Rows, stacked results, random keys and consts of a loop of any direction: in the order of one loop."""

    def loss(w: Any, x: Any, scale: Any) -> Any:
        def layer(x: Any, row: Any) -> Any:
            key, w = row
            y = jnp.sin(x @ w * scale) + 0.1 * jax.random.normal(key, x.shape)
            return y, (y[0] * scale, key)

        keys = jax.random.split(jax.random.key(0), 4)
        x, (rows, used) = lax.scan(layer, x, (keys, w), reverse=is_reverse)
        noise = jax.vmap(jax.random.uniform)(used)
        return x.sum() + (rows * jnp.arange(4.0)[:, None]).sum() + (noise * jnp.arange(4.0)).sum()

    args = [np.random.default_rng(0).normal(size=shape).astype(np.float32) for shape in ((4, 8, 8), (3, 8), ())]
    expected = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*args)
    result = jax.jit(jax.value_and_grad(rematerialized(loss, policy), argnums=(0, 1, 2)))(*args)
    for item, other in zip(jax.tree.leaves(expected), jax.tree.leaves(result), strict=True):
        np.testing.assert_allclose(other, item, rtol=TOLERANCE, atol=TOLERANCE * float(np.abs(item).max()))


def test_train_passes_the_policy_on(tmp_path: Any) -> None:
    def load(**sizes: Any) -> spanax.Workload:
        build = lambda rngs: nnx.Linear(32, 16, rngs=rngs)  # noqa: E731
        rows = [zoo.VECTORS(SIZE)]
        return spanax.Workload(build=build, batch=rows[0], loss=zoo.squared_error, source=rows)

    config = TrainConfig("mine", remat="full", output_dir=str(tmp_path / "out"), steps=1)
    with pytest.raises(spanax.SpanaxError, match="remat 'full' has no layer"):
        train(load, config, jax.devices()[:1], lambda event: None)
