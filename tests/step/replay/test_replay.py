"""Replay: constraints land on real values, bodies included, and nothing else of the program changes."""

import functools
import re
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import spanax
import zoo
from spanax.plan.place import resolver_of
from spanax.plan.sharding.operands import operand_shardings
from spanax.plan.sharding.resolve import Constraint
from spanax.step.replay.replay import Replay
from spanax.trace.jaxpr.graph import Graph, from_jaxpr
from spanax.trace.program import Program

MESH = spanax.MeshShape.of("data=4,model=2")


def replay(graph: Graph, constraints: Any, mesh: Any, taken: Any = MappingProxyType({})) -> Callable[..., list[Any]]:
    """A graph replayed under constraints, with the current or the passed shardings of its operands."""
    whole = Replay(graph, constraints, taken, mesh)
    return lambda *args: whole.body(graph.body, args)


COLUMN = np.arange(8, dtype=np.float32)[:, None]
OFFLOAD = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")


# The same numbers as the function that was traced


@jax.custom_vjp
def scaled(x: Any) -> Any:
    return jnp.sin(x)


scaled.defvjp(lambda x: (scaled(x), x), lambda x, g: (3 * g,))


def looping(x: Any) -> Any:
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * x), (0, x))[1]


def switching(x: Any) -> Any:
    return lax.switch(x.astype(int).sum() % 3, [jnp.sin, jnp.cos, lambda y: y * x], x)


def scanning(x: Any) -> Any:
    return lax.scan(lambda c, y: (c + y, c * y), x[0], x)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "scan": scanning,
    "scan backwards": lambda x: lax.scan(lambda c, y: (c + y, c), x[0], x, reverse=True, unroll=2),
    "while": looping,
    "while with outer values in its test": lambda x: lax.while_loop(
        lambda c: c.sum() < x.sum() + 9, lambda c: c + 1, x
    ),
    "cond": switching,
    "remat": lambda x: jax.grad(lambda y: jax.checkpoint(lambda z: jnp.sin(jnp.sin(z)).sum())(y))(x),
    "remat with a policy": jax.grad(
        jax.checkpoint(lambda x: jnp.sin(x @ x.T).sum(), policy=jax.checkpoint_policies.dots_saveable)
    ),
    "remat in a scan": jax.grad(
        lambda x: lax.scan(jax.checkpoint(lambda c, y: (jnp.sin(c + y), None)), x[0], x)[0].sum()
    ),
    "remat around a call with a constant": jax.grad(
        jax.checkpoint(lambda x: jax.jit(lambda y: jnp.sin(y * COLUMN))(x).sum())
    ),
    "scan around a call with a constant": lambda x: lax.scan(
        lambda c, _: (jax.jit(lambda y: y * COLUMN)(c), None), x, None, 2
    )[0],
    "a residual kept on the host": jax.grad(
        lambda x: lax.scan(jax.checkpoint(lambda c, _: (jnp.sin(c @ x), None), policy=OFFLOAD), x, None, 2)[0].sum()
    ),
    "a gradient through a scan": jax.grad(lambda x: scanning(x)[1].sum()),
    "custom jvp": jax.grad(lambda x: jax.nn.silu(x).sum()),
    "custom vjp": jax.grad(lambda x: scaled(x).sum()),
    "jit": lambda x: jax.jit(lambda y: jax.jit(jnp.sin)(y) + 1)(x),
    "constants": lambda x: x + np.arange(8, dtype=np.float32),
    "an input returned": lambda x: (x, x * 2, 3.0),
    "nothing used": lambda x: jnp.zeros(3),
    "sort and top k": lambda x: (jnp.sort(x), lax.top_k(x, 2), jnp.cumsum(x, 0)),
    "random": lambda x: x + jax.random.normal(jax.random.fold_in(jax.random.key(0), 3), x.shape),
    "fft": lambda x: jnp.fft.rfft(x).real,
    "linear algebra": lambda x: jnp.linalg.solve(x + 9 * jnp.eye(8), x),
    "a callback": lambda x: jax.pure_callback(lambda v: np.sin(v), x, x),
    "a constraint of the user's own": lambda x: lax.with_sharding_constraint(x, other_mesh()) * 2,
}


def other_mesh() -> NamedSharding:
    return NamedSharding(spanax.MeshShape.of("x=2").build(), PartitionSpec("x"))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("constrained", [False, True])
def test_the_same_numbers(name: str, constrained: bool) -> None:
    function = FUNCTIONS[name]
    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    graph = from_jaxpr(jax.make_jaxpr(function)(x))
    by_rank = [Constraint(()), Constraint((("model",),)), Constraint((("data",), ("model",)))]
    constraints: list[Constraint | None] = [None] * len(graph.avals)
    if constrained:
        for value in range(len(graph.avals)):
            shape = graph.shape(value)
            if 0 < len(shape) < 3 and all(size % 4 == 0 for size in shape):
                constraints[value] = by_rank[len(shape)]
    replayed = jax.jit(replay(graph, constraints, MESH.build()))(x)
    for expected, result in zip(jax.tree.leaves(function(x)), replayed, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


def test_remat_and_scan_are_preserved() -> None:
    x = jax.ShapeDtypeStruct((8, 8), "float32")
    for name, primitive in (("remat in a scan", "scan"), ("remat in a scan", "checkpoint"), ("cond", "cond")):
        graph = from_jaxpr(jax.make_jaxpr(FUNCTIONS[name])(x))
        replayed = jax.make_jaxpr(replay(graph, [None] * len(graph.avals), MESH.build()))(x)
        before, after = ([op.name for op in g.ops() if op.bodies] for g in (graph, from_jaxpr(replayed)))
        assert before == after
        assert primitive in after or primitive == "checkpoint" and "remat2" in after


@pytest.mark.parametrize("size", [1, 8])
def test_residuals_on_the_host_remain_there(size: int) -> None:
    x = jax.ShapeDtypeStruct((8, 8), "float32")
    graph = from_jaxpr(jax.make_jaxpr(FUNCTIONS["a residual kept on the host"])(x))
    constraints = [Constraint((("data",), ())) if graph.shape(v) == (8, 8) else None for v in range(len(graph.avals))]
    replayed = jax.jit(replay(graph, constraints, MESH.build() if size == 8 else spanax.MeshShape.of({}).build()))
    again = from_jaxpr(jax.make_jaxpr(replayed)(x))
    on_host, again_on_host = (
        [graph.shape(value) for value, aval in enumerate(graph.avals) if aval.memory_space == jax.memory.Space.Host]
        for graph in (graph, again)
    )
    assert on_host == again_on_host and len(on_host) >= 3  # of a layer, of all layers, of a layer on the way back
    text = replayed.trace(x).lower(lowering_platforms=("tpu",)).as_text()
    assert sorted(re.findall(r'buffer_placement = "(\w+)"', text)) == ["device", "pinned_host"]


# Constraints on real values


def sharding(spec: tuple[tuple[str, ...], ...]) -> NamedSharding:
    return NamedSharding(MESH.build(), PartitionSpec(*(axes or None for axes in spec)))


@pytest.mark.parametrize("spec", [(("data",), ()), ((), ("model",)), (("model",), ("data",)), (("data", "model"), ())])
def test_a_constraint_equals_the_sharding_of_the_value(spec: tuple[tuple[str, ...], ...]) -> None:
    graph = from_jaxpr(jax.make_jaxpr(lambda x: jnp.sin(x) * 2)(jax.ShapeDtypeStruct((8, 8), "float32")))
    (out,) = graph.body.outputs
    constraints = [Constraint(spec) if value == out else None for value in range(len(graph.avals))]
    (result,) = jax.jit(replay(graph, constraints, MESH.build()))(np.ones((8, 8), np.float32))
    assert result.sharding.is_equivalent_to(sharding(spec), 2)
    (left,) = jax.jit(replay(graph, [None] * len(graph.avals), MESH.build()))(np.ones((8, 8), np.float32))
    assert not left.sharding.is_equivalent_to(sharding(spec), 2)


@pytest.mark.parametrize("function", [lambda x, w: x @ w, lambda x, w: jnp.transpose(w), lambda x, w: w[::-1] @ x])
def test_a_result_is_constrained_even_if_an_operand_has_the_same_shape(function: Callable[..., Any]) -> None:
    """Same shape, same constraint, and yet not the same dims: nothing carries the split over."""
    square, spec = jax.ShapeDtypeStruct((8, 8), "float32"), (("data",), ())
    graph = from_jaxpr(jax.make_jaxpr(function)(square, square))
    (_, w), (out,) = graph.body.inputs, graph.body.outputs
    constraints = [Constraint(spec) if value in (w, out) else None for value in range(len(graph.avals))]
    (result,) = jax.jit(replay(graph, constraints, MESH.build()))(*[np.ones((8, 8), np.float32)] * 2)
    assert result.sharding.is_equivalent_to(sharding(spec), 2)


def test_constraints_reach_the_carry_of_a_scan() -> None:
    def function(x: Any) -> Any:
        return lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3)[0]

    graph = from_jaxpr(jax.make_jaxpr(function)(jax.ShapeDtypeStruct((8, 8), "float32")))
    (scan,) = (op for op in graph.ops() if op.name == "scan")
    inner = scan.bodies[0].outputs[0]
    constraints = [Constraint((("data",), ("model",))) if value == inner else None for value in range(len(graph.avals))]
    (result,) = jax.jit(replay(graph, constraints, MESH.build()))(np.ones((8, 8), np.float32))
    assert result.sharding.is_equivalent_to(sharding((("data",), ("model",))), 2)


def test_one_device_has_no_constraints() -> None:
    graph = from_jaxpr(jax.make_jaxpr(jnp.sin)(jax.ShapeDtypeStruct((8, 8), "float32")))
    constraints = [Constraint((("data",), ()))] * len(graph.avals)
    item = spanax.MeshShape.of("data=1").build()
    text = jax.jit(replay(graph, constraints, item)).lower(np.ones((8, 8), np.float32)).as_text()
    assert "sharding_constraint" not in text


# Gradients: the step returns them with the loss, and only the constraints determine their shardings


def step_with_gradients(model: nnx.Module, optimizer: nnx.Optimizer, batch: Any) -> dict[str, Any]:
    loss, grads = nnx.value_and_grad(zoo.squared_error)(model, batch)
    optimizer.update(model, grads)
    return {"loss": loss, "grads": nnx.to_pure_dict(grads)}


@functools.cache
def program() -> Program:
    return spanax.trace(
        build=zoo.MLP, optimizer=optax.adam(1e-3), batch=zoo.VECTORS(16), train_step=step_with_gradients
    )


def gradients(plan: spanax.Plan, *, constrained: bool = True) -> dict[str, jax.Array]:
    """The gradients of one step, each where the constraints, or else the compiler, left it."""
    run = spanax.start(program(), plan)
    resolver, step = resolver_of(program(), plan), program().step
    constraints = resolver.constraints(step)
    taken = operand_shardings(resolver, step, constraints)
    if not constrained:
        constraints, taken = [None] * len(constraints), {}
    function = jax.jit(replay(step.graph, constraints, run.mesh, taken))
    batch = [jax.device_put(leaf, place.sharding(run.mesh)) for leaf, place in zip(
        jax.tree.leaves(zoo.VECTORS(16)), plan.batch, strict=True)]  # fmt: skip
    outputs = function(*run.state, *batch)[len(program().leaves) :]
    result = jax.tree.unflatten(step.result, outputs)["grads"]
    return {f"{layer}.{name}": array for layer, arrays in result.items() for name, array in arrays.items()}


def misplaced(result: dict[str, jax.Array], plan: spanax.Plan) -> list[str]:
    mesh = plan.mesh.build()
    return [
        path
        for path, array in result.items()
        if not array.sharding.is_equivalent_to(plan[path].sharding(mesh), array.ndim)
    ]


@pytest.mark.parametrize(
    ("layout", "mesh", "stored_like"),
    [
        ("data", "fsdp=8", "data"),
        ("zero1", "fsdp=8", "data"),
        ("zero2", "fsdp=8", "fsdp"),
        ("fsdp", "fsdp=8", "fsdp"),
        ("hsdp", "data=2,fsdp=4", "hsdp"),
        ("tensor", "model=8", "tensor"),
        ("fsdp+tensor", "fsdp=4,model=2", "fsdp+tensor"),
    ],
)
def test_gradients_are_sharded_as_the_layout_stores_them(layout: str, mesh: str, stored_like: str) -> None:
    """The sharding of parameters under the layout that stores both equally; in zero1 and zero2 they differ."""
    plan, expected = (
        spanax.plan(program(), spanax.cluster("cpu:8"), layout=name, mesh=mesh) for name in (layout, stored_like)
    )
    actual = gradients(plan)
    assert len(actual) == 6
    assert misplaced(actual, expected) == []


def test_unconstrained_gradients_are_detected() -> None:
    """The compiler would split them like the optimizer's moments, which zero1 does not ask for."""
    plan = spanax.plan(program(), spanax.cluster("cpu:8"), layout="zero1", mesh="fsdp=8")
    expected = spanax.plan(program(), spanax.cluster("cpu:8"), layout="data", mesh="fsdp=8")
    assert misplaced(gradients(plan, constrained=False), expected)


def test_operations_keep_the_line_and_the_name_they_were_traced_with() -> None:
    """Else every operation of a compiled step would come from the replay."""
    import programs
    import spanax
    from spanax.check.compilers.lowered_step import lower

    program = programs.zoo_program("mlp")
    plan = spanax.plan(program, spanax.cluster("cpu:8"), layout="fsdp")
    text = lower(program, plan, "cpu").module.operation.get_asm(enable_debug_info=True)
    assert "zoo.py" in text and "transpose(jvp(" in text
