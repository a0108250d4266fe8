"""Calibration: known constants are recovered from the steps that they cost, and little else changes."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

import spanax
from programs import zoo_program
from spanax.errors import SpanaxError
from spanax.hardware.cluster import Cluster
from spanax.plan.calibration.calibrate import Calibration, calibrate
from spanax.plan.calibration.constants import CONSTANTS, Constant, slowed
from spanax.plan.calibration.measured import MeasuredStep, StepSeconds
from spanax.plan.candidate import Search, plan_of
from spanax.plan.evaluate import Evaluation, evaluate
from spanax.plan.search import search

TRUTH = {"matmul rate": 0.6, "memory rate": 1.5, "link inside, rate": 2.0, "link inside, start": 3.0}


@functools.cache
def priced(on: str) -> Search:
    return search(zoo_program("gpt"), spanax.cluster(on), remat=("none",), microbatches=1, pipeline=False, top=1000)


@functools.cache
def evaluation(on: str, row: int) -> Evaluation:
    result = priced(on)
    return evaluate(result.programs["none"], plan_of(result, result.candidates[row]), result.cluster)


def measured(on: str, truth: Mapping[str, float], rows: Sequence[int], noise: float = 0.0) -> list[MeasuredStep]:
    """Ten steps of some layouts, with the times that they take on devices whose constants are known."""
    steps, wobble = list[MeasuredStep](), np.asarray([-1, 1, 0, 0.5, -0.5, 1, -1, 0, -0.5, 0.5]) * noise
    for row in rows:
        step = MeasuredStep.of(evaluation(on, row), StepSeconds((1.0,) * 10), source="runs/a")
        seconds = step.predicted(slowed(spanax.cluster(on), truth))
        taken = StepSeconds(tuple((seconds * (1 + wobble)).tolist()))
        steps.append(dataclasses.replace(step, steps=taken))
    return steps


def change(calibration: Calibration, name: str) -> float:
    """How many times as long the work of a constant takes after calibration."""
    (row,) = [row for row in calibration.constants if row.name.startswith(name)]
    return row.after / row.before if row.unit == "s" else row.before / row.after


def test_measured_layouts_tell_the_constants_and_the_rank_of_all_others() -> None:
    """Every third layout, from the fastest to the slowest, is measured on devices with known constants."""
    on = "cpu:8"
    machine = spanax.cluster(on)
    rows = range(0, len(priced(on).candidates), 3)
    result = calibrate(measured(on, TRUTH, rows), machine)
    assert result.is_applied and result.errors[0] > 0.1 > 0.03 > result.errors[1]
    for name in ("memory rate", "link inside, start"):
        assert change(result, name) == pytest.approx(TRUTH[name], rel=0.25)
    assert change(result, "matmul rate") < 1 < change(result, "link inside, rate")
    others = measured(on, TRUTH, range(1, rows.stop, 15))
    before = [abs(step.predicted(machine) / step.steps.median - 1) for step in others]
    after = [abs(step.predicted(result.cluster) / step.steps.median - 1) for step in others]
    assert np.mean(after) < 0.05 < 0.1 < np.mean(before)

    # On devices whose collectives take 30 times as long, another layout is the fastest.
    truth = {"link inside, rate": 3.0, "link inside, start": 30.0}
    calibrated = calibrate(measured(on, truth, rows), machine).cluster

    def best(result: Search) -> tuple[str, str]:
        assert result.best is not None
        return result.best.layout, str(result.best.mesh)

    def on_devices(cluster: Cluster) -> Search:
        return search(zoo_program("gpt"), cluster, remat=("none",), microbatches=1, pipeline=False)

    assert best(priced(on)) != best(on_devices(slowed(machine, truth))) == best(on_devices(calibrated))


def test_a_single_run_scales_all_constants() -> None:
    """It cannot tell the constants apart, so that the order of the layouts hardly changes."""
    on = "cpu:8"
    everything = {constant.name: 1.5 for constant in CONSTANTS}
    (step,) = measured(on, everything, [0])
    result = calibrate([step], spanax.cluster(on))
    (row,) = result.steps
    assert abs(row.after / row.measured - 1) < 0.02 < abs(row.before / row.measured - 1)
    moved = [change(result, name) for name in ("matmul rate", "memory rate", "link inside, rate")]
    assert min(moved) > 1.25 and max(moved) / min(moved) < 1.25
    # The starts of kernels take a ten-thousandth of this step, which says nothing of them.
    before, after = step.cluster.chip, result.cluster.chip
    assert after.kernel_start_seconds == before.kernel_start_seconds
    uncertain = {row.name: row.uncertainty for row in result.constants}
    assert uncertain["kernel start"] is None and (uncertain["memory rate"] or 0) > 0.1


def test_noise_larger_than_the_correction_changes_nothing() -> None:
    on, truth = "cpu:8", {constant.name: 1.1 for constant in CONSTANTS}
    machine = spanax.cluster(on)
    noisy = calibrate(measured(on, truth, [0], noise=0.6), machine)
    assert noisy.steps[0].noise > 0.1 and not noisy.is_applied
    assert noisy.cluster == machine and noisy.errors[0] == noisy.errors[1]
    assert all(row.before == row.after for row in noisy.constants)
    clear = calibrate(measured(on, truth, [0], noise=0.02), machine)
    assert clear.is_applied and clear.errors[1] < 0.02


def test_a_run_of_another_program_has_less_weight() -> None:
    on, truth = "cpu:8", {constant.name: 2.0 for constant in CONSTANTS}
    (step,) = measured(on, truth, [0])
    same = calibrate([step], spanax.cluster(on))
    other = calibrate([dataclasses.replace(step, transfers=("another program",))], spanax.cluster(on))
    assert other.steps[0].after < same.steps[0].after and other.steps[0].uncertainty > 0.1 > same.steps[0].uncertainty


def test_changed_numbers_name_their_source() -> None:
    on = "h100:2x4"
    result = calibrate(measured(on, {"matmul rate": 2.0}, [0, 1]), spanax.cluster(on))
    chip, before = result.cluster.chip, spanax.cluster(on).chip
    assert chip.sources["sustained_share"] == "calibrated on runs/a, 10 steps of 2 layouts"
    assert chip.sources["memory_bytes"] == before.sources["memory_bytes"]
    assert chip.sustained_share < before.sustained_share and chip.peak_flops == before.peak_flops


def test_too_few_steps_are_refused() -> None:
    best = evaluation("cpu:8", 0)
    with pytest.raises(SpanaxError, match="has 4 steady steps; calibration needs at least 5"):
        MeasuredStep.of(best, StepSeconds((1.0,) * 4), source="runs/a")
    with pytest.raises(SpanaxError, match="not positive"):
        MeasuredStep.of(best, StepSeconds((1.0, 0.0, 1.0, 1.0, 1.0)), source="runs/a")
    with pytest.raises(SpanaxError, match="at least one measured step"):
        calibrate([], spanax.cluster("cpu:8"))


def test_drift_and_waits_count_as_noise() -> None:
    assert StepSeconds((1.0,) * 10).noise == 0
    assert StepSeconds((1.0,) * 5 + (1.2,) * 5).noise > 0.08
    assert StepSeconds((1.0,) * 10, wait_share=0.3).noise == pytest.approx(0.3)


UNKNOWN = {("cpu:8", "link between, rate"), ("cpu:8", "link between, start"), ("v5e:4x4", "kernel start")}


@pytest.mark.parametrize("on", ["cpu:8", "h100:2x8", "v5e:4x4"])
@pytest.mark.parametrize("constant", CONSTANTS, ids=lambda constant: constant.name)
def test_every_constant_of_a_chip_slows_its_work(on: str, constant: Constant) -> None:
    machine = spanax.cluster(on)
    before, after = (constant.value(each.chip, "fp32") for each in (machine, slowed(machine, {constant.name: 2.0})))
    if before is None:
        assert (on, constant.name) in UNKNOWN and after is None
    else:
        assert after == pytest.approx(2 * before if constant.unit == "s" else before / 2)
    assert slowed(machine, {}) == machine


def test_all_constants_together_are_the_speed_of_the_machine() -> None:
    for on in ("cpu:8", "a100:8"):
        machine = spanax.cluster(on)
        twice = slowed(machine, {constant.name: 2.0 for constant in CONSTANTS})
        for step in measured(on, {}, [0, -1]):
            assert step.predicted(twice) == pytest.approx(2 * step.predicted(machine), rel=1e-6)
