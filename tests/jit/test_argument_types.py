"""An argument of a wrong type is one error of its own code, raised where it is passed, with the value and a fix."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

import spanax
from spanax.errors import ArgumentError, MeshError, SpanaxError

X = np.ones((8, 16), np.float32)

MESH, PIN, LIKE = 'mesh="fsdp=8", or mesh={"fsdp": 8}', 'pin={"AXIS": "MESH_AXIS"}', "like=train_step"

WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "an int as mesh": ({"mesh": 8}, "`mesh` is 8, of type int", MESH),
    "a tuple as mesh": ({"mesh": ("fsdp", 8)}, "`mesh` is ('fsdp', 8), of type tuple", MESH),
    "an int as layout": ({"layout": 5}, "`layout` is 5, of type int", 'layout="fsdp"'),
    "a tuple as layout": ({"layout": ("fsdp",)}, "`layout` is ('fsdp',), of type tuple", 'layout="fsdp"'),
    "an int as pin": ({"pin": {"hidden": 3}}, "`pin['hidden']` is 3, of type int", PIN),
    "a string as pin": ({"pin": "hidden"}, "`pin` is 'hidden', of type str", PIN),
    "an int as pad": ({"pad": 5}, "`pad` is 5, of type int", 'pad="AXIS,AXIS"'),
    "an int as attention": ({"attention": 5}, "`attention` is 5, of type int", 'attention="auto"'),
    "a float as loss chunks": ({"loss_chunks": 2.5}, "`loss_chunks` is 2.5, of type float", "loss_chunks=8"),
}
"""Arguments of both spanax.jit and spanax.plan."""

WRONG_IN_JIT: dict[str, tuple[dict[str, Any], str, str]] = {
    "an int as on": ({"on": 8}, "`on` is 8, of type int", 'on="cpu:8"'),
    "a path as plan": ({"plan": "plan.json"}, "`plan` is 'plan.json', of type str", "spanax.Plan.load('plan.json')"),
    "an int as plan": ({"plan": 3}, "`plan` is 3, of type int", "plan=spanax.Plan.load(path)"),
    "a bool as remat": ({"remat": True}, "`remat` is True, of type bool", 'remat="full"'),
    "a string as donate": ({"donate": "no"}, "`donate` is 'no', of type str", "donate=False"),
    "a string as microbatches": ({"microbatches": "2"}, "`microbatches` is '2', of type str", "microbatches=4"),
    "a bool as microbatches": ({"microbatches": True}, "`microbatches` is True, of type bool", "microbatches=4"),
    "an int as like": ({"like": 5}, "`like` is 5, of type int", LIKE),
    "a list of lists as static": ({"static_argnums": [[1]]}, "`static_argnums` is [[1]], of type list", "=(1,)"),
    "an int as static name": ({"static_argnames": 3}, "`static_argnames` is 3, of type int", '=("steps",)'),
}

WRONG_IN_PLAN: dict[str, tuple[dict[str, Any], str, str]] = {
    "an int as cluster": ({"cluster": 8}, "`cluster` is 8, of type int", 'cluster="cpu:8"'),
    "a string as forbid": ({"forbid": "vocab"}, "`forbid` is 'vocab', of type str", "forbid=['vocab']"),
    "a dict as schedule": ({"schedule": {}}, "`schedule` is {}, of type dict", "schedule=Schedule(microbatches=4)"),
}


def total(model: Any, x: Any, factor: Any = None) -> Any:
    return model(x).sum()


def model() -> nnx.Linear:
    return nnx.Linear(16, 32, rngs=nnx.Rngs(0))


def check(call: Callable[[], Any], message: str, fix: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()
    first, *_, last = str(caught.value).splitlines()
    assert first == f"{message}. [SPX106]"
    assert last.startswith("  fix: ") and fix in last


@pytest.mark.parametrize("name", [*WRONG, *WRONG_IN_JIT])
def test_spanax_jit_raises_in_the_decorator(name: str) -> None:
    options, message, fix = (WRONG | WRONG_IN_JIT)[name]
    check(lambda: spanax.jit(**options)(total), message, fix)


@pytest.mark.parametrize("name", [*WRONG, *WRONG_IN_PLAN])
def test_spanax_plan_raises(name: str) -> None:
    step = spanax.jit(total, mesh="fsdp=8")
    step.prepare(nnx.eval_shape(model), jax.ShapeDtypeStruct(X.shape, X.dtype))
    options, message, fix = (WRONG | WRONG_IN_PLAN)[name]
    check(lambda: spanax.plan(step.program, **{"cluster": "cpu:8", **options}), message, fix)


def test_spanax_init_raises() -> None:
    check(lambda: spanax.init(model, like=total), "`like` is of type function", LIKE)
    check(lambda: spanax.init(model, like=None), "`like` is None, of type NoneType", LIKE)  # type: ignore[arg-type]


@pytest.mark.parametrize("keywords", [{}, {"factor": [1]}])
def test_a_static_argument_that_is_not_hashable_is_named(keywords: dict[str, Any]) -> None:
    step = spanax.jit(total, mesh="fsdp=8", static_argnums=2)
    arguments = (model(), X) if keywords else (model(), X, [1])
    check(lambda: step(*arguments, **keywords), "`factor` is [1], of type list", "a hashable value")


def mesh_of(devices: Any, kind: AxisType = AxisType.Auto) -> Mesh:
    return Mesh(np.array(devices).reshape(-1, 2), ("fsdp", "model"), axis_types=(kind, kind))


@pytest.mark.parametrize("num_devices", [8, 4])
def test_a_mesh_of_jax_is_used_and_objects_on_it_keep_their_shardings(num_devices: int) -> None:
    mesh, sharded = mesh_of(jax.devices()[:num_devices]), model()
    expected = float(sharded(X).sum())
    sharding = jax.NamedSharding(mesh, jax.P("model", "fsdp"))  # not that of the plan
    sharded.kernel[...] = jax.device_put(sharded.kernel[...], sharding)
    step = spanax.jit(total, mesh=mesh)
    np.testing.assert_allclose(step(sharded, X), expected, rtol=1e-5)
    assert step.placement.mesh == mesh and str(step.plan.mesh) == f"fsdp={num_devices // 2},model=2"
    assert sharded.kernel.sharding == sharding and len(sharded.bias.sharding.device_set) == num_devices


def test_a_mesh_of_jax_that_cannot_be_used_raises() -> None:
    assert (
        str(spanax.jit(total, mesh=mesh_of(jax.devices(), AxisType.Explicit)).placement.request.mesh)
        == "fsdp=4,model=2"
    )
    with pytest.raises(MeshError, match=r"in another order(.|\n)*devices 7, 6, 5(.|\n)*dict\(mesh.shape\)"):
        spanax.jit(total, mesh=mesh_of(jax.devices()[::-1]))
    shape = dict(mesh_of(jax.devices()[::-1]).shape)
    assert str(spanax.jit(total, mesh=shape).placement.request.mesh) == "fsdp=4,model=2"


def test_too_few_devices_name_the_command_line_and_python() -> None:
    with pytest.raises(SpanaxError, match=r"or --devices 16 \(in Python: spanax.simulate\(16\)\)"):
        spanax.jit(total, mesh="data=16")(model(), np.ones((16, 16), np.float32))
    step = spanax.jit(total, mesh="fsdp=8")
    step.prepare(nnx.eval_shape(model), jax.ShapeDtypeStruct(X.shape, X.dtype))
    with pytest.raises(SpanaxError, match="mesh data=8, or a cluster of 4 devices"):
        spanax.plan(step.program, "v5e:2x4", mesh="data=4")
