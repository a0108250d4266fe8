"""Assignments of named axes to mesh axes that no preset has: what the search tries, chooses and runs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import spanax
from byo import corpus
from programs import zoo_program
from sampling import sampled
from spanax.check.parity.parity import parity
from spanax.hardware.mesh import MeshShape
from spanax.plan.candidate import Search
from spanax.plan.candidates import local_search
from spanax.plan.candidates.moves import assignment_text
from spanax.plan.candidates.request import Request
from spanax.plan.choose import chosen, decided, searched
from spanax.plan.layout import Layout
from spanax.plan.place import placed
from spanax.plan.plan import Plan
from spanax.plan.reason import Code, Reason
from spanax.plan.space import layout_on
from spanax.trace.program import Program

NODES, EDGES, FEATURES = 16384, 24576, 16
CLUSTER = "v5e:2x4"


class GraphNet(nnx.Module):
    """Messages along the edges of one large graph, summed at its nodes."""

    def __init__(self, rngs: nnx.Rngs, dim: int = 128):
        self.enter = nnx.Linear(FEATURES, dim, rngs=rngs)
        self.message, self.update = nnx.Linear(2 * dim, dim, rngs=rngs), nnx.Linear(2 * dim, dim, rngs=rngs)
        self.leave = nnx.Linear(dim, 8, rngs=rngs)

    def __call__(self, x: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        h = nnx.relu(self.enter(x))
        messages = nnx.relu(self.message(jnp.concatenate([h[senders], h[receivers]], axis=-1)))
        sums = jax.ops.segment_sum(messages, receivers, num_segments=NODES)
        return self.leave(h + nnx.relu(self.update(jnp.concatenate([h, sums], axis=-1))))


@functools.cache
def graph_net() -> Program:
    def loss(model: Any, graph: Any) -> jax.Array:
        logits = model(graph["nodes"], graph["senders"], graph["receivers"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, graph["labels"]).mean()

    ids = jax.ShapeDtypeStruct((EDGES,), "int32")
    batch = {
        "nodes": jax.ShapeDtypeStruct((NODES, FEATURES), "float32"),
        "labels": jax.ShapeDtypeStruct((NODES,), "int32"),
        "senders": ids,
        "receivers": ids,
        "weights": jax.ShapeDtypeStruct((EDGES,), "float32"),
    }
    return spanax.trace(build=GraphNet, optimizer=optax.adamw(1e-2, eps=0.1), batch=batch, loss=loss)


@functools.cache
def on_tpus() -> Search:
    return searched(graph_net(), spanax.cluster(CLUSTER), Request(), top=20)


def assigned(program: Program, mesh: str, **names: tuple[str, ...]) -> Plan:
    """A plan of a preset with other names for some mesh axes."""
    shape = MeshShape.of(mesh)
    preset = layout_on("fsdp", False, shape)
    computed = tuple((axis, names.get(axis, old)) for axis, old in preset.computed)
    return placed(program, Layout(preset.name, computed, exclusive=preset.exclusive), shape, pins={}, why="")


def test_nodes_and_edges_are_sharded_over_the_same_devices() -> None:
    result = on_tpus()
    best = result.best
    preset = next(each for each in result.candidates if each.assigned is None)
    assert best.assigned is not None and "nodes over" in best.layout
    assert best.step_seconds * (1 + local_search.ASSIGNMENT_MARGIN) < preset.step_seconds
    plan = chosen(result)
    assert all(plan[path].spec[0] == plan["senders"].spec[0] != () for path in ("nodes", "labels"))
    assert "by local search" in plan.why and Plan.from_json(plan.to_json()) == plan


@pytest.mark.usefixtures("devices")
def test_the_chosen_layout_equals_one_device() -> None:
    assert parity(graph_net(), chosen(on_tpus()), steps=2).passes


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(
    ("name", "mesh", "names", "sharded"),
    [
        ("multitask", "data=8", {"data": ("batch", "vocab")}, {"vocab": ("data",)}),
        ("moe", "expert=4,model=2", {"model": ("experts", "heads", "vocab")}, {"experts": ("expert", "model")}),
        ("mlp", "data=2,model=4", {"data": ("batch", "hidden")}, {"hidden": ("data", "model")}),
        ("unet", "data=4,context=2", {"context": ("height",)}, {}),
    ],
)
def test_assignments_equal_one_device(name: str, mesh: str, names: Any, sharded: dict[str, tuple[str, ...]]) -> None:
    """Rows of tables, experts apart from heads, two mesh axes for one dim, rows of images."""
    if "context" in mesh:
        plan = spanax.plan(
            zoo_program(name), "cpu:8", mesh=mesh, layout=Layout("rows", (("data", ("batch",)), *names.items()))
        )
    else:
        plan = assigned(zoo_program(name), mesh, **names)
    for axis, over in sharded.items():
        specs = [
            leaf.spec[dim]
            for leaf in plan.leaves
            for dim, each in enumerate(leaf.axes)
            if each == axis and leaf.kind == "param"
        ]
        assert over in {tuple(sorted(spec)) for spec in specs}
    assert parity(zoo_program(name), plan, steps=2).passes


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("name", sampled(["gqa", "tied"], ["gqa"]))
def test_tables_over_the_axes_of_the_batch_equal_one_device(name: str) -> None:
    """Grouped queries, and a table that is the head, too."""
    program = corpus.program(name)
    plan = assigned(program, "data=8", data=("batch", "vocab"))
    assert any("vocab" in leaf.axes and leaf.spec[leaf.axes.index("vocab")] for leaf in plan.leaves)
    assert parity(program, plan, steps=2, batch=lambda step: corpus.batch(name, step)).passes


def test_requests_keep_their_presets() -> None:
    for request in (Request(layout="data"), Request(mesh="data=8")):
        plan = decided(graph_net(), spanax.cluster(CLUSTER), request)
        assert plan.layout.splits("data") == ("batch",)


def test_a_forbidden_axis_is_not_assigned() -> None:
    result = searched(graph_net(), spanax.cluster(CLUSTER), Request(pins={"nodes": None}), top=20)
    assert not any(each.assigned and "nodes over" in each.layout for each in result.candidates)
    assert chosen(result)["nodes"].spec[0] == ()


def test_an_assignment_must_be_faster_by_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_search, "ASSIGNMENT_MARGIN", 10.0)
    result = searched(graph_net(), spanax.cluster(CLUSTER), Request(), top=100_000)
    assert result.best.assigned is None and result.assignment is None
    assert any(each.assigned for each in result.candidates)


def test_the_number_of_priced_assignments_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = on_tpus().layouts_priced
    monkeypatch.setattr(local_search, "MOST_PRICED", 0)
    presets = searched(graph_net(), spanax.cluster(CLUSTER), Request(), top=20)
    assert presets.layouts_priced < usual <= presets.layouts_priced + 12
    assert presets.best.assigned is None


def test_the_library_chooses_what_the_command_ranks_first() -> None:
    plan = spanax.plan(graph_net(), CLUSTER)
    assert (plan.layout.name, plan.mesh) == (on_tpus().best.layout, on_tpus().best.mesh)


def test_searches_name_what_is_assigned() -> None:
    preset = Layout("expert+tensor", (("expert", ("experts", "batch")), ("model", ("heads", "mlp"))))
    changed = Layout("", (("expert", ("experts", "batch", "mlp")), ("model", ("experts", "heads"))))
    assert assignment_text(changed, preset) == "experts over expert and model, mlp over expert"
    assert on_tpus().rejected[Reason(Code.NOT_ASSIGNED)] > 0
