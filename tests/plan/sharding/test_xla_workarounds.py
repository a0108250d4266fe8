"""Defects of XLA that Spanax works around: JAX has them exactly in the versions that the records state."""

import subprocess
import sys
from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import spanax
from spanax.plan.sharding import operands, xla_workarounds
from spanax.plan.sharding.resolve import Constraint
from spanax.plan.sharding.xla_workarounds import CPU_COLLECTIVES, WORKAROUNDS, XlaWorkaround
from spanax.step.replay.replay import Replay
from spanax.trace.jaxpr.graph import from_jaxpr

VECTOR = np.linspace(-1, 2, 16, dtype=np.float32)
MATRIX = np.linspace(-1, 1, 32 * 16, dtype=np.float32).reshape(32, 16)
IMAGES = np.random.default_rng(0).normal(size=(16, 6, 6, 32)).astype(np.float32)
KERNEL = np.random.default_rng(1).normal(size=(3, 3, 4, 32)).astype(np.float32)


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def on(array: jax.Array, *spec: str | None) -> jax.Array:
    return lax.with_sharding_constraint(array, NamedSharding(mesh(), PartitionSpec(*spec)))


def error(sharded: Callable[..., jax.Array], plain: Callable[..., jax.Array], *args: np.ndarray) -> float:
    """The largest error of a sharded function, relative to the largest number; infinite where it does not compile."""
    replicated = NamedSharding(mesh(), PartitionSpec())
    expected = np.asarray(jax.jit(plain)(*args))
    try:
        result = np.asarray(jax.jit(sharded, out_shardings=replicated)(*jax.device_put(args, replicated)))
    except jax.errors.JaxRuntimeError:
        return float("inf")
    return float(np.abs(result - expected).max() / np.abs(expected).max())


def grouped_convolutions() -> bool:
    def loss(kernel: jax.Array, images: jax.Array) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        out = lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=8)
        return (out**2).mean()

    sharded = lambda kernel, images: jax.grad(loss)(kernel, on(images, "data"))  # noqa: E731
    return error(sharded, jax.grad(loss), KERNEL, IMAGES) > 0.5


def shard_scatters() -> bool:
    def sharded(hidden: jax.Array, scale: jax.Array) -> jax.Array:
        hidden, scale = on(hidden, "data", "model"), on(on(jnp.cumsum(scale) + scale), "model")
        return on(hidden * on(scale.at[3].set(0.0), "model"), "data", "model")

    plain = lambda hidden, scale: hidden * (jnp.cumsum(scale) + scale).at[3].set(0.0)  # noqa: E731
    return error(sharded, plain, MATRIX, VECTOR) > 0.1


def padded_dims() -> bool:
    cut = lambda x: lax.pad(jnp.cumsum(x), 0.0, [(-1, 1, 0)])  # noqa: E731
    dilated = lambda x: lax.pad(x, 0.0, [(0, 1, 1), (0, 0, 0)])  # noqa: E731
    is_wrong = error(lambda x: on(lax.pad(on(jnp.cumsum(x)), 0.0, [(-1, 1, 0)]), "model"), cut, VECTOR) > 0.1
    is_refused = error(lambda x: on(dilated(on(x)), "model"), dilated, MATRIX[:16, :8]) == float("inf")
    return is_wrong and is_refused


def cpu_transposes() -> bool:
    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return lax.dot_general(jnp.tanh(x), y, (((0, 1), (0, 1)), ((), ())))

    shapes = [jax.ShapeDtypeStruct((8, 64, width), "float32") for width in (32, 48)]
    return " transpose(" in jax.jit(product).lower(*shapes).compile().as_text()


def resized_dims() -> bool:
    """The smallest known case is a sorted mixture of experts: the step of Spanax, without the workaround."""

    class Experts(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.router = nnx.Linear(8, 8, rngs=rngs)
            self.up = nnx.Param(jax.random.normal(rngs.params(), (8, 8, 8)))

        def __call__(self, x: jax.Array) -> jax.Array:
            chosen = self.router(x).argmax(-1)
            sizes = jnp.bincount(chosen, length=8).astype(jnp.int32)
            scale = 1.0 + jnp.abs(jnp.diff(sizes)).sum()
            rows = x[jnp.argsort(chosen)] * jnp.arange(32)[:, None]  # their order matters, so they are gathered
            return scale * lax.ragged_dot(rows, self.up[...], sizes)

    program = spanax.trace(
        build=Experts, optimizer=optax.sgd(0.1), batch=jax.ShapeDtypeStruct((32, 8), "float32"),
        loss=lambda model, x: (model(x) ** 2).mean(),
    )  # fmt: skip
    plan = spanax.plan(program, "cpu:4", layout="expert", mesh="data=2,expert=2")
    with mock.patch.object(operands, "resized", lambda *_: None):
        lowered = spanax.start(program, plan, seed=0).lower()
    try:
        lowered.compile()
    except jax.errors.JaxRuntimeError:
        return True
    return False


LOOKUP = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P
mesh = jax.make_mesh((2, 2, 2), ("pipe", "data", "model"), axis_types=(AxisType.Auto,) * 3)

def lookup(table, indices):
    rows = lax.with_sharding_constraint(table, P(("model", "data")))[indices]
    return lax.with_sharding_constraint(rows, P("data"))[None]

mapped = jax.shard_map(
    lookup, mesh=mesh, in_specs=(P(), P()), out_specs=P("pipe"), axis_names={"pipe"}, check_vma=False
)
jax.jit(mapped).lower(jax.ShapeDtypeStruct((16, 8), "float32"), jax.ShapeDtypeStruct((8, 4), "int32")).compile()
"""

EXTENDED = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((4, 2), ("fsdp", "model"), axis_types=(AxisType.Auto,) * 2)

def on(x, *spec):
    return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

def gradients(x, y):
    x = on(x, P.UNCONSTRAINED, "model")
    hidden = x * x
    bias = on(hidden.sum(0), ("model", "fsdp"))
    return bias, on(lax.dot_general(hidden, on(y, None, "fsdp"), (((0,), (0,)), ((), ()))), "model", "fsdp")

jax.jit(gradients).lower(jax.ShapeDtypeStruct((8, 32), "float32"), jax.ShapeDtypeStruct((8, 8), "float32")).compile()
"""


def aborts(code: str, message: str) -> bool:
    ended = subprocess.run(
        [sys.executable, "-c", code], env={"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0 or message in ended.stderr, ended.stderr
    return ended.returncode != 0


def manual_lookups() -> bool:
    return aborts(LOOKUP, "Check failed: partition_group_list")


def extended_operands() -> bool:
    return aborts(EXTENDED, "ReplicateOnLastTileDim should not be called")


DEFECTS: dict[str, Callable[[], bool]] = {
    "resized-dims": resized_dims,
    "grouped-convolutions": grouped_convolutions,
    "shard-scatters": shard_scatters,
    "padded-dims": padded_dims,
    "cpu-transposes": cpu_transposes,
    "manual-lookups": manual_lookups,
    "extended-operands": extended_operands,
}
RACES = {CPU_COLLECTIVES.name}
"""Defects that only some runs show; no test can tell that they are gone."""


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("workaround", WORKAROUNDS, ids=lambda workaround: workaround.name)
def test_jax_has_the_defect_in_the_stated_versions(workaround: XlaWorkaround) -> None:
    if workaround.name not in RACES:
        assert DEFECTS[workaround.name]() == workaround.is_needed(jax.__version__)


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("sum_spec", [("model", "data"), ("model",)])
def test_a_value_whose_sum_is_sharded_further_keeps_its_constraint(sum_spec: tuple[str, ...]) -> None:
    graph = from_jaxpr(jax.make_jaxpr(lambda x: (x * x).sum(0))(MATRIX))
    shared = Constraint(((), ("model",)), is_open=True)
    constraints = [shared, shared, Constraint((sum_spec,))]
    replay = Replay(graph, constraints, {}, mesh())
    text = str(jax.make_jaxpr(lambda x: replay.body(graph.body, [x]))(MATRIX))
    assert text.count("sharding_constraint[") == (3 if len(sum_spec) > 1 else 2)


def test_every_record_is_listed() -> None:
    records = [record for record in vars(xla_workarounds).values() if isinstance(record, XlaWorkaround)]
    assert sorted(record.name for record in records) == sorted(record.name for record in WORKAROUNDS)
