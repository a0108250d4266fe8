"""Meshes of the user: programs traced and run under `jax.set_mesh`, with Auto and with Explicit axes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import spanax
from byo import corpus
from sampling import sampled

BATCH = np.random.default_rng(0).normal(size=(16, 16)).astype("float32")
ROWS = P("data", None)
TABLE = np.linspace(0.5, 1.5, 16, dtype="float32")


class Net(nnx.Module):
    """Two layers; the subclasses place what is between them."""

    annotated = False

    def __init__(self, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.lecun_normal()
        up, down = (
            nnx.with_partitioning(init, axes) if self.annotated else init for axes in ((None, "model"), ("model", None))
        )
        self.up, self.down = (
            nnx.Linear(16, 32, kernel_init=up, rngs=rngs),
            nnx.Linear(32, 16, kernel_init=down, rngs=rngs),
        )
        self.table = jnp.asarray(TABLE)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.up(x))) * self.table


class Stacked(nnx.Module):
    """Blocks in a loop, under a remat, with a normalization and a dropout's key."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.vmap(Block)(rngs.split(3))

    def __call__(self, x: jax.Array) -> jax.Array:
        run = nnx.remat(lambda block, x: block(x))
        return nnx.scan(run, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm, self.up = nnx.LayerNorm(16, rngs=rngs), nnx.Linear(16, 32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        noise = jax.random.bernoulli(self.dropout.rngs(), 0.5, (16,))
        return x + self.down(nnx.gelu(self.up(self.norm(x)))) * noise


class Reshard(Net):
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = jax.sharding.reshard(nnx.relu(self.up(x)), P("data", "model"))
        return self.down(jax.sharding.reshard(hidden, ROWS))


class Dot(Net):
    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.dot(nnx.relu(self.up(x)), self.down.kernel[...], out_sharding=ROWS)


class Linear(Net):
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.up(x, out_sharding=P("data", "model"))), out_sharding=ROWS)


class Annotated(Net):
    annotated = True

    def __call__(self, x: jax.Array) -> jax.Array:
        is_explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
        return self.down(nnx.relu(self.up(x)), **({"out_sharding": ROWS} if is_explicit else {}))


class Constrained(Net):
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.lax.with_sharding_constraint(nnx.relu(self.up(x)), ROWS))


class Mapped(Net):
    """A product by hand: each part of the mesh along `model` adds its share, weighted by its number."""

    def __call__(self, x: jax.Array) -> jax.Array:
        def product(x: jax.Array, w: jax.Array) -> jax.Array:
            return jax.lax.psum(x @ w * (1.0 + jax.lax.axis_index("model")), "model")

        hidden, kernel = nnx.relu(self.up(x)), self.down.kernel[...]
        if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
            hidden = jax.sharding.reshard(hidden, P("data", "model"))
            kernel = jax.sharding.reshard(kernel, P("model", None))
        return jax.shard_map(product, in_specs=(P("data", "model"), P("model", None)), out_specs=ROWS)(hidden, kernel)


class PartlyMapped(Net):
    def __call__(self, x: jax.Array) -> jax.Array:
        scaled = lambda x: jax.nn.softmax(x) * jax.lax.psum(1.0, "data")  # noqa: E731
        return jax.shard_map(scaled, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})(super().__call__(x))


def loss(model: Any, x: jax.Array) -> jax.Array:
    return ((model(x) - x) ** 2).mean()


def user_mesh(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))


def by_nnx(build: Any, batch: Any) -> list[float]:
    """The losses of an ordinary loop under the mesh of the user."""
    model = build(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2, eps=0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
        value, grads = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, grads)
        return value

    return [float(step(model, optimizer, batch)) for _ in range(3)]


EXPLICIT: list[Any] = [Net, Stacked, Reshard, Dot, Linear, Annotated, Constrained, Mapped, PartlyMapped]
AUTO = [Net, Stacked, Annotated, Constrained, Mapped, PartlyMapped]
CASES = [(kind, AxisType.Explicit) for kind in EXPLICIT] + [(kind, AxisType.Auto) for kind in AUTO]
QUICK = [(kind, AxisType.Explicit) for kind in (Stacked, Linear, Annotated, Mapped, PartlyMapped)]
QUICK += [(Constrained, AxisType.Auto)]


@pytest.mark.parametrize(
    ("build", "kind"), sampled(CASES, QUICK), ids=lambda value: getattr(value, "__name__", str(value))
)
def test_a_program_under_a_mesh_of_the_user_trains_as_in_nnx(build: Any, kind: AxisType) -> None:
    mesh = user_mesh(kind)
    with jax.set_mesh(mesh):
        batch = jax.device_put(BATCH, P("data"))
        expected = by_nnx(build, batch)
        program = spanax.trace(build=build, optimizer=optax.adam(1e-2, eps=0.1), batch=batch, loss=loss)
        plan = spanax.plan(program, spanax.cluster("cpu:8"), layout="fsdp+tensor", mesh="fsdp=4,model=2")
        run = spanax.start(program, plan)
        losses = [float(run.step(batch)["loss"])]
    losses += [float(run.step(BATCH)["loss"])]  # outside of the mesh
    with jax.set_mesh(mesh):
        losses += [float(run.evaluate(BATCH)["loss"]) if build is not Stacked else expected[2]]
        assert run.model() is not None and run.arrays()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


class Asserting(Constrained):
    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(jax.sharding.reshard(jax.lax.with_sharding_constraint(x, ROWS), ROWS))


def test_a_program_that_jax_refuses_under_the_mesh_raises_with_a_fix() -> None:
    with jax.set_mesh(user_mesh(AxisType.Explicit)):
        with pytest.raises(spanax.SpanaxError, match="under the Explicit mesh data=4,model=2") as caught:
            spanax.trace(build=Asserting, optimizer=optax.sgd(0.1), batch=BATCH, loss=loss)
        assert "jax.device_put(batch" in str(caught.value)
        batch = jax.device_put(BATCH, P("data"))
        spanax.trace(build=Asserting, optimizer=optax.sgd(0.1), batch=batch, loss=loss)


def test_a_variant_that_jax_cannot_type_raises_with_a_fix() -> None:
    with pytest.raises(spanax.SpanaxError, match="under the Explicit mesh data=4,model=2"):
        corpus.program("explicit").variant(loss_chunks=4)


class Untyped(nnx.Module):
    """Layers that JAX refuses for a typed batch: the output of an embedding, and the mask of a dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed, self.dropout = nnx.Embed(32, 16, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
        self.up = nnx.Linear(16, 32, kernel_metadata={"out_sharding": (None, "model")}, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.up(self.dropout(self.embed(x)))


def tokens_step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
    value, gradients = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, gradients)
    return value


@pytest.mark.parametrize("is_typed", [False, True])
@pytest.mark.parametrize("request_mesh", ["none", "mesh", "text"])
def test_objects_of_an_explicit_mesh_train_in_place_and_stay_on_it(request_mesh: str, is_typed: bool) -> None:
    tokens = np.arange(64, dtype="int32").reshape(16, 4) % 32

    def objects() -> tuple[Any, Any]:
        model = Untyped(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2, eps=0.1), wrt=nnx.Param)

    mesh = user_mesh(AxisType.Explicit)
    options = {"none": {}, "mesh": {"mesh": mesh}, "text": {"mesh": "data=4,model=2"}}[request_mesh]
    with jax.set_mesh(user_mesh(AxisType.Auto)):
        reference, plain = objects(), nnx.jit(tokens_step)
        expected = [float(plain(*reference, tokens)) for _ in range(3)]
    with jax.set_mesh(mesh):
        model, optimizer = objects()
        step = spanax.jit(tokens_step, **options)
        batch = jax.device_put(tokens, P("data")) if is_typed else tokens
        losses = [step(model, optimizer, batch) for _ in range(2)]
        total = losses[0] + losses[1]  # on the user's mesh, as are the arrays of the objects
        moment = optimizer.opt_state[0].mu["up"]["kernel"][...]
        assert (model.up.kernel[...] * moment).sharding.mesh == mesh
        assert nnx.jit(lambda model: model.up(np.ones((16, 16), "float32")))(model).shape == (16, 32)
        assert model.up.kernel[...].sharding.spec == P(None, "model")
        evaluated = spanax.jit(lambda model, x: model(x).sum(), like=step)(model, batch)
        assert (evaluated + total).shape == ()
    losses.append(step(model, optimizer, tokens))  # outside of the mesh
    # The evaluation drew a mask of the dropout, too.
    np.testing.assert_allclose([*map(float, losses[:2])], expected[:2], rtol=1e-5)
    assert np.isfinite(float(losses[2]))


def test_results_on_other_axes_than_those_of_the_explicit_mesh_can_be_used() -> None:
    with jax.set_mesh(user_mesh(AxisType.Explicit)):
        model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
        total = spanax.jit(lambda model, x: model(x).sum(), mesh="fsdp=8")(model, BATCH)
        assert (total + 1).shape == ()


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_a_shard_map_over_other_devices_is_refused(kind: AxisType) -> None:
    with jax.set_mesh(user_mesh(kind)):
        batch = jax.device_put(BATCH, P("data"))
        program = spanax.trace(build=Mapped, optimizer=optax.sgd(0.1), batch=batch, loss=loss)
    with pytest.raises(
        spanax.SpanaxError, match="jax.shard_map over data=4,model=2: 8 devices, and the mesh fsdp=4 has 4"
    ):
        spanax.plan(program, spanax.cluster("cpu:4"), layout="fsdp")


def test_an_exception_of_user_code_is_not_wrapped() -> None:
    def wrong(model: Any, x: jax.Array) -> jax.Array:
        raise ValueError("mine")

    with jax.set_mesh(user_mesh(AxisType.Explicit)), pytest.raises(ValueError, match="^mine"):
        spanax.trace(build=Net, optimizer=optax.sgd(0.1), batch=BATCH, loss=wrong)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sampled([AxisType.Explicit, AxisType.Auto], [AxisType.Explicit]))
def test_a_plan_for_another_number_of_devices_than_the_mesh_of_the_user(kind: AxisType, tmp_path: Any) -> None:
    with jax.set_mesh(user_mesh(kind)):
        program = spanax.trace(build=Stacked, optimizer=optax.adam(1e-2, eps=0.1), batch=BATCH, loss=loss)
        expected = by_nnx(Stacked, BATCH)
        plan = spanax.plan(program, spanax.local(jax.devices()[:2]), layout="data")
        run = spanax.start(program, plan, devices=jax.devices()[2:4])
        losses = [float(run.step(BATCH)["loss"])]
        run.save(tmp_path).wait()
        resumed = spanax.restore(program, plan, tmp_path)
        losses += [float(resumed.step(BATCH)["loss"]) for _ in range(2)]
        more = spanax.plan(program, spanax.cluster("cpu:16"), layout="data")
        report = spanax.check(program, more, "cpu:16", level=2, cache=False)
    assert report.compiled.state_bytes == more.state_bytes()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
