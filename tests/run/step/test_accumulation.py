"""Microbatches: the loss, metrics, gradients and noise of the whole batch, for any loss and under any layout."""

import functools
import itertools
from typing import Any

import numpy as np
import optax
import pytest

import losses
import spanax
from spanax.errors import SpanaxError
from spanax.trace.program import Program

COUNTS = (2, 4, 8)
LAYOUTS = {"data": "data=2", "fsdp": "fsdp=2", "pipeline": "pipe=2"}
QUICK = dict(
    zip((*losses.LINEAR, *losses.NONLINEAR), itertools.cycle(itertools.product(COUNTS, LAYOUTS)), strict=False)
)


def cases() -> list[Any]:
    found = []
    for name in (*losses.LINEAR, *losses.NONLINEAR):
        for count, layout in itertools.product(COUNTS, LAYOUTS):
            marks = () if QUICK[name] == (count, layout) else pytest.mark.slow
            found.append(pytest.param(name, count, layout, marks=marks))
    return found


def program(name: str, count: int) -> Program:
    loss = (losses.LINEAR | losses.NONLINEAR)[name]
    return spanax.trace(
        build=losses.Model, optimizer=optax.adam(1e-2), batch=losses.batch(0), loss=loss, microbatches=count
    )


def trained(traced: Program, plan: spanax.Plan) -> dict[str, np.ndarray]:
    run = spanax.start(traced, plan, seed=3)
    steps = [run.step(losses.batch(step)) for step in range(2)]
    return {name: np.asarray([np.asarray(step[name]) for step in steps]) for name in steps[0]}


@functools.cache
def reference(name: str) -> dict[str, np.ndarray]:
    traced = program(name, 1)
    return trained(traced, spanax.plan(traced, spanax.cluster("cpu:1"), layout="data"))


@pytest.mark.filterwarnings("ignore:every step draws the same random numbers")  # so does `noise`, to be comparable
@pytest.mark.parametrize(("name", "count", "layout"), cases())
def test_microbatches_change_nothing(name: str, count: int, layout: str) -> None:
    traced, cluster = program(name, count), spanax.cluster("cpu:2")
    if layout == "pipeline" and name in losses.NONLINEAR:
        with pytest.raises(SpanaxError, match="needs its sums over the batch beforehand"):
            spanax.plan(traced, cluster, mesh=LAYOUTS[layout])
        return
    metrics = trained(traced, spanax.plan(traced, cluster, mesh=LAYOUTS[layout]))
    for metric, expected in reference(name).items():
        np.testing.assert_allclose(metrics[metric], expected, rtol=3e-6, atol=1e-6, err_msg=metric)


@pytest.mark.parametrize("name", losses.MIXED)
def test_a_loss_that_compares_examples_is_refused(name: str) -> None:
    loss, where = losses.MIXED[name]
    make = functools.partial(
        spanax.trace, build=losses.Model, optimizer=optax.sgd(1e-2), batch=losses.batch(0), loss=loss
    )
    with pytest.raises(SpanaxError, match="microbatches would change the loss") as raised:
        make(microbatches=4)
    assert "losses.py" in str(raised.value), str(raised.value)
    whole = make()
    assert whole.accumulates.error is not None
    with pytest.raises(SpanaxError, match="microbatches would change the loss"):
        spanax.plan(whole, spanax.cluster("cpu:2"), mesh="pipe=2")
    ranked = spanax.search(whole, spanax.cluster("a100-80gb:8"))
    assert ranked.candidates and {each.microbatches for each in ranked.candidates} == {1}
    assert make(microbatches=4, accumulate="mean").microbatches == 4


def test_the_mean_over_microbatches_is_another_loss() -> None:
    """What `accumulate="mean"` asks for, and what the default must not be: a mean of masked means."""
    make = functools.partial(
        spanax.trace, build=losses.Model, optimizer=optax.sgd(1e-2), batch=losses.batch(0), loss=losses.masked
    )
    values = {}
    for accumulate in ("exact", "mean"):
        traced = make(microbatches=8, accumulate=accumulate)
        values[accumulate] = trained(traced, spanax.plan(traced, spanax.cluster("cpu:1"), layout="data"))["loss"][0]
    assert values["exact"] == pytest.approx(reference("masked")["loss"][0], rel=1e-6)
    assert abs(values["mean"] - values["exact"]) > 1e-3


def test_the_planner_chooses_microbatches_by_itself_only_where_the_loss_is_evaluated_once() -> None:
    for loss, passes in ((losses.masked, 1), (losses.confident, 2)):
        traced = spanax.trace(build=losses.Model, optimizer=optax.sgd(1e-2), batch=losses.batch(0), loss=loss)
        assert traced.accumulates.num_passes == passes
        ranked = spanax.search(traced, spanax.cluster("a100-80gb:2"), top=100)
        assert any(each.microbatches > 1 for each in ranked.candidates) == (passes == 1)


def test_an_unknown_accumulation_is_refused() -> None:
    with pytest.raises(SpanaxError, match="unknown accumulation 'means'"):
        spanax.trace(
            build=losses.Model, optimizer=optax.sgd(1e-2), batch=losses.batch(0), loss=losses.masked, accumulate="means"
        )
