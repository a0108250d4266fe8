"""Plans: every preset on several meshes as golden specs, what must hold for each of them, and what is refused."""

import dataclasses
import functools
import json
import math
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import spanax
import zoo
from sampling import sampled
from spanax.errors import DataError, SpanaxError
from spanax.plan.advice.rules_of_thumb import rule
from spanax.plan.candidate import plan_of
from spanax.plan.layout import Layout
from spanax.plan.place import resolver_of
from spanax.plan.plan import Plan
from spanax.plan.sharding.placement import Placement
from spanax.plan.sharding.resolve import Constraint
from spanax.trace.jaxpr.provenance import Origin
from spanax.trace.program import Program

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "plans.json"

LAYOUTS = [
    ("gpt", "data", "data=8"),
    ("gpt", "data", "fsdp=8"),
    ("gpt", "zero1", "fsdp=8"),
    ("gpt", "zero2", "fsdp=8"),
    ("gpt", "fsdp", "fsdp=8"),
    ("gpt", "fsdp", "data=8"),
    ("gpt", "fsdp", "x=8"),
    ("gpt", "hsdp", "data=2,fsdp=4"),
    ("gpt", "tensor", "model=8"),
    ("gpt", "tensor+seq", "model=4"),
    ("gpt", "data+tensor", "data=4,model=2"),
    ("gpt", "data+tensor", "data=2,model=4"),
    ("gpt", "fsdp+tensor", "fsdp=4,model=2"),
    ("gpt", "fsdp+tensor", "fsdp=2,model=4"),
    ("gpt", "fsdp+tensor+seq", "fsdp=4,model=2"),
    ("gpt", "context", "data=4,context=2"),
    ("gpt", "context", "context=8"),
    ("gpt", None, "data=2,fsdp=2,model=2"),
    ("moe", "expert", "data=4,expert=2"),
    ("moe", "expert", "expert=8"),
]
IDS = [f"{model} {layout or 'by mesh'} {mesh}" for model, layout, mesh in LAYOUTS]


@functools.cache
def program(name: str = "gpt") -> Program:
    case = zoo.ZOO[name]
    return spanax.trace(build=case.build, optimizer=case.optimizer, batch=case.batch(16), loss=case.loss)


@functools.cache
def planned(name: str, layout: str | None, mesh: str) -> Plan:
    cluster = spanax.cluster("cpu", spanax.MeshShape.of(mesh).size)
    return spanax.plan(program(name), cluster, layout=layout, mesh=mesh)


def used(placement: Placement) -> set[str]:
    """The mesh axes that split an array."""
    return {axis for axes in placement.spec for axis in axes}


def specs(plan: Plan) -> dict[str, str]:
    """Paths to specs; the second moment is sharded like the first, and omitted."""
    leaves = [leaf for leaf in plan.leaves + plan.batch if ".nu." not in leaf.path]
    return {leaf.path: ", ".join("+".join(axes) or "-" for axes in leaf.spec) for leaf in leaves}


# Golden


def test_specs_equal_the_golden_file() -> None:
    result = {name: specs(planned(*which)) for name, which in zip(IDS, LAYOUTS, strict=True)}
    if os.environ.get("SPANAX_GOLDEN") == "update":
        GOLDEN.write_text(json.dumps(result, indent=1) + "\n")
    assert result == json.loads(GOLDEN.read_text())


# What holds for every plan


@pytest.mark.parametrize("which", LAYOUTS, ids=IDS)
def test_every_spec_is_legal_and_its_bytes_are_counted(which: tuple[str, str | None, str]) -> None:
    plan = planned(*which)
    sizes = dict(plan.mesh.axes)
    for leaf in plan.leaves + plan.batch:
        split = [axis for axes in leaf.spec for axis in axes]
        assert len(split) == len(set(split)) and set(split) <= set(sizes), leaf
        assert len(leaf.spec) == len(leaf.shape) == len(leaf.local_shape) == len(leaf.axes)
        for size, local, axes in zip(leaf.shape, leaf.local_shape, leaf.spec, strict=True):
            assert size == local * math.prod(sizes[axis] for axis in axes), leaf
        assert leaf.local_bytes == math.prod(leaf.local_shape) * jnp.dtype(leaf.dtype).itemsize
        assert str(leaf.partition_spec)


@pytest.mark.parametrize("which", LAYOUTS, ids=IDS)
def test_moments_have_the_same_spec(which: tuple[str, str | None, str]) -> None:
    plan = planned(*which)
    for leaf in plan.leaves:
        if ".nu." in leaf.path:
            assert leaf.spec == plan[leaf.path.replace(".nu.", ".mu.")].spec


@pytest.mark.parametrize("which", LAYOUTS, ids=IDS)
def test_examples_are_sharded_over_all_axes_of_the_batch(which: tuple[str, str | None, str]) -> None:
    plan = planned(*which)
    target = {axis for axis, size in plan.mesh.axes if "batch" in plan.layout.splits(axis) and size > 1}
    for leaf in plan.batch:
        assert set(leaf.spec[0]) == target


@pytest.mark.parametrize("which", LAYOUTS, ids=IDS)
def test_a_plan_reads_back_equal(which: tuple[str, str | None, str], tmp_path: Path) -> None:
    plan = planned(*which)
    assert Plan.from_json(plan.to_json()) == plan
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan and hash(loaded) == hash(plan)
    assert loaded.diff(plan) == []


def test_a_plan_records_its_allowed_findings() -> None:
    plain = planned(*LAYOUTS[0])
    assert '"allow"' not in plain.to_json()
    plan = dataclasses.replace(plain, allow=("SPX001 embed", "SPX013"))
    assert Plan.from_json(plan.to_json()) == plan and plan.diff(plain)
    for wrong in ("SPX001", [1], {"SPX001": "embed"}):
        written = json.dumps(json.loads(plan.to_json()) | {"allow": wrong})
        with pytest.raises(DataError, match="'allow' is not a list of strings"):
            Plan.from_json(written)


@pytest.mark.parametrize("which", LAYOUTS, ids=IDS)
def test_a_plan_that_was_read_runs_the_same_constraints(which: tuple[str, str | None, str]) -> None:
    plan, step = planned(*which), program(which[0]).step
    fresh, read = (resolver_of(program(which[0]), p) for p in (plan, Plan.from_json(plan.to_json())))
    assert list(fresh.constraints(step)) == list(read.constraints(step))


@pytest.mark.parametrize("name", sampled(zoo.ZOO, [*zoo.ZOO][::4]))
@pytest.mark.parametrize(("layout", "mesh"), [("fsdp", "fsdp=8"), ("fsdp+tensor", "fsdp=4,model=2")])
def test_every_model_of_the_zoo_is_planned(name: str, layout: str, mesh: str) -> None:
    plan = planned(name, layout, mesh)
    for leaf in plan.leaves:
        divides = any(size % 8 == 0 for size in leaf.shape)
        assert leaf.kind not in ("param", "optimizer") or not divides or used(leaf) or leaf.reason, leaf
    ways = plan.state_bytes() / sum(leaf.num_bytes for leaf in program(name).leaves)
    assert ways < 0.3


# What each preset means


def by_kind(plan: Plan, kind: str) -> list[Placement]:
    return [leaf for leaf in plan.leaves if leaf.kind == kind and leaf.shape]


@pytest.mark.parametrize(
    ("layout", "mesh", "params", "optimizer"),
    [
        ("data", "data=8", set(), set()),
        ("zero1", "fsdp=8", set(), {"fsdp"}),
        ("zero2", "fsdp=8", set(), {"fsdp"}),
        ("fsdp", "fsdp=8", {"fsdp"}, {"fsdp"}),
        ("hsdp", "data=2,fsdp=4", {"fsdp"}, {"fsdp"}),
        ("context", "data=4,context=2", set(), set()),
    ],
)
def test_stored_shardings_follow_the_layout(layout: str, mesh: str, params: set[str], optimizer: set[str]) -> None:
    plan = planned("gpt", layout, mesh)
    positions = set() if layout != "context" else {"context"}  # the table of positions is split with them
    for kind, target in (("param", params), ("optimizer", optimizer)):
        for leaf in by_kind(plan, kind):
            assert used(leaf) in (target, positions), leaf
    stored = {"param": bool(params), "optimizer": bool(optimizer)}
    for kind, is_split in stored.items():
        num_bytes = sum(leaf.num_bytes for leaf in program().leaves if leaf.kind == kind and leaf.shape)
        held = sum(leaf.local_bytes for leaf in by_kind(plan, kind))
        ways = dict(plan.mesh.axes).get("fsdp", 1) if is_split else 1
        assert layout == "context" or held * ways == num_bytes


@pytest.mark.parametrize(
    ("layout", "expected"), [("data", False), ("zero1", False), ("zero2", True), ("fsdp", True), ("hsdp", True)]
)
def test_gradients_are_constrained_to_where_they_are_stored(layout: str, expected: bool) -> None:
    mesh = {"data": "data=8", "hsdp": "data=2,fsdp=4"}.get(layout, "fsdp=8")
    resolver = resolver_of(program(), planned("gpt", layout, mesh))
    step = program().step
    inputs = zip(program().leaves, step.graph.body.inputs, strict=False)
    embed = next(step.axes.classes[value] for leaf, value in inputs if leaf.path == "embed")
    gradients = [
        constraint
        for value, constraint in enumerate(resolver.constraints(step))
        if step.axes.classes[value] == embed
        and step.axes.origins[value] & Origin.BATCH
        and not step.axes.origins[value] & Origin.OPTIMIZER
    ]
    assert gradients
    for constraint in gradients:
        assert constraint is not None and not constraint.is_open
        assert {axis for axes in constraint.spec for axis in axes} == ({"fsdp"} if expected else set())


def test_tensor_shards_megatrons_pairs() -> None:
    plan = planned("gpt", "tensor", "model=8")
    split = {path: [i for i, axes in enumerate(plan[path].spec) if axes] for path in (p.path for p in plan.leaves)}
    axes = {path: [plan[path].axes[i] for i in dims] for path, dims in split.items()}
    assert axes["blocks.up.kernel"] == axes["blocks.up.bias"] == axes["blocks.down.kernel"] == ["mlp"]
    assert axes["blocks.attention.qkv.kernel"] == axes["blocks.attention.out.kernel"] == ["heads"]
    assert axes["embed"] == ["vocab"]
    assert axes["blocks.down.bias"] == axes["norm.scale"] == []


def test_expert_weights_are_sharded_and_the_router_is_not() -> None:
    plan = planned("moe", "expert", "data=4,expert=2")
    assert plan["blocks.0.up"].spec == plan["blocks.1.down"].spec == (("expert",), (), ())
    assert plan["embed.embedding"].spec == ((), ())


@pytest.mark.parametrize(("batch_size", "is_split"), [(16, True), (64, False)])
def test_classes_are_sharded_next_to_a_tensor_axis_where_their_weights_are_larger(
    batch_size: int, is_split: bool
) -> None:
    class Classifier(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)
            self.head = nnx.Linear(32, 48, rngs=rngs)  # with its bias 33 numbers a class

    def loss(model: Classifier, batch: dict[str, jax.Array]) -> jax.Array:
        logits = model.head(model.down(nnx.relu(model.up(batch["x"]))))
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    batch = {"x": jax.ShapeDtypeStruct((batch_size, 32), "float32"), "y": jax.ShapeDtypeStruct((batch_size,), "int32")}
    result = spanax.trace(build=lambda rngs: Classifier(rngs), optimizer=optax.sgd(0.1), batch=batch, loss=loss)
    plan = spanax.plan(result, spanax.cluster("cpu:8"), layout="data+tensor")
    assert plan["up.kernel"].spec == ((), ("model",))
    assert plan["head.kernel"].spec == ((), ("model",) if is_split else ())


def test_sequence_parallel_is_an_option_or_a_suffix() -> None:
    options = {"mesh": "fsdp=4,model=2", "layout": "fsdp+tensor", "sequence_parallel": True}
    by_option = spanax.plan(program(), spanax.cluster("cpu:8"), **options)
    by_name = planned("gpt", "fsdp+tensor+seq", "fsdp=4,model=2")
    assert [leaf.spec for leaf in by_option.leaves] == [leaf.spec for leaf in by_name.leaves]
    step = program().step
    before, after = (
        list(resolver_of(program(), p).constraints(step))
        for p in (planned("gpt", "fsdp+tensor", "fsdp=4,model=2"), by_name)
    )

    def split(value: int, constraint: Constraint | None) -> list[str | None]:
        spec = constraint.spec if constraint else ()
        return [name for name, axes in zip(step.axes.of(value), spec, strict=False) if "model" in axes]

    changed = [value for value, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    assert changed
    for value in changed:
        assert split(value, before[value]) == [] and split(value, after[value]) == ["seq"]


# The choice without a request


def test_no_layout_means_the_fastest_that_fits() -> None:
    actual = program().variant(compute_dtype="bfloat16")
    result = spanax.search(actual, spanax.cluster("a100:2"), pipeline=False, attention="auto")
    best = spanax.plan(program(), spanax.cluster("a100:2"))
    assert best == dataclasses.replace(plan_of(result, result.best), why=best.why)
    text = rule(result, result.best, best) + "; attention "
    assert best.schedule.remat == result.best.remat and best.why.startswith(text)
    # With less memory something else, which is slower.
    tight = dataclasses.replace(
        spanax.cluster("a100:2"), memory_bytes=result.best.upper_bytes - result.best.peak_bytes // 2
    )
    other = spanax.search(actual, tight, pipeline=False, attention="auto")
    assert other.best is not None and other.best.step_seconds > result.best.step_seconds
    assert dataclasses.replace(spanax.plan(program(), tight), why="") == dataclasses.replace(
        plan_of(other, other.best), why=""
    )
    with pytest.raises(SpanaxError, match=r"no layout fits.*\n.*the layout with the lowest peak needs"):
        spanax.plan(program(), dataclasses.replace(tight, memory_bytes=1000))


def test_the_chosen_plan_has_the_pin() -> None:
    plan = spanax.plan(program(), spanax.cluster("a100:8"), pin={"vocab": "model"}, forbid=["mlp"])
    assert dict(plan.mesh.axes)["model"] > 1 and dict(plan.pins) == {"vocab": ("model",), "mlp": ()}
    split = [pair for leaf in plan.leaves for pair in zip(leaf.axes, leaf.spec, strict=True)]
    assert ("vocab", ("model",)) in split
    assert {"model"}.isdisjoint(axis for name, axes in split if name == "mlp" for axis in axes)
    with pytest.raises(SpanaxError, match="cannot pin axis 'vocap'"):
        spanax.plan(program(), spanax.cluster("a100:8"), pin={"vocap": "model"})


def test_on_an_unknown_chip_data_or_fsdp_is_chosen_by_memory() -> None:
    state = sum(leaf.num_bytes for leaf in program().leaves)
    chip = dataclasses.replace(spanax.cluster("cpu:8").chip, peak_flops={})
    roomy = dataclasses.replace(spanax.cluster("cpu:8"), chip=chip, memory_bytes=2 * state)
    tight = dataclasses.replace(roomy, memory_bytes=2 * state - 2)
    unknown = dataclasses.replace(roomy, memory_bytes=None)
    assert [spanax.plan(program(), c).layout.name for c in (roomy, tight, unknown)] == ["data", "fsdp", "data"]
    assert "does not fit" in spanax.plan(program(), tight).why
    assert spanax.plan(program(), tight).mesh == spanax.MeshShape.of("fsdp=8")


@pytest.mark.parametrize(
    ("mesh", "name"),
    [
        ("data=8", "data"),
        ("fsdp=8", "fsdp"),
        ("model=8", "tensor"),
        ("data=2,fsdp=4", "hsdp"),
        ("fsdp=4,model=2", "fsdp+tensor"),
        ("data=4,context=2", "context"),
        ("data=2,fsdp=2,model=2", "data+fsdp+tensor"),
        ("data=8,model=1", "data"),
    ],
)
def test_a_mesh_without_a_layout_implies_one_by_its_names(mesh: str, name: str) -> None:
    plan = planned("gpt", None, mesh)
    assert plan.layout.name == name and plan.why == "implied by the names of the mesh axes"


def test_one_device() -> None:
    for mesh in ({}, {"data": 1}, {"fsdp": 1}):
        plan = spanax.plan(program(), spanax.cluster("cpu:1"), mesh=mesh)
        assert plan.state_bytes() == sum(leaf.num_bytes for leaf in program().leaves)


def test_a_mesh_axis_of_any_name_takes_the_role_in_a_preset() -> None:
    named, renamed = planned("gpt", "fsdp", "fsdp=8"), planned("gpt", "fsdp", "x=8")
    assert [leaf.local_shape for leaf in named.leaves] == [leaf.local_shape for leaf in renamed.leaves]
    assert used(renamed["embed"]) == {"x"}


# Wishes


def test_a_pin() -> None:
    plan = spanax.plan(program(), spanax.cluster("cpu:8"), layout="tensor", mesh="model=8", pin={"embed": "model"})
    assert plan["embed"].spec == ((), ("model",))
    assert plan.pins == (("embed", ("model",)),)
    assert Plan.from_json(plan.to_json()) == plan


def test_a_pin_to_nothing_and_a_forbidden_axis_are_replicated() -> None:
    options = {"layout": "tensor", "mesh": "model=8"}
    for wish in ({"pin": {"vocab": None}}, {"forbid": ["vocab"]}):
        plan = spanax.plan(program(), spanax.cluster("cpu:8"), **options, **wish)
        assert not any("model" in axes for axes in plan["embed"].spec[:1])
        assert used(plan["blocks.up.kernel"]) == {"model"}
        resolver = resolver_of(program(), Plan.from_json(plan.to_json()))
        step = program().step
        for value, constraint in enumerate(resolver.constraints(step)):
            split = zip(step.axes.of(value), constraint.spec if constraint else (), strict=False)
            assert not any(name == "vocab" and axes for name, axes in split)


def test_a_custom_layout_is_planned() -> None:
    mine = Layout("mine", computed=(("x", ("batch",)), ("y", ("mlp", "heads"))), exclusive=("y",))
    plan = spanax.plan(program(), spanax.cluster("cpu:8"), layout=mine, mesh="x=4,y=2")
    assert plan["blocks.up.kernel"].spec == ((), (), ("y",))
    assert plan["embed"].spec == ((), ())
    assert Plan.from_json(plan.to_json()) == plan


# The model's own annotations


def annotated(names: tuple[Any, Any], width: int = 128) -> Program:
    def build(rngs: nnx.Rngs) -> nnx.Module:
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
        return nnx.Linear(32, width, kernel_init=init, rngs=rngs)

    batch = jax.ShapeDtypeStruct((16, 32), "float32")
    return spanax.trace(
        build=build, optimizer=optax.adam(1e-3), batch=batch, loss=lambda model, x: jnp.mean(model(x) ** 2)
    )


@pytest.mark.parametrize("names", [("fsdp", "model"), ("model", "fsdp"), (None, ("fsdp", "model"))])
def test_mesh_axes_written_in_a_model_are_honoured(names: tuple[Any, Any]) -> None:
    plan = spanax.plan(annotated(names), spanax.cluster("cpu:8"), layout="fsdp+tensor", mesh="fsdp=4,model=2")
    target = tuple((name,) if isinstance(name, str) else name or () for name in names)
    assert plan["kernel"].spec == target
    assert plan["kernel"].reason == "as the model's author annotated it"


def test_an_annotation_that_does_not_divide() -> None:
    with pytest.raises(spanax.SpanaxError, match="`kernel` is annotated to be sharded over") as caught:
        spanax.plan(annotated((None, "fsdp"), width=130), spanax.cluster("cpu:4"), layout="fsdp", mesh="fsdp=4")
    assert "130 % 4 = 2" in str(caught.value)


# Numbers and words


def test_state_bytes_equal_those_of_a_device() -> None:
    plan = planned("gpt", "fsdp+tensor", "fsdp=4,model=2")
    for kind in ("param", "optimizer", "other", None):
        leaves = [leaf for leaf in plan.leaves if kind in (None, leaf.kind)]
        by_hand = sum(math.prod(leaf.local_shape) * jnp.dtype(leaf.dtype).itemsize for leaf in leaves)
        assert plan.state_bytes(kind) == by_hand
    assert plan.state_bytes("param") + plan.state_bytes("optimizer") + plan.state_bytes("other") == plan.state_bytes()
    assert plan.state_bytes("optimizer") == 2 * plan.state_bytes("param") + 4 + 4  # two moments, two counts


def test_diff_lists_moved_arrays() -> None:
    data, fsdp = planned("gpt", "data", "data=8"), planned("gpt", "fsdp", "fsdp=8")
    lines = data.diff(fsdp)
    assert "layout: data -> fsdp" in lines
    assert "norm.scale: P(None) -> P('fsdp')" in lines
    assert "inputs: P('data', None) -> P('fsdp', None)" in lines
    assert data.diff(data) == []
    other = data.diff(planned("moe", "expert", "expert=8"))
    assert "positions: only in the first" in other and "blocks.0.up: only in the second" in other


def test_a_plan_prints_its_layout_reason_and_every_parameter() -> None:
    text = str(planned("gpt", "fsdp", "fsdp=8"))
    setting = "batch 16, sequence 32, dtypes of the model, attention plain"
    assert text.startswith(f"layout fsdp on 8 devices (fsdp=8), {setting}: as requested\n")
    images = str(spanax.plan(program("cnn").variant(compute_dtype="bfloat16"), spanax.cluster("cpu:8"), layout="data"))
    assert images.startswith("layout data on 8 devices (data=8), batch 16, bfloat16: as requested\n")
    assert "embed:64" in text and "P('fsdp', None)" in text
    unrolled = str(spanax.plan(program("gpt-unrolled"), spanax.cluster("cpu:8"), layout="fsdp"))
    assert "blocks.*.up.kernel x2" in unrolled
    assert len(text.splitlines()) == 2 + 18


def test_a_leaf_by_its_path() -> None:
    plan = planned("gpt", "fsdp", "fsdp=8")
    assert plan["inputs"].kind == "batch" and plan["optimizer.opt_state.0.mu.embed"].kind == "optimizer"
    with pytest.raises(spanax.SpanaxError, match="the plan has no leaf 'embd'") as caught:
        plan["embd"]
    assert "did you mean 'embed'?" in str(caught.value)


def test_a_data_axis_that_no_preset_uses_shards_the_batch() -> None:
    wide = spanax.plan(program("gpt"), spanax.cluster("cpu:8"), layout="tensor", mesh="data=4,model=2")
    both = spanax.plan(program("gpt"), spanax.cluster("cpu:8"), layout="data+tensor", mesh="data=4,model=2")
    assert [place.spec for place in wide.leaves + wide.batch] == [place.spec for place in both.leaves + both.batch]
