"""Experts in five forms: steps equal those of one device, and send and compute no more than exchanges by hand."""

import functools
from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx

import expert_forms
import experts
import spanax
from byo import corpus
from sampling import sampled
from spanax.errors import IdleAxisError
from spanax.plan.place import resolver_of

X = np.random.default_rng(0).normal(size=(16, expert_forms.LENGTH, expert_forms.DIM)).astype(np.float32)
FORMS = [*expert_forms.BY_HAND]
MESHES = ["data=8", "data=2,expert=4", "expert=8", "expert=2,model=2,data=2", "fsdp=2,expert=4"]
CASES = [
    *((form, mesh) for form in FORMS for mesh in MESHES),
    *((name, mesh) for name in experts.CONVENTIONS for mesh in MESHES[1:2]),
    *((name, "fsdp=8") for name in experts.UNSEEN),
]

MORE = {"MaxText, capacity": 1.07, "vmapped": 1.35, "MaxText, sorted": 2.0, "DeepSeek": 2.0, "weights taken": 4.6}
"""Bytes over those by hand: weights of choices, or of experts, are gathered; results of each choice are sent."""


@functools.cache
def program(form: str, *, is_called_twice: bool = False) -> spanax.Program:
    once = lambda model, x: (model(x) ** 2).mean()  # noqa: E731
    twice = lambda model, x: ((model(x) + model(-x)) ** 2).mean()  # noqa: E731
    return spanax.trace(
        build=functools.partial(expert_forms.Experts if form in FORMS else experts.Layer, form),
        optimizer=optax.sgd(1.0),
        batch=X,
        loss=twice if is_called_twice else once,
    )


@functools.cache
def trained(form: str, mesh: str | None) -> dict[str, Any]:
    built = program(form, is_called_twice=True)
    on = {"layout": "data"} if mesh is None else {"mesh": mesh}
    run = spanax.start(built, spanax.plan(built, "cpu:1" if mesh is None else "cpu:8", **on), seed=1)
    losses = [float(run.step(X)["loss"]) for _ in range(2)]
    return {"loss": np.array(losses)} | {path: corpus.numbers(array) for path, array in run.arrays().items()}


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(
    ("form", "mesh"),
    sampled(CASES, [("gather", "data=2,expert=4")]),
)
def test_steps_are_those_of_one_device(form: str, mesh: str) -> None:
    for path, expected in trained(form, None).items():
        scale = max(np.abs(expected).max(initial=0), 1e-3)
        assert np.abs(trained(form, mesh)[path] - expected).max(initial=0) <= 1e-5 * scale, path


class Crowded(expert_forms.Experts):
    """Of positive inputs, every token chooses the experts of the first device."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__("sorted", rngs)
        self.router[...] += np.arange(expert_forms.EXPERTS) < expert_forms.TOP


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("mesh", sampled(MESHES[1:3], MESHES[1:2]))
def test_an_exchange_has_room_for_all_rows_of_one_device(mesh: str) -> None:
    x = np.abs(X)
    loss = lambda model, x: (model(x) ** 2).mean()  # noqa: E731
    built = spanax.trace(build=Crowded, optimizer=optax.sgd(0.1), batch=x, loss=loss)
    plan = spanax.plan(built, "cpu:8", mesh=mesh)
    assert resolver_of(built, plan).assignment.staying
    crowded, alone = (spanax.start(built, each, seed=1) for each in (plan, spanax.plan(built, "cpu:1")))
    for _ in range(2):
        assert float(crowded.step(x)["loss"]) == pytest.approx(float(alone.step(x)["loss"]), rel=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("mesh", expert_forms.MESHES)
@pytest.mark.parametrize("form", FORMS)
def test_no_more_bytes_and_flops_than_an_exchange_by_hand(form: str, mesh: str) -> None:
    rows = expert_forms.compared(form, mesh)
    for figure in ("MFLOP", "sent"):
        assert rows["Spanax"][figure] <= 1.05 * rows["by hand"][figure], figure


@pytest.mark.slow
@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("mesh", MESHES[1:3])
@pytest.mark.parametrize("name", experts.CONVENTIONS)
def test_conventions_of_other_authors_send_what_an_exchange_by_hand_does(name: str, mesh: str) -> None:
    form = experts.CONVENTIONS[name][0]
    rows = expert_forms.compared(form, mesh, functools.partial(experts.Layer, name))
    assert rows["Spanax"]["MFLOP"] <= 1.1 * rows["by hand"]["MFLOP"]
    assert rows["Spanax"]["sent"] <= MORE.get(name, 1.05) * rows["by hand"]["sent"]


@pytest.mark.parametrize("name", experts.UNSEEN)
def test_experts_of_which_no_dim_is_seen_are_refused(name: str) -> None:
    with pytest.raises(IdleAxisError, match="only a router's scores have experts"):
        spanax.plan(program(name), "cpu:8", mesh="data=2,expert=4")


@pytest.mark.slow
@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("form", FORMS)
def test_the_plan_counts_what_each_form_sends(form: str) -> None:
    built = program(form)
    plan = spanax.plan(built, "cpu:8", mesh="data=2,expert=4")
    report = spanax.check(built, plan, "cpu:8", level=2, cache=False)
    assert report.compiled.flops == pytest.approx(report.predicted.flops, rel=0.01)
    for axes, expected in report.predicted.collectives.items():
        for kind, num_bytes in expected.items():
            if num_bytes > 20_000:
                assert report.compiled.collectives[axes][kind] == pytest.approx(num_bytes, rel=0.05), (axes, kind)
