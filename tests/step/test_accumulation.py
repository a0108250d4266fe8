"""Microbatches: the loss, metrics, gradients and noise of the full batch, for any loss and in any layout."""

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import losses
import spanax
from sampling import sampled
from spanax.errors import SpanaxError
from spanax.trace.program import Program

COUNTS = (1, 2, 4, 8)
LAYOUTS = {"data": "data=2", "fsdp": "fsdp=2", "pipeline": "pipe=2"}
CELLS = dict(
    zip((*losses.LINEAR, *losses.NONLINEAR), itertools.cycle(itertools.product(COUNTS[1:], LAYOUTS)), strict=False)
)
GRADIENT = optax.sgd(0.1, momentum=0.0)
"""Its momentum is the gradient of the last step."""


COVERING = ("metrics", "policy gradient", "noise", "weight decay", "perplexity", "root")
"""Losses that need every sum, draw and pass that there is, in each layout and each number of microbatches."""


def cases() -> list[Any]:
    every = [(name, *cell) for name in CELLS for cell in itertools.product(COUNTS, LAYOUTS)]
    return sampled(every, [(name, *CELLS[name]) for name in COVERING])


def program(name: str, count: int) -> Program:
    loss = (losses.LINEAR | losses.NONLINEAR)[name]
    return spanax.trace(build=losses.Model, optimizer=GRADIENT, batch=batch(), loss=loss, microbatches=count)


@contextlib.contextmanager
def precision(dtype: str) -> Iterator[None]:
    jax.config.update("jax_enable_x64", dtype == "float64")
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)


def batch() -> dict[str, np.ndarray]:
    """A batch in the precision of the parameters."""
    wide = jax.dtypes.canonicalize_dtype(float)
    return {name: x.astype(wide) if x.dtype == np.float32 else x for name, x in losses.batch(0).items()}


def named(state: nnx.State, *, prefix: str = "") -> dict[str, Any]:
    return {prefix + ".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}


def step(traced: Program, cluster: spanax.Cluster, mesh: str) -> dict[str, np.ndarray]:
    """Metrics, gradients and counts of random numbers of one step by Spanax."""
    run = spanax.start(traced, spanax.plan(traced, cluster, mesh=mesh), seed=3)
    metrics = run.step(batch())
    gradients = {path: array for path, array in run.arrays("optimizer").items() if ".trace." in path}
    counts = {path: array for path, array in run.arrays("other").items() if path.endswith("count")}
    del metrics["grad_norm"]
    return {path: np.asarray(value) for path, value in (metrics | gradients | counts).items()}


@functools.cache
def reference(name: str, dtype: str) -> dict[str, np.ndarray]:
    """The same by `nnx.value_and_grad` of the loss for the batch."""
    traced = program(name, 1)
    model = spanax.start(traced, spanax.plan(traced, spanax.cluster("cpu:1"), mesh="data=1"), seed=3).model()
    loss = (losses.LINEAR | losses.NONLINEAR)[name]

    def value(model: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        returned = loss(model, batch)
        return returned if isinstance(returned, tuple) else (returned, {})

    (scalar, metrics), gradients = nnx.jit(nnx.value_and_grad(value, has_aux=True))(model, batch())
    named_gradients = named(gradients, prefix="optimizer.opt_state.0.trace.")
    counts = named(nnx.state(model, nnx.RngCount))
    return {path: np.asarray(each) for path, each in ({"loss": scalar} | metrics | named_gradients | counts).items()}


def difference(name: str, count: int, layout: str, dtype: str) -> tuple[float, float]:
    """How far a step is from the reference: metrics and gradients, relative to the largest element of each metric and
    of all gradients. Counts of random numbers are metrics here."""
    with precision(dtype):
        expected, results = reference(name, dtype), step(program(name, count), spanax.cluster("cpu:2"), LAYOUTS[layout])
    assert results.keys() == expected.keys()
    apart = {path: np.abs(results[path] - value).max() for path, value in expected.items()}
    size = {path: np.abs(value).max() for path, value in expected.items()}
    gradients = {path for path in expected if ".trace." in path}
    of_metrics = max((apart[path] / size[path] for path in expected.keys() - gradients if apart[path]), default=0.0)
    return of_metrics, max(apart[path] for path in gradients) / max(size[path] for path in gradients)


@pytest.mark.filterwarnings("ignore:every step draws the same random numbers")  # so does `noise`, to be comparable
@pytest.mark.parametrize(("name", "count", "layout"), cases())
def test_microbatches_change_nothing(name: str, count: int, layout: str) -> None:
    """Float64 separates errors from rounding: 1.2e-15 is the largest difference in the 224 cells that run."""
    if layout == "pipeline" and name in losses.NONLINEAR:
        with pytest.raises(SpanaxError, match="needs its sums over the batch beforehand"):
            spanax.plan(program(name, count), spanax.cluster("cpu:2"), mesh=LAYOUTS[layout])
        return
    assert max(difference(name, count, layout, "float64")) < 1e-12


ROUNDED = [name for name in CELLS if name in losses.LINEAR or CELLS[name][1] != "pipeline"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:every step draws the same random numbers")
@pytest.mark.parametrize("name", ROUNDED)
def test_float32_only_rounds(name: str) -> None:
    """Measured: 1.8e-7 of a metric, 3.4e-7 of the largest gradient."""
    assert max(difference(name, *CELLS[name], "float32")) < 1e-6


@pytest.mark.parametrize("name", sampled(losses.MIXED, ["contrastive", "hardest"]))
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
        spanax.trace, build=losses.Model, optimizer=GRADIENT, batch=batch(), loss=losses.masked, microbatches=8
    )
    cluster = spanax.cluster("cpu:1")
    exact, mean = (step(make(accumulate=each), cluster, "data=1")["loss"] for each in ("exact", "mean"))
    assert exact == pytest.approx(reference("masked", "float32")["loss"], rel=1e-6)
    assert abs(mean - exact) > 1e-3


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
