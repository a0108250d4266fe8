"""Models that carry their author's sharding: names of axes, of mesh axes, and of mesh axes that another mesh has."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from sampling import sampled
from spanax.plan.plan import Plan
from spanax.trace.program import Program

CLUSTER = "cpu:8"


class Block(nnx.Module):
    """Two matmuls around a residual stream, with an annotation on both kernels."""

    def __init__(self, up: Any, down: Any, rngs: nnx.Rngs, width: int = 32, inner: int = 64):
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Linear(width, inner, kernel_init=nnx.with_partitioning(init, up), rngs=rngs)
        self.down = nnx.Linear(inner, width, kernel_init=nnx.with_partitioning(init, down), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.relu(self.up(x)))


class Stacked(nnx.Module):
    def __init__(self, up: Any, down: Any, rngs: nnx.Rngs, inner: int = 64):
        self.blocks = nnx.List([Block(up, down, rngs, inner=inner) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


def program(up: Any, down: Any, inner: int = 64) -> Program:
    return spanax.trace(
        build=lambda rngs: Stacked(up, down, rngs, inner),
        optimizer=optax.adam(1e-2, eps=1e-3),
        batch=jax.ShapeDtypeStruct((16, 32), "float32"),
        loss=lambda model, x: jnp.mean((model(x) - 1) ** 2),
    )


def spec(plan: Plan, path: str) -> Any:
    return plan[path].spec


# The mesh of the annotations is not always the mesh of the run: `tensor` is not an axis of `fsdp=4,model=2`.
THEIRS = (("fsdp", "tensor"), ("tensor", "fsdp"))


def test_a_layout_shards_an_axis_under_a_name_that_it_does_not_know() -> None:
    traced = program(*THEIRS)
    assert {leaf.path: leaf.axes for leaf in traced.leaves}["blocks.0.up.bias"] == ("tensor",)
    plan = spanax.plan(traced, CLUSTER, layout="fsdp+tensor", mesh="fsdp=4,model=2")
    assert spec(plan, "blocks.0.up.kernel") == (("fsdp",), ("model",))
    assert spec(plan, "blocks.1.down.kernel") == (("model",), ("fsdp",))
    assert "model" in spec(plan, "blocks.0.up.bias")[0]
    assert traced.rename({"tensor": "wide"}).axes != traced.axes
    renamed = spanax.plan(traced.rename({"tensor": "wide"}), CLUSTER, layout="fsdp+tensor", mesh="fsdp=4,model=2")
    assert [leaf.spec for leaf in renamed.leaves] == [leaf.spec for leaf in plan.leaves]


def test_an_annotated_axis_is_pinned_and_forbidden_by_name() -> None:
    traced = program(("narrow", "wide"), ("wide", "narrow"))
    with pytest.raises(spanax.SpanaxError, match="'model' .2. has nothing to shard"):
        spanax.plan(traced, CLUSTER, layout="tensor", mesh="data=4,model=2", forbid=["wide", "narrow"])
    pinned = spanax.plan(traced, CLUSTER, layout="tensor", mesh="data=4,model=2", pin={"wide": "model"})
    assert spec(pinned, "blocks.0.up.kernel") == ((), ("model",))
    assert pinned.leaves == spanax.plan(traced, CLUSTER, layout="tensor", mesh="data=4,model=2").leaves


def test_an_annotation_that_names_other_mesh_axes_is_stored_as_the_layout_stores() -> None:
    traced = program((None, "model"), ("model", None))
    plan = spanax.plan(traced, CLUSTER, layout="fsdp+tensor", mesh="fsdp=4,model=2")
    assert spec(plan, "blocks.0.up.kernel") == (("fsdp",), ("model",))
    assert plan["blocks.0.up.kernel"].reason == "as the model's author annotated it; stored over fsdp"
    replicated = spanax.plan(traced, CLUSTER, layout="data+tensor", mesh="data=4,model=2")
    assert spec(replicated, "blocks.0.up.kernel") == ((), ("model",))


def test_a_dim_of_size_one_is_replicated_with_a_reason() -> None:
    def build(rngs: nnx.Rngs) -> nnx.Module:
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        hidden = nnx.Linear(8, 32, kernel_init=init, rngs=rngs)
        return nnx.Sequential(hidden, nnx.Linear(32, 1, kernel_init=init, rngs=rngs))

    traced = spanax.trace(
        build=build, optimizer=optax.sgd(0.1), batch=jax.ShapeDtypeStruct((8, 8), "float32"),
        loss=lambda model, x: jnp.mean(model(x) ** 2),
    )  # fmt: skip
    plan = spanax.plan(traced, CLUSTER, layout="data+tensor", mesh="data=4,model=2")
    assert spec(plan, "layers.0.kernel") == ((), ("model",)) and spec(plan, "layers.1.kernel") == ((), ())
    assert plan["layers.1.kernel"].reason.startswith("annotated over model, and replicated because the dim has size 1")


MESHES = [("fsdp+tensor", "fsdp=4,model=2"), ("fsdp+tensor", "fsdp=4,tensor=2")]


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(("layout", "mesh"), sampled(MESHES, MESHES[1:]))
def test_an_annotated_model_has_the_losses_of_one_device(layout: str, mesh: str) -> None:
    traced, rows = program(*THEIRS), np.random.default_rng(0).normal(size=(3, 16, 32)).astype("float32")

    def losses(plan: Plan) -> list[float]:
        run = spanax.start(traced, plan)
        return [float(run.step(batch)["loss"]) for batch in rows]

    sharded = losses(spanax.plan(traced, CLUSTER, layout=layout, mesh=mesh))
    np.testing.assert_allclose(sharded, losses(spanax.plan(traced, "cpu:1", layout="data")), rtol=1e-5)
