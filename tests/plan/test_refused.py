"""Programs that cannot be sharded as requested raise errors with values and the nearest valid alternative."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import spanax
import zoo
from spanax.plan.layout import Layout
from spanax.plan.place import resolver_of
from spanax.plan.plan import Plan
from spanax.trace.program import Program


@functools.cache
def program(name: str = "mlp", size: int = 16) -> Program:
    case = zoo.ZOO[name]
    return spanax.trace(build=case.build, optimizer=case.optimizer, batch=case.batch(size), loss=case.loss)


@functools.cache
def odd() -> Program:
    """Nothing in it divides 8 but the batch."""
    return spanax.trace(
        build=lambda rngs: nnx.Linear(7, 9, rngs=rngs),
        optimizer=optax.adam(1e-3),
        batch=jax.ShapeDtypeStruct((16, 7), "float32"),
        loss=lambda model, x: jnp.mean(model(x) ** 2),
    )


def plan(actual: Program, devices: int = 8, **options: Any) -> Plan:
    return spanax.plan(actual, spanax.cluster("cpu", devices), **options)


REFUSED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "an unknown layout": (
        lambda: plan(program(), layout="fdsp"),
        "unknown layout 'fdsp'.",
        "did you mean 'fsdp'?",
    ),
    "a sequence without tensor": (lambda: plan(program(), layout="fsdp+seq"), "unknown layout 'fsdp+seq'.", "known:"),
    "a sequence without tensor, as an option": (
        lambda: plan(program(), layout="fsdp", sequence_parallel=True),
        "layout 'fsdp' has no model axis to shard the sequence over.",
        "fsdp+tensor+seq",
    ),
    "a mesh that is larger than the cluster": (
        lambda: plan(program(), layout="fsdp", mesh="fsdp=16"),
        "mesh fsdp=16 needs 16 devices, and the cluster has 8.",
        "mesh fsdp=8, or --devices 16",
    ),
    "a mesh that is smaller than the cluster": (
        lambda: plan(program(), layout="data+tensor", mesh="data=2,model=2"),
        "mesh data=2,model=2 needs 4 devices, and the cluster has 8.",
        "mesh data=4,model=2, or --devices 4",
    ),
    "a mesh axis with no meaning": (
        lambda: plan(program(), mesh="x=8"),
        "mesh axis 'x' has no default meaning.",
        "name a layout for it",
    ),
    "a mesh axis that the layout does not use": (
        lambda: plan(program(), layout="fsdp", mesh="fsdp=4,model=2"),
        "layout 'fsdp' leaves mesh axis 'model' idle: every device on it would repeat the same work.",
        "layout 'fsdp+tensor'",
    ),
    "a layout without its mesh axis": (
        lambda: plan(program(), layout="tensor", mesh="data=8"),
        "layout 'tensor' needs the mesh axis model.",
        "mesh model=8",
    ),
    "a layout of one's own without a mesh": (
        lambda: plan(program(), layout=Layout("mine", computed=(("x", ("batch",)),))),
        "a custom Layout needs a mesh.",
        "mesh={'data': 8}",
    ),
    "a batch that does not divide": (
        lambda: plan(program(size=12), layout="data"),
        "'batch' of size 12 is not divisible by 8: 12 % 8 = 4.",
        "a batch of 8 or 16 (--global-batch-size 8), or a smaller mesh axis",
    ),
    "experts where there are none": (
        lambda: plan(program(), layout="expert", mesh="data=4,expert=2"),
        "mesh axis 'expert' (2) has nothing to shard in this program under layout 'expert'.",
        "mesh data=8, layout 'data'",
    ),
    "more experts asked for than there are": (
        lambda: plan(program("moe"), layout="expert", mesh="expert=16", devices=16),
        "mesh axis 'expert' (16) has nothing to shard in this program under layout 'expert'.",
        "mesh data=2,expert=8, layout 'expert'",
    ),
    "experts that do not divide": (
        lambda: plan(program("moe", 12), layout="expert", mesh="data=2,expert=3", devices=6),
        "mesh axis 'expert' (3) has nothing to shard in this program under layout 'expert'.",
        "mesh data=6, layout 'data'",
    ),
    "no dim that tensor parallelism can split": (
        lambda: plan(odd(), layout="tensor"),
        "mesh axis 'model' (8) has nothing to shard in this program under layout 'tensor'.",
        "mesh data=8, layout 'data'",
    ),
    "no parameter that can be stored split": (
        lambda: plan(odd(), layout="fsdp"),
        "no parameter is divisible by 8: fsdp would shard nothing in storage.",
        "a smaller mesh axis, or layout 'data'",
    ),
    "no moment at all": (
        lambda: plan(
            spanax.trace(build=zoo.MLP, optimizer=optax.sgd(0.1), batch=zoo.VECTORS(16), loss=zoo.squared_error),
            layout="zero1",
        ),
        "the optimizer has no arrays: zero1 would shard nothing in storage.",
        "layout 'data'",
    ),
    "a pin of an unknown axis": (
        lambda: plan(program(), layout="data", pin={"hiden": "data"}),
        "cannot pin axis 'hiden': the program has none of that name.",
        "did you mean 'hidden'?",
    ),
    "a pin to an unknown mesh axis": (
        lambda: plan(program(), layout="data", pin={"hidden": "model"}),
        "cannot pin 'hidden' to mesh axis 'model'.",
        "known: data",
    ),
    "a pin that does not divide": (
        lambda: plan(odd(), layout="data", pin={"features": "data"}),
        "'features' of size 9 is not divisible by 8: 9 % 8 = 1.",
        "a features of 8 or 16",
    ),
    "a forbidden axis that there is not": (
        lambda: plan(program(), layout="data", forbid=["vocab"]),
        "cannot pin axis 'vocab': the program has none of that name.",
        "known: batch, features, hidden",
    ),
    "a plan of another model": (
        lambda: resolver_of(program(), plan(odd(), layout="data")),
        "the plan was made for another program.",
        "make a plan for this model and batch",
    ),
    "a plan that is no JSON": (lambda: Plan.from_json("{"), "this is not a plan file.", ""),
    "a plan of a later version": (
        lambda: Plan.from_json('{"version": 99}'),
        "cannot read the plan.",
        "read it with the version of Spanax that wrote it, or write it again",
    ),
    "a plan file that is not there": (lambda: Plan.load("/no/such/plan.json"), "cannot read the plan", ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_invalid_value_raises(name: str) -> None:
    call, first_line, fix = REFUSED[name]
    with pytest.raises(spanax.SpanaxError) as caught:
        call()
    lines = str(caught.value).splitlines()
    assert re.match(re.escape(first_line), lines[0])
    assert not fix or lines[-1].startswith("  fix: ") and fix in lines[-1]
    assert len(lines) <= 4 and all(len(line) < 300 for line in lines)


@pytest.mark.parametrize("name", [name for name in REFUSED if "a plan " in name])
def test_bad_files_are_bad_data(name: str) -> None:
    with pytest.raises(spanax.SpanaxError) as caught:
        REFUSED[name][0]()
    assert caught.value.exit_code == (2 if "another" in name else 65)


@pytest.mark.parametrize(
    ("name", "devices", "layout", "mesh"),
    [
        ("mlp", 8, "expert", "data=4,expert=2"), ("mlp", 8, "expert", "expert=8"), ("moe", 16, "expert", "expert=16"),
        ("mlp", 8, "context", "data=4,context=2"), ("mlp", 3, "tensor", "model=3"), ("mlp", 8, "tensor", "data=8"),
        ("odd", 8, "tensor", "model=8"), ("odd", 8, "fsdp", "fsdp=8"), ("mlp", 8, "fsdp", "fsdp=4,model=2"),
        ("mlp", 8, "tensor", "data=2,model=2"), ("mlp", 8, "fsdp", "fsdp=16"),
    ],
)  # fmt: skip
def test_the_suggested_fix_works(name: str, devices: int, layout: str, mesh: str) -> None:
    actual = odd() if name == "odd" else program(name)
    with pytest.raises(spanax.SpanaxError) as caught:
        plan(actual, devices, layout=layout, mesh=mesh)
    fix = str(caught.value).partition("fix: ")[2].partition(" without ")[0]
    if other := re.search(r"\w+=[\w=,]*\d", fix):
        mesh = other[0]
    if named := re.search(r"layout '(.*?)'", fix):
        layout = named[1]
    plan(actual, spanax.MeshShape.of(mesh).size, layout=layout, mesh=mesh)
