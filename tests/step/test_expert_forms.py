"""Experts in five forms: steps equal those of one device, and send and compute no more than exchanges by hand."""

import functools
from typing import Any

import numpy as np
import optax
import pytest

import expert_forms
import spanax
from byo import corpus
from sampling import sampled

X = np.random.default_rng(0).normal(size=(16, expert_forms.LENGTH, expert_forms.DIM)).astype(np.float32)
FORMS = [*expert_forms.BY_HAND]
MESHES = ["data=8", "data=2,expert=4", "expert=8", "expert=2,model=2,data=2", "fsdp=2,expert=4"]


@functools.cache
def program(form: str, *, is_called_twice: bool = False) -> spanax.Program:
    once = lambda model, x: (model(x) ** 2).mean()  # noqa: E731
    twice = lambda model, x: ((model(x) + model(-x)) ** 2).mean()  # noqa: E731
    return spanax.trace(
        build=lambda rngs: expert_forms.Experts(form, rngs),
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
    sampled([(form, mesh) for form in FORMS for mesh in MESHES], [("gather", "data=2,expert=4")]),
)
def test_steps_are_those_of_one_device(form: str, mesh: str) -> None:
    for path, expected in trained(form, None).items():
        scale = max(np.abs(expected).max(initial=0), 1e-3)
        assert np.abs(trained(form, mesh)[path] - expected).max(initial=0) <= 1e-5 * scale, path


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
