"""Parity: any layout on eight devices gives the numbers of one device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
import zoo
from programs import calm_program as program
from sampling import sampled
from spanax.plan.place import as_planned
from spanax.train.run import Run

STEPS, SIZE = 3, 16
TOLERANCE = 1e-5
"""Largest difference over the largest value, for the loss and for each array of the state, in float32."""

NOUGHT = 1e-3
"""Arrays that stay below this are rounding about zero (a key's bias under softmax): held against it instead."""

LOOSER = {"optimizer": 1e-4, "mixed-dtype": 5e-2, "stem_norm": 2e-5}
"""Of moments, whose noise is that of a gradient and not of what it moves; of a model in bfloat16; of BatchNorm's sums
over all pixels of the batch.
"""

DATA = [("data", "data=8"), ("zero1", "fsdp=8"), ("zero2", "fsdp=8"), ("fsdp", "fsdp=8"), ("hsdp", "data=2,fsdp=4")]
TENSOR = [
    ("tensor", "model=8"),
    ("data+tensor", "data=4,model=2"),
    ("data+tensor", "data=2,model=4"),
    ("fsdp+tensor", "fsdp=4,model=2"),
    ("fsdp+tensor", "fsdp=2,model=4"),
]
SEQUENCE = [
    ("tensor+seq", "model=8"),
    ("fsdp+tensor+seq", "fsdp=2,model=4"),
    ("context", "data=4,context=2"),
    ("context", "data=2,context=4"),
    ("ring", "data=2,context=4"),
    ("ring", "fsdp=2,context=2,model=2"),
    ("ulysses", "data=2,context=4"),
]
EXPERT = [("expert", "expert=8"), ("expert", "data=4,expert=2")]

FEW = [("fsdp", "fsdp=8"), ("fsdp+tensor", "fsdp=4,model=2")]

MATRIX = dict.fromkeys(zoo.ZOO, FEW) | {
    "mlp": DATA + TENSOR,
    "dropout": DATA + TENSOR,
    "cnn": DATA + TENSOR + [("spatial", "data=2,context=4")],
    "gpt": DATA + TENSOR + SEQUENCE,
    "gqa": DATA + TENSOR + SEQUENCE,
    "moe": DATA
    + TENSOR
    + [item for item in SEQUENCE if item[0] not in ("ring", "ulysses")]
    + EXPERT,  # it has no attention
    "indexed-moe": FEW + EXPERT,
    "llama": FEW + SEQUENCE,
    "mixtral": FEW + EXPERT + [("context", "data=4,context=2"), (None, "expert=4,model=2"), (None, "fsdp=2,expert=4")],
    "qwen": FEW + SEQUENCE,
    "dropless": FEW + SEQUENCE + EXPERT,
    "ddpm": DATA + TENSOR,
}

# Every preset, every model of the first six and every kind of layer once, as cheap as it gets; `slow` is all of it.
QUICK = {
    "mlp": {"data", "zero1", "zero2", "fsdp", "hsdp", "tensor", "data+tensor", "fsdp+tensor"},
    "dropout": {"tensor"},
    "cnn": {"spatial", "tensor"},
    "gpt": {"fsdp+tensor+seq"},
    "gqa": {"context", "ring", "ulysses"},
    "moe": {"expert"},
    "indexed-moe": {"expert"},
} | dict.fromkeys(("annotated", "lora", "mixed-dtype"), {"fsdp"})


def cases() -> list[Any]:
    result = []
    for name, layouts in MATRIX.items():
        quick = set(QUICK.get(name, ()))
        for layout, mesh in layouts:
            marks = () if layout in quick else pytest.mark.slow
            quick.discard(layout)  # one mesh of each
            result.append(pytest.param(name, layout, mesh, marks=marks, id=f"{name}-{layout}-{mesh}"))
    return result


@functools.cache
def data(name: str) -> dict[str, np.ndarray]:
    return zoo.ZOO[name].batch(STEPS * SIZE)


def batch(name: str, step: int) -> dict[str, np.ndarray]:
    return {key: rows[step * SIZE : (step + 1) * SIZE] for key, rows in data(name).items()}


def numbers(array: jax.Array) -> np.ndarray:
    is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
    host = np.asarray(jax.random.key_data(array) if is_key else array)
    return host.astype(np.float64)


def trained(run: Run, name: str, steps: int = STEPS) -> dict[str, np.ndarray]:
    """The losses, and every array of the state after the last step."""
    losses = [float(run.step(batch(name, step))["loss"]) for step in range(steps)]
    return {"loss": np.array(losses)} | {path: numbers(array) for path, array in run.arrays().items()}


def on_one_device(name: str) -> Run:
    return spanax.start(program(name), spanax.plan(program(name), spanax.cluster("cpu:1"), layout="data"), seed=3)


def on_host(array: jax.Array) -> Any:
    """NumPy arrays, which are sharded during the transfer: for arrays on a device, JAX would compile programs."""
    return array.copy() if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key) else np.array(array)


@functools.cache
def reference(name: str) -> tuple[tuple[Any, ...], dict[str, np.ndarray]]:
    """The state that training starts from, and what one device makes of it."""
    run = on_one_device(name)
    born = tuple(on_host(array) for array in run.state)
    return born, trained(run, name)


def moved(name: str, layout: str | None, mesh: str) -> Run:
    """A run in a layout from the initial values of one device; initialization is compared in test_state.py."""
    cluster = spanax.cluster("cpu", spanax.MeshShape.of(mesh).size)
    plan = spanax.plan(program(name), cluster, layout=layout, mesh=mesh)
    devices = plan.mesh.build()
    pairs = zip(reference(name)[0], plan.leaves, strict=True)
    state = [jax.device_put(a.copy(), leaf.sharding(devices)) for a, leaf in pairs]
    return Run(as_planned(program(name), plan), plan, devices, state)


def differences(expected: dict[str, np.ndarray], result: dict[str, np.ndarray]) -> dict[str, float]:
    assert expected.keys() == result.keys()
    scale = {path: max(np.abs(value).max(initial=0), NOUGHT) for path, value in expected.items()}
    return {path: float(np.abs(value - result[path]).max(initial=0) / scale[path]) for path, value in expected.items()}


@pytest.mark.parametrize(("name", "layout", "mesh"), cases())
def test_a_layout_gives_the_numbers_of_one_device(name: str, layout: str | None, mesh: str) -> None:
    run = moved(name, layout, mesh)
    problems = differences(reference(name)[1], trained(run, name))
    bounds = {path: LOOSER.get(name, LOOSER.get(path.partition(".")[0], TOLERANCE)) for path in problems}
    assert {path: much for path, much in problems.items() if not much <= bounds[path]} == {}
    assert run.num_steps == STEPS


class Fourier(nnx.Module):
    """What comes out along the transformed dim meets weights that are split."""

    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(32, 128, rngs=rngs), nnx.Linear(128, 16, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.fft.fft(jax.nn.relu(self.up(x)), axis=-1).real / 8)


class Factors(nnx.Module):
    """A decomposition, a choice and a running sum."""

    def __init__(self, rngs: nnx.Rngs):
        self.up, self.rows, self.down = (nnx.Linear(*sizes, rngs=rngs) for sizes in ((32, 64), (8, 16), (16, 2)))

    def __call__(self, x):
        x = jax.lax.top_k(self.up(x), 64)[0].reshape(-1, 8, 8)
        x = jnp.linalg.cholesky(x @ x.mT / 8 + jnp.eye(8))
        return self.down(jax.nn.relu(self.rows(jnp.cumsum(x, axis=1)))).reshape(x.shape[0], 16)


class Strided(nnx.Module):
    """A scan by halves along what is split: it takes every second element, and puts others between them."""

    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(32, 128, rngs=rngs), nnx.Linear(128, 16, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.lax.associative_scan(jnp.add, jax.nn.relu(self.up(x)), axis=1) / 32)


class Solved(nnx.Module):
    """The determinant of a matrix that is stored split, and its inverse as the gradient."""

    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)
        self.matrix = nnx.Param(nnx.initializers.orthogonal()(rngs.params(), (16, 16)))

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(x))) @ self.matrix[...] + 0.1 * jnp.linalg.slogdet(self.matrix[...])[1]


@pytest.mark.parametrize(
    ("build", "layout", "mesh"),
    sampled(
        [(build, "fsdp+tensor", "fsdp=2,model=4") for build in (Fourier, Factors, Strided, Solved)]
        + [(build, "tensor", "model=8") for build in (Fourier, Factors)],
        [(Strided, "fsdp+tensor", "fsdp=2,model=4"), (Fourier, "tensor", "model=8"), (Factors, "tensor", "model=8")],
    ),
)
def test_kernels_that_xla_cannot_partition(build: Any, layout: str, mesh: str) -> None:
    program = spanax.trace(build=build, optimizer=optax.sgd(0.01), batch=batch("mlp", 0), loss=zoo.squared_error)
    losses = []
    for devices, options in ((1, {"layout": "data"}), (8, {"layout": layout, "mesh": mesh})):
        run = spanax.start(program, spanax.plan(program, spanax.cluster("cpu", devices), **options))
        losses.append([float(run.step(batch("mlp", step))["loss"]) for step in range(3)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=TOLERANCE)


def test_every_preset_is_tried() -> None:
    from spanax.plan.presets import PRESETS

    tried = {layout for layouts in QUICK.values() for layout in layouts}
    # Those with stages are tried in test_pipeline.py.
    without_stages = {name for name, axes in PRESETS.items() if "pipe" not in axes}
    assert {layout.removesuffix("+seq") for layout in tried} == without_stages
    assert all(layouts <= {layout for layout, _ in MATRIX[name]} for name, layouts in QUICK.items())


def test_small_differences_are_detected() -> None:
    """One weight off by a thousandth at the start, one example left out at the end: both show."""
    run = moved("mlp", "fsdp", "fsdp=8")
    at = next(i for i, leaf in enumerate(run.program.leaves) if leaf.path == "mid.kernel")
    run.state[at] = jax.device_put(np.asarray(run.state[at]) * np.float32(1.001), run.state[at].sharding)
    off = differences(reference("mlp")[1], trained(run, "mlp"))
    assert off["loss"] > TOLERANCE and off["up.kernel"] > TOLERANCE

    run = moved("mlp", "fsdp", "fsdp=8")
    for step in range(STEPS):
        rows = {key: value.copy() for key, value in batch("mlp", step).items()}
        if step == STEPS - 2:
            rows["x"][0] = 0
        run.step(rows)
    off = differences({"w": reference("mlp")[1]["mid.kernel"]}, {"w": numbers(run.params()["mid.kernel"])})
    assert off["w"] > TOLERANCE


def test_training_changes_what_is_compared() -> None:
    """Equal numbers mean something only where a step moves them well above the tolerance."""
    for name in ("mlp", "cnn", "gpt"):
        born, after = reference(name)
        for leaf, before in zip(program(name).leaves, born, strict=True):
            if leaf.kind == "param":
                assert np.abs(after[leaf.path] - numbers(before)).max() > 50 * TOLERANCE * NOUGHT, leaf.path
