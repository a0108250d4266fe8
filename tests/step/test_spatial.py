"""Images and videos sharded along height: the numbers of one device, planned bytes and FLOPs, and no image gathered."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from spanax.errors import SpanaxError
from spanax.trace.program import Program


class ResNet(nnx.Module):
    """Strides, a projection, BatchNorm over the positions of all images, and a pool whose windows overlap."""

    def __init__(self, rngs: nnx.Rngs):
        self.stem = nnx.Conv(3, 8, (7, 7), strides=2, padding=3, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.conv = nnx.Conv(8, 16, (3, 3), strides=2, padding=1, rngs=rngs)
        self.shortcut = nnx.Conv(8, 16, (1, 1), strides=2, rngs=rngs)
        self.head = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.norm(self.stem(x))  # negative, too: zeros around an image would be a maximum
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        return self.head((nnx.relu(self.conv(x)) + self.shortcut(x)).mean((1, 2)))


class UNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, resize: str):
        self.resize = resize
        self.enter = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.down = nnx.Conv(8, 16, (3, 3), strides=(2, 2), rngs=rngs)
        self.norm = nnx.GroupNorm(16, 4, rngs=rngs)
        self.middle = nnx.Conv(16, 16, (3, 3), rngs=rngs)
        up = nnx.ConvTranspose if resize == "transpose" else nnx.Conv
        self.up = up(
            16, 8, (2, 2) if resize == "transpose" else (3, 3), strides=2 if resize == "transpose" else 1, rngs=rngs
        )
        self.leave = nnx.Conv(16, 3, (3, 3), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        skip = nnx.silu(self.enter(x))
        h = nnx.silu(self.down(skip))
        h = h + self.middle(nnx.silu(self.norm(h)))
        if self.resize == "repeat":
            h = h.repeat(2, axis=1).repeat(2, axis=2)
        elif self.resize != "transpose":
            h = jax.image.resize(h, (h.shape[0], 2 * h.shape[1], 2 * h.shape[2], h.shape[3]), self.resize)
        return self.leave(jnp.concatenate([self.up(h), skip], axis=-1))


class Video(nnx.Module):
    """Convolutions over frames, height and width, one of them depthwise, and an average pool."""

    def __init__(self, rngs: nnx.Rngs):
        self.enter = nnx.Conv(3, 8, (3, 3, 3), rngs=rngs)
        self.down = nnx.Conv(8, 16, (3, 3, 3), strides=(1, 2, 2), rngs=rngs)
        self.depthwise = nnx.Conv(16, 16, (3, 5, 5), feature_group_count=16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.avg_pool(nnx.relu(self.enter(x)), (1, 2, 2), (1, 2, 2))
        x = nnx.relu(self.down(x))
        return x + self.depthwise(x)


class Digits(nnx.Module):
    """Pools of two kinds, a convolution without padding, and a flattened image, as in the tutorials."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.second = nnx.Conv(8, 8, (5, 5), kernel_dilation=2, rngs=rngs)
        self.valid = nnx.Conv(8, 8, (3, 3), padding="VALID", rngs=rngs)
        self.head = nnx.Linear(8 * 6 * 6, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.avg_pool(nnx.relu(self.norm(self.first(x))), (2, 2), strides=(2, 2))
        x = nnx.max_pool(nnx.relu(self.second(x)), (3, 3), strides=(1, 1), padding="SAME")
        x = self.valid(nnx.max_pool(x, (2, 2), strides=(2, 2)))
        return self.head(x.reshape(x.shape[0], -1))


MODELS: dict[str, tuple[Callable[..., nnx.Module], tuple[int, ...]]] = {
    "resnet": (ResNet, (4, 64, 16, 3)),
    "unet": (lambda rngs: UNet(rngs, "repeat"), (4, 32, 16, 3)),
    "unet-transpose": (lambda rngs: UNet(rngs, "transpose"), (4, 32, 16, 3)),
    "unet-linear": (lambda rngs: UNet(rngs, "linear"), (4, 32, 16, 3)),
    "video": (Video, (4, 6, 32, 16, 3)),
    "digits": (Digits, (4, 32, 32, 1)),
}


def batch(name: str) -> dict[str, np.ndarray]:
    return {"images": np.random.default_rng(0).normal(size=MODELS[name][1]).astype(np.float32)}


def program(name: str) -> Program:
    return spanax.trace(
        build=MODELS[name][0], loss=lambda model, batch: jnp.mean(jnp.tanh(model(batch["images"]) - 0.5) ** 2),
        optimizer=optax.sgd(0.5), batch=batch(name),
    )  # fmt: skip


def cases() -> list[Any]:
    slow = [
        *((name, "data=2,context=4") for name in MODELS if name != "resnet"),
        *(("resnet", mesh) for mesh in ("context=8", "context=2,model=4")),
        *(("video", mesh) for mesh in ("context=2,model=2,data=2",)),
    ]
    return [("resnet", "data=2,context=4"), *(pytest.param(*case, marks=pytest.mark.slow) for case in slow)]


@pytest.mark.parametrize(("name", "mesh"), cases())
def test_sharded_images_equal_one_device_at_the_planned_bytes(name: str, mesh: str) -> None:
    traced = program(name)
    plan = spanax.plan(traced, "cpu:8", mesh=mesh)
    assert "spatial" in plan.layout.name
    run, alone = (spanax.start(traced, each) for each in (plan, spanax.plan(traced, "cpu:1")))
    for _ in range(2):
        losses = [float(each.step(batch(name))["loss"]) for each in (run, alone)]
        np.testing.assert_allclose(*losses, rtol=1e-5)
    for path, array in alone.params().items():
        np.testing.assert_allclose(run.params()[path], array, rtol=1e-5, atol=2e-6)
    report = spanax.check(traced, plan, "cpu:8", level=2)
    assert report.compiled.collectives == report.predicted.collectives
    assert report.compiled.flops == report.predicted.flops
    assert report.compiled.collectives["context"]["collective-permute"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet", "video"])
def test_no_image_is_gathered(name: str) -> None:
    traced = program(name)
    report = spanax.check(traced, spanax.plan(traced, "cpu:8", mesh="context=4,data=2"), "cpu:8", level=2)
    pooled = 4 * 6 * 16 * 8 * 8 * 4  # the gradient of an average pool is padded on every device
    gathered = report.compiled.collectives["context"].get("all-gather", 0)
    assert gathered <= (pooled if name == "video" else 0)


def test_large_images_are_sharded_where_the_batch_is_smaller_than_the_devices() -> None:
    images = {"images": jax.ShapeDtypeStruct((2, 2048, 2048, 3), jnp.bfloat16)}
    traced = spanax.trace(
        build=ResNet, loss=lambda model, batch: jnp.mean(model(batch["images"])), optimizer=optax.sgd(0.5), batch=images
    )
    plan = spanax.plan(traced, "v5e:8")
    assert "spatial" in plan.layout.name and "images are sharded over context=4" in str(plan)


@pytest.mark.parametrize(
    ("shape", "layout", "text"),
    [
        ((4, 28, 28, 3), "spatial", r"height .28. is not divisible by 8(.|\n)*layout 'spatial'"),
        ((8, 64), "spatial", "shards images"),
    ],
)
def test_refusals_give_the_reason(shape: tuple[int, ...], layout: str, text: str) -> None:
    build = ResNet if len(shape) == 4 else lambda rngs: nnx.Linear(64, 64, rngs=rngs)
    traced = spanax.trace(
        build=build, loss=lambda model, batch: jnp.mean(model(batch["x"])), optimizer=optax.sgd(0.5),
        batch={"x": jax.ShapeDtypeStruct(shape, jnp.float32)},
    )  # fmt: skip
    with pytest.raises(SpanaxError, match=text):
        spanax.plan(traced, "cpu:8", layout=layout, mesh="context=8")
