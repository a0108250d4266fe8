"""`spanax.shardings` and `Plan.constrain`: the layout of a plan under the user's own `jax.jit`."""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from spanax.check.hlo.collectives import collectives, totals
from spanax.jit.shardings import placements
from spanax.plan.plan import Schedule

MESH = "fsdp=4,model=2"
X, Y = (np.random.default_rng(seed).normal(size=(16, 32)).astype("float32") for seed in range(2))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.down = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.relu(self.up(x)))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


def make_objects() -> tuple[Model, nnx.Optimizer]:
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def train_step(model: Model, optimizer: nnx.Optimizer, batch: dict[str, Any], power: int = 2) -> jax.Array:
    loss, gradients = nnx.value_and_grad(lambda model: (abs(model(batch["x"]) - batch["y"]) ** power).mean())(model)
    optimizer.update(model, gradients)
    return loss


def plan_of(mesh: str = MESH) -> spanax.Plan:
    plan: spanax.Plan = spanax.jit(train_step, mesh=mesh).prepare(*nnx.eval_shape(make_objects), {"x": X, "y": Y})
    return plan


def sharded_bytes(compiled: Any) -> dict[str, dict[str, int]]:
    module = compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    return totals(collectives(module, spanax.MeshShape.of(MESH)))


def under_jax_jit(function: Any, plan: spanax.Plan) -> Any:
    """`function` under the user's `jax.jit`, with the shardings of the plan for its state."""
    graphdef = nnx.graphdef(nnx.eval_shape(make_objects))
    shardings = spanax.shardings(nnx.eval_shape(make_objects), plan)

    def run(state: Any, batch: Any) -> Any:
        objects = nnx.merge(graphdef, state, copy=True)
        loss = function(*objects, batch)
        return nnx.state(objects), loss

    return jax.jit(run, in_shardings=(shardings, None), out_shardings=(shardings, None), donate_argnums=0)


def test_shardings_are_a_pytree_of_the_state() -> None:
    plan, objects = plan_of(), make_objects()
    model, optimizer = objects
    mesh = plan.mesh.build()
    for node in (model, optimizer, objects, nnx.eval_shape(make_objects)):
        shardings = spanax.shardings(node, plan, mesh=mesh)
        assert jax.tree.structure(shardings) == jax.tree.structure(nnx.state(node))
    assert shardings[0]["blocks"][0]["up"]["kernel"].get_value() == plan["blocks.0.up.kernel"].sharding(mesh)
    moments = shardings[1]["opt_state"][0]["mu"]["blocks"][0]["up"]["kernel"].get_value()
    assert moments == plan["optimizer.opt_state.0.mu.blocks.0.up.kernel"].sharding(mesh)
    assert not moments.is_fully_replicated
    nnx.update(model, jax.device_put(nnx.state(model), spanax.shardings(model, plan)))
    assert model.blocks[0].up.kernel.sharding == plan["blocks.0.up.kernel"].sharding(mesh)
    of_model = nnx.StateSharding(spanax.shardings(model, plan))
    result = nnx.jit(lambda model: model, in_shardings=(of_model,), out_shardings=of_model)(make_objects()[0])
    assert result.blocks[1].down.kernel.sharding.is_equivalent_to(plan["blocks.1.down.kernel"].sharding(mesh), 2)
    devices = jax.devices()[::-1]
    assert spanax.shardings(model, plan, devices=devices)["blocks"][0]["up"]["bias"].mesh.devices.flat[0] == devices[0]


def test_shardings_of_a_second_model_are_those_of_its_argument() -> None:
    def distill(student: Model, teacher: Model, x: Any) -> Any:
        loss, gradients = nnx.value_and_grad(lambda student: ((student(x) - teacher(x)) ** 2).mean())(student)
        nnx.update(student, jax.tree.map(lambda p, g: p - g, nnx.state(student, nnx.Param), gradients))
        return loss

    models = Model(nnx.Rngs(0)), Model(nnx.Rngs(1))
    plan = spanax.jit(distill, mesh="fsdp=8").prepare(*models, X)
    mesh = plan.mesh.build()
    paths = [placement.path for placement in plan.leaves]
    assert "teacher.blocks.0.up.kernel" in paths
    assert [placement.path for placement in placements(models, plan)] == paths
    shardings = jax.tree.leaves(spanax.shardings(models, plan, mesh=mesh))
    assert shardings == [plan[path].sharding(mesh) for path in paths]


def test_shardings_of_other_objects_or_meshes_raise() -> None:
    plan = plan_of()
    with pytest.raises(spanax.SpanaxError, match="no leaf 'bias'"):
        spanax.shardings(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), plan)
    wide = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    wide.blocks[0].up.bias.set_value(jax.ShapeDtypeStruct((65,), "float32"))
    with pytest.raises(spanax.SpanaxError, match=r"`blocks.0.up.bias` is float32\[65\], and float32\[64\] in the plan"):
        spanax.shardings(wide, plan)
    with pytest.raises(spanax.SpanaxError, match="not the mesh of the plan"):
        spanax.shardings(make_objects()[0], plan, mesh=spanax.MeshShape.of("fsdp=8").build())


def test_a_constrained_step_has_the_collectives_of_spanax_jit() -> None:
    step, batch = spanax.jit(train_step, mesh=MESH), {"x": X, "y": Y}
    plan = step.prepare(*nnx.eval_shape(make_objects), batch)
    expected = sharded_bytes(step.lower().compile())
    jitted = under_jax_jit(plan.constrain(train_step), plan)
    abstract = nnx.state(nnx.eval_shape(make_objects))
    assert sharded_bytes(jitted.lower(abstract, batch).compile()) == expected
    assert expected and sharded_bytes(under_jax_jit(train_step, plan).lower(abstract, batch).compile()) != expected
    state, losses = nnx.state(make_objects()), []
    for _ in range(3):
        state, loss = jitted(state, batch)
        losses.append(float(loss))
    eager = make_objects()
    np.testing.assert_allclose(losses, [float(nnx.jit(train_step)(*eager, batch)) for _ in range(3)], rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(nnx.state(eager)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_constrained_step_updates_objects_under_nnx_jit() -> None:
    plan = spanax.Plan.from_json(plan_of().to_json())
    objects, eager = make_objects(), make_objects()
    constrained = nnx.jit(plan.constrain(train_step), static_argnames="power")
    for power in (2, 3):
        losses = [run(*each, {"x": X, "y": Y}, power=power) for run, each in
                  ((constrained, objects), (nnx.jit(train_step, static_argnames="power"), eager))]  # fmt: skip
        assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-5)
    for path, array in nnx.to_flat_state(nnx.state(objects[0])):
        placement = plan[".".join(map(str, path))]
        assert array.sharding.is_equivalent_to(placement.sharding(plan.mesh.build()), array.ndim)

    def evaluate(model: Model, x: Any) -> Any:
        return (model(x) ** 2).mean(), model(x)

    loss, result = nnx.jit(plan.constrain(evaluate))(objects[0], X[:8])
    assert float(loss) == pytest.approx(float(evaluate(eager[0], X[:8])[0]), rel=1e-4)
    assert result.sharding.shard_shape(result.shape)[0] == 8 // 4


def test_a_constrained_function_updates_only_objects_of_the_trace() -> None:
    plan, objects = plan_of(), make_objects()
    constrained = plan.constrain(train_step)
    with pytest.raises(spanax.SpanaxError, match="`train_step` is constrained, and runs in jax.jit or nnx.jit only"):
        constrained(*objects, {"x": X, "y": Y})
    with pytest.raises(spanax.SpanaxError, match="is updated inside of a trace, but was created outside of it"):
        jax.jit(lambda batch: constrained(*objects, batch))({"x": X, "y": Y})
    assert not any(isinstance(array, jax.core.Tracer) for array in jax.tree.leaves(nnx.state(objects)))


def test_a_constrained_function_runs_under_the_mesh_of_its_plan() -> None:
    plan, batch = plan_of(), {"x": X, "y": Y}
    constrained = nnx.jit(plan.constrain(train_step))
    with jax.set_mesh(plan.mesh.build()):
        loss = float(constrained(*make_objects(), batch))
    assert loss == pytest.approx(float(nnx.jit(train_step)(*make_objects(), batch)), rel=1e-5)
    for axis_type, sizes in ((jax.sharding.AxisType.Auto, (2, 4)), (jax.sharding.AxisType.Explicit, (4, 2))):
        mesh = jax.make_mesh(sizes, ("fsdp", "model"), axis_types=(axis_type,) * 2)
        with jax.set_mesh(mesh), pytest.raises(spanax.SpanaxError, match="the surrounding mesh is not the plan's"):
            constrained(*make_objects(), batch)


def test_a_plan_of_a_program_constrains_a_train_step() -> None:
    program = spanax.trace(
        build=Model, optimizer=optax.adam(1e-2), batch={"x": X, "y": Y},
        loss=lambda model, batch: (abs(model(batch["x"]) - batch["y"]) ** 2).mean(),
    )  # fmt: skip
    cluster = spanax.cluster("cpu:8")
    plan = spanax.plan(program, cluster, layout="fsdp+tensor", mesh=MESH)
    objects = make_objects()
    before = float(nnx.jit(plan.constrain(train_step))(*objects, {"x": X, "y": Y}))
    assert before == pytest.approx(float(nnx.jit(train_step)(*make_objects(), {"x": X, "y": Y})), rel=1e-5)
    assert objects[0].blocks[0].up.kernel.sharding.spec == plan["blocks.0.up.kernel"].partition_spec
    remat = dataclasses.replace(plan, schedule=Schedule(remat="dots"))
    for batch, message in ((X, "apply to a loss, and the function has none"), (X[:8], "on other arrays than those")):
        with pytest.raises(spanax.SpanaxError, match=message):
            nnx.jit(remat.constrain(train_step))(*make_objects(), {"x": batch, "y": batch})
