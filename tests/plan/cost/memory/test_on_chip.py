"""The memory on a TPU: small live values stay in it, and tuples of buffers are in main memory."""

import dataclasses

import numpy as np
import pytest

import spanax
from programs import zoo_program
from spanax.plan.cost.memory.tiles import OnChip
from spanax.plan.evaluate import evaluate

ON_CHIP = OnChip(112 << 20)


def test_a_chip_without_compiler_managed_memory_has_none() -> None:
    assert OnChip.of(spanax.cluster("h100:8").chip) is None
    assert OnChip.of(spanax.cluster("v5e:2x4").chip) == ON_CHIP


def test_live_values_that_fit_on_the_chip_take_no_main_memory() -> None:
    total = np.asarray([1e6, 112 << 20, 1e9, 1e10])
    all_small = total * ON_CHIP.share_in_main_memory(total, total)
    assert all_small == pytest.approx([0, 0, 1e9 - (112 << 20), 1e10 - (112 << 20)])
    none_small = total * ON_CHIP.share_in_main_memory(total, 0 * total)
    assert none_small == pytest.approx(total)


def test_live_values_leave_the_rest_of_the_chip_free() -> None:
    total = np.asarray([0, 28 << 20, 112 << 20, 1e10])
    assert ON_CHIP.free_share(total) == pytest.approx([1, 0.75, 0, 0])


def test_predicted_memory_grows_with_the_batch_where_values_do_not_fit_on_the_chip() -> None:
    machine, peaks = spanax.cluster("v5e:2x4"), []
    program = zoo_program("cnn")
    plan = spanax.plan(program, machine, layout="data")
    for factor in (4096, 16384, 65536):
        cost = evaluate(program, plan, machine)
        grid = dataclasses.replace(cost.grid, scale=np.asarray([float(factor)]))
        peaks.append(float(cost.layout.memory([grid])[0].peak_bytes[0]))
    assert peaks == sorted(peaks) and peaks[-1] > 3 * peaks[0]


def test_arguments_are_padded_on_tpus_only() -> None:
    program = zoo_program("cnn")
    for name, is_padded in (("v5e:2x4", True), ("h100:8", False)):
        machine = spanax.cluster(name)
        groups = evaluate(program, spanax.plan(program, machine, layout="data"), machine).memory.groups
        assert ("padding of the state" in groups) == is_padded == ("compiler's tables" in groups)
