"""Models in stages and on one device: what several files of tests train and hold against each other."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import spanax
from spanax.models import gpt, moe, vit
from spanax.plan.plan import Plan, Schedule
from spanax.trace.program import Program
from spanax.train.run import Run

STEPS, SIZE = 5, 16
TOLERANCE = 1e-5
"""Largest difference over the largest value of an array, in float32."""

NOUGHT = 1e-3
"""Arrays below this are rounding about zero (a key's bias under softmax): held against it instead."""

GPT = gpt.GPTConfig(32, seq_len=8, num_layers=4, num_heads=2, embed_dim=16, dropout=0.1)
VIT = vit.ViTConfig(8, 4, num_layers=4, num_heads=2, embed_dim=16, mlp_dim=32, num_classes=8)
MIXTRAL = moe.MoEConfig(32, 8, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=16, mlp_dim=32, num_experts=4)


def tokens() -> dict[str, np.ndarray]:
    rows = np.random.default_rng(0).integers(0, 32, (STEPS * SIZE, 9)).astype(np.int32)
    return {"inputs": rows[:, :-1], "targets": rows[:, 1:]}


def images() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    result = {"images": random.normal(size=(STEPS * SIZE, 8, 8, 3)).astype(np.float32)}
    return result | {"labels": random.integers(0, 8, STEPS * SIZE).astype(np.int32)}


def vit_loss(model: nnx.Module, batch: dict[str, Any]) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["images"]), batch["labels"]).mean()


MODELS: dict[str, tuple[Any, Any, Any]] = {
    "gpt": (lambda rngs: gpt.GPT(GPT, rngs), gpt.loss, tokens),
    "vit": (lambda rngs: vit.ViT(VIT, rngs), vit_loss, images),
    "mixtral": (lambda rngs: moe.Mixtral(MIXTRAL, rngs), moe.loss, tokens),
}


@functools.cache
def program(name: str, microbatches: int, remat: str | None = None) -> Program:
    """A model whose state holds the gradients of its last step too."""
    build, loss, batches = MODELS[name]
    batch = {key: rows[:SIZE] for key, rows in batches().items()}
    return spanax.trace(
        build=build,
        optimizer=optax.adamw(1e-2, eps=0.1),
        batch=batch,
        loss=loss,
        microbatches=microbatches,
        remat=remat,
        accumulate="mean" if name.startswith("mixtral") else "exact",  # each microbatch balances its own experts
    ).variant(records_gradients=True)


def numbers(array: jax.Array) -> np.ndarray:
    is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array).astype(np.float64)


def trained(run: Run, name: str) -> dict[str, np.ndarray]:
    """The losses, and every array of the state, the gradients too, after the last step."""
    rows = MODELS[name][2]()
    batches = [{key: of[step * SIZE : (step + 1) * SIZE] for key, of in rows.items()} for step in range(STEPS)]
    losses = [float(run.step(batch)["loss"]) for batch in batches]
    return {"loss": np.array(losses)} | {path: numbers(array) for path, array in run.arrays().items()}


@functools.cache
def reference(name: str, microbatches: int, remat: str | None = None) -> dict[str, np.ndarray]:
    """The same training on one device; in one batch, where microbatches are exact."""
    built = program(name, microbatches if name.startswith("mixtral") else 1, remat)
    return trained(spanax.start(built, spanax.plan(built, spanax.cluster("cpu:1"), layout="data"), seed=3), name)


def planned(program: Program, mesh: str, schedule: str) -> Plan:
    cluster = spanax.cluster("cpu", spanax.MeshShape.of(mesh).size)
    chunks = 2 if schedule == "interleaved" else 1
    asked = Schedule(pipeline=schedule, microbatches=program.microbatches, num_chunks=chunks)
    return spanax.plan(program, cluster, mesh=mesh, schedule=asked)


def assert_same(expected: dict[str, np.ndarray], result: dict[str, np.ndarray], tolerance: float = TOLERANCE) -> None:
    assert expected.keys() == result.keys()
    assert any(path.startswith("opt") or "grad" in path for path in expected), "the gradients are compared too"
    for path, reference in expected.items():
        scale = max(np.abs(reference).max(initial=0), NOUGHT)
        assert np.abs(reference - result[path]).max(initial=0) / scale <= tolerance, path


def ranked_layers(_: Any) -> Any:
    """An update that is smaller for each layer."""
    scale = lambda update: update / (1 + jnp.arange(len(update)).reshape(-1, *[1] * (update.ndim - 1)))  # noqa: E731
    return optax.GradientTransformation(
        lambda params: optax.EmptyState(), lambda updates, state, params=None: (jax.tree.map(scale, updates), state)
    )
