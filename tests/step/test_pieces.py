"""Weights whose dims are a concatenation: each device has its shard of every piece, in the numbers of one device."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from sampling import sampled
from spanax.plan.sharding.pieces import Interleaved, between
from spanax.step.replay.interleaving import in_order, interleaved
from spanax.trace.axes.pieces import Pieces

DIM, HEADS, KEYS, SIZE, LENGTH = 32, 8, 4, 4, 6
INNER, STATE = 64, 8
WIDTH = HEADS * SIZE

Parts = Callable[[Any, jax.Array], tuple[jax.Array, ...]]


def heads(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:2], -1, SIZE)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(*q.shape[:2], WIDTH)


def attended(parts: tuple[jax.Array, ...]) -> jax.Array:
    return attention(*map(heads, parts))


def by_head(x: jax.Array) -> tuple[jax.Array, ...]:
    """Queries, keys and values of heads, in front of the batch."""
    x = x.reshape(*x.shape[:2], 3, HEADS, SIZE).transpose(2, 0, 1, 3, 4)
    return x[0], x[1], x[2]


def state_space(parts: tuple[jax.Array, ...]) -> jax.Array:
    """Mamba 2 with one group: gate, inputs, the projections of the state, and a step for each head."""
    z, x, b, c, dt = parts
    x, dt = heads(x), jax.nn.softplus(dt)

    def step(h: jax.Array, inputs: Any) -> tuple[jax.Array, jax.Array]:
        x, b, c, dt = inputs
        h = h * jnp.exp(-dt)[..., None, None] + (dt[..., None] * x)[..., None] * b[:, None, None, :]
        return h, jnp.einsum("bhpn,bn->bhp", h, c)

    rows = jax.tree.map(lambda rows: rows.swapaxes(0, 1), (x, b, c, dt))
    _, y = jax.lax.scan(step, jnp.zeros((*x.shape[:1], *x.shape[2:], STATE)), rows)
    return y.swapaxes(0, 1).reshape(z.shape) * nnx.silu(z)


def nested(model: "Fused", x: jax.Array) -> tuple[jax.Array, ...]:
    """Pieces of a piece, after a convolution over channels of the outer one."""
    z, rest, dt = jnp.split(x, [WIDTH, 2 * WIDTH + 2 * STATE], -1)
    return z, *jnp.split(nnx.silu(model.conv(rest)), [WIDTH, WIDTH + STATE], -1), dt


def together(x: jax.Array) -> jax.Array:
    """Attention and an MLP in parallel, with one projection into both and one out of both."""
    *qkv, gate, up = jnp.split(x, [WIDTH, 2 * WIDTH, 3 * WIDTH, 3 * WIDTH + INNER], -1)
    return jnp.concatenate([attended(tuple(qkv)), nnx.silu(gate) * up], -1)


FORMS: Mapping[str, tuple[int, int, Callable[["Fused", jax.Array], jax.Array]]] = {
    "queries, keys and values split": (3 * WIDTH, WIDTH, lambda _, x: attended(tuple(jnp.split(x, 3, -1)))),
    "reshaped to three": (3 * WIDTH, WIDTH, lambda _, x: attention(*by_head(x))),
    "fewer keys, as slices": (
        WIDTH + 2 * KEYS * SIZE,
        WIDTH,
        lambda _, x: attended((x[..., :WIDTH], x[..., WIDTH : WIDTH + KEYS * SIZE], x[..., WIDTH + KEYS * SIZE :])),
    ),
    "fewer keys, as heads": (
        WIDTH + 2 * KEYS * SIZE,
        WIDTH,
        lambda _, x: attention(*jnp.split(heads(x), [HEADS, HEADS + KEYS], 2)),
    ),
    "gate split": (2 * INNER, INNER, lambda _, x: nnx.silu(x[..., :INNER]) * x[..., INNER:]),
    "gate reshaped": (
        2 * INNER,
        INNER,
        lambda _, x: (lambda y: nnx.silu(y[:, :, 0]) * y[:, :, 1])(x.reshape(*x.shape[:2], 2, INNER)),
    ),
    "state space": (2 * WIDTH + 2 * STATE + HEADS, WIDTH, lambda model, x: state_space(nested(model, x))),
    "attention beside an MLP": (3 * WIDTH + 2 * INNER, WIDTH + INNER, lambda _, x: together(x)),
}
"""The widths into and out of a form, and the form; some in two conventions."""

EXCHANGED = dict.fromkeys(FORMS, ("enter.kernel",)) | {"attention beside an MLP": ("enter.kernel", "leave.kernel")}
"""The weights that have pieces."""

MESHES = ("model=4", "fsdp=2,model=4", "data=2,model=2")


class Fused(nnx.Module):
    """A block with one projection into a form."""

    def __init__(self, form: str, rngs: nnx.Rngs):
        width, out, self.form = FORMS[form]
        self.enter, self.leave = nnx.Linear(DIM, width, rngs=rngs), nnx.Linear(out, DIM, rngs=rngs)
        channels = WIDTH + 2 * STATE
        self.conv = nnx.Conv(channels, channels, (3,), padding="CAUSAL", feature_group_count=channels, rngs=rngs)
        self.norm, self.last = nnx.RMSNorm(DIM, rngs=rngs), nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(x + self.leave(self.form(self, self.enter(self.norm(x)))))


def loss(model: Any, batch: Any) -> jax.Array:
    return jnp.square(model(batch["x"]) - batch["y"]).mean()


def batch() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: random.normal(size=(8, LENGTH, DIM)).astype(np.float32) for name in ("x", "y")}


def traced(form: str) -> spanax.Program:
    return spanax.trace(build=partial(Fused, form), optimizer=optax.sgd(0.1), batch=batch(), loss=loss)


def parameters(program: spanax.Program, plan: spanax.Plan) -> Any:
    run = spanax.start(program, plan, seed=1)
    for _ in range(2):
        run.step(batch())
    return jax.device_get(nnx.to_pure_dict(nnx.state(run.model(), nnx.Param)))


@pytest.mark.parametrize("form", sampled(FORMS, ["reshaped to three", "fewer keys, as heads", "state space"]))
def test_each_device_has_its_shard_of_every_piece(form: str) -> None:
    program = traced(form)
    plan = spanax.plan(program, "cpu:4", mesh="model=4")
    width = FORMS[form][0]
    assert plan["enter.kernel"].local_bytes == 4 * DIM * width / 4
    report = spanax.check(program, plan, "cpu:4", level=2)
    assert report.predicted.collectives == report.compiled.collectives
    assert report.predicted.flops == report.compiled.flops
    # Weights are exchanged, once for the step and once for their gradients, and no activation of any width is moved.
    weights = [leaf for leaf in plan.leaves if leaf.kind == "param" and leaf.path in EXCHANGED[form]]
    assert sum(found.bytes_once for found in report.collectives if found.kind == "all-to-all") == 2 * sum(
        leaf.local_bytes for leaf in weights
    )
    gathered = [found.bytes_once for found in report.collectives if found.kind not in ("all-to-all", "all-reduce")]
    assert max(gathered) <= 4 * 8 * LENGTH * (2 * STATE if form == "state space" else WIDTH // 4), gathered


@pytest.mark.parametrize(
    ("form", "mesh"),
    sampled(
        [(form, mesh) for form in FORMS for mesh in MESHES],
        [("queries, keys and values split", "fsdp=2,model=4"), ("attention beside an MLP", "model=4")],
    ),
)
def test_pieces_leave_the_numbers_of_one_device(form: str, mesh: str) -> None:
    program = traced(form)
    expected = parameters(program, spanax.plan(program, "cpu:1", layout="data"))
    num_devices = spanax.MeshShape.of(mesh).size
    found = parameters(program, spanax.plan(program, f"cpu:{num_devices}", mesh=mesh))
    for path, array in jax.tree.leaves_with_path(expected):
        other = dict(jax.tree.leaves_with_path(found))[path]
        assert np.abs(array - other).max() <= 1e-5 * np.abs(array).max(), jax.tree_util.keystr(path)


def test_an_interleaved_dim_has_the_shards_of_every_piece() -> None:
    dim = Interleaved(1, (4, 2, 2), ways=2)
    array = np.arange(16).reshape(2, 8)
    found = interleaved(jnp.asarray(array), dim)
    assert found[0].tolist() == [0, 1, 4, 6, 2, 3, 5, 7]
    np.testing.assert_array_equal(in_order(found, dim), array)


def test_pieces_of_sizes_that_a_mesh_axis_does_not_divide_stay_whole() -> None:
    assert Pieces((2, 1, 1), main=0).of(10) == ()
    program = traced("fewer keys, as heads")
    plan = spanax.plan(program, "cpu:8", mesh="model=8")
    assert plan["enter.kernel"].spec == ((), ()) and "not divisible by 8" in plan["enter.kernel"].reason


def test_an_array_is_exchanged_before_it_is_gathered_further() -> None:
    assert between((("fsdp", "model"), ()), ((), ("model",))) == (("fsdp",), ("model",))
    assert between((("fsdp",), ("model",)), ((), ("model",))) is None
