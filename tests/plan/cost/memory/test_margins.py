"""Margins: the upper estimate is never below the prediction, grows with it, and is what decides whether a plan fits."""

import dataclasses

import numpy as np

import spanax
from programs import zoo_program
from spanax.plan.cost.memory.margins import EXCESS_BYTES, MARGINS, Kind, margin_of, upper_bytes

V5E = spanax.cluster("v5e:2x4")


def test_the_upper_estimate_exceeds_the_prediction_and_grows_with_it() -> None:
    peaks = np.geomspace(1e3, 1e11, 2000)
    for name in ("mlp", "cnn"):
        upper = upper_bytes(zoo_program(name), peaks)
        assert (upper > peaks).all() and (np.diff(upper) >= 0).all()
        assert (upper < 2 * peaks).all()


def test_the_constant_part_of_the_margin_is_added_once() -> None:
    small, large = upper_bytes(zoo_program("cnn"), np.asarray([1e6, 1e11]))
    assert small == 1e6 * (1 + MARGINS[Kind.SMALL].share)
    assert large == 1e11 * (1 + MARGINS[Kind.CONVOLUTIONS].share) + EXCESS_BYTES


def test_the_margin_depends_on_the_kind_of_program_and_on_its_size() -> None:
    def kind(name: str, num_bytes: float) -> Kind:
        return margin_of(zoo_program(name), num_bytes).kind

    assert kind("cnn", 1e10) == Kind.CONVOLUTIONS and kind("mlp", 1e10) == Kind.MATMULS
    assert kind("mlp", 1e6) == kind("cnn", 1e6) == Kind.SMALL


def test_every_margin_states_its_source() -> None:
    for kind, margin in MARGINS.items():
        assert margin.kind is kind and margin.num_cells > 0 and margin.source and 0 < margin.reserve < 1


def test_a_layout_fits_by_its_upper_estimate() -> None:
    program = zoo_program("mlp")
    best = spanax.search(program, V5E, layout="data").best
    assert best is not None
    upper = float(upper_bytes(program, np.asarray(float(best.peak_bytes))))

    def fitting(limit: float) -> bool:
        machine = dataclasses.replace(V5E, memory_bytes=int(limit))
        return any(each.remat == best.remat for each in spanax.search(program, machine, layout="data").candidates)

    assert fitting(upper + 1) and not fitting(best.peak_bytes * 1.01)
