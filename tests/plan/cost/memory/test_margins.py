"""Margins: the upper estimate is never below the prediction, grows with it, and is what decides whether a plan fits."""

import dataclasses

import numpy as np

import spanax
from programs import zoo_program
from spanax.plan.cost.memory.margins import MARGINS, SMALL_BYTES, Kind, margin_of, upper_bytes

V5E, H100 = spanax.cluster("v5e:2x4"), spanax.cluster("h100:8")


def test_the_upper_estimate_exceeds_the_prediction_and_grows_with_it() -> None:
    peaks = np.concatenate([np.geomspace(1e3, 1e11, 200), SMALL_BYTES + np.arange(-2.0, 3.0)])
    peaks.sort()
    for name in ("mlp", "cnn"):
        for cluster in (V5E, H100):
            upper = upper_bytes(zoo_program(name), cluster.chip, peaks)
            assert (upper > peaks).all() and (np.diff(upper) >= 0).all()


def test_the_margin_depends_on_the_kind_of_program_and_on_the_compiler() -> None:
    def kind(name: str, cluster: spanax.Cluster, num_bytes: float) -> Kind:
        return margin_of(zoo_program(name), cluster.chip, num_bytes).kind

    assert kind("cnn", V5E, 1e10) == kind("cnn", H100, 1e6) == Kind.CONVOLUTIONS
    assert kind("mlp", V5E, 1e10) == kind("mlp", H100, 1e6) == Kind.MATMULS
    assert kind("mlp", V5E, 1e6) == kind("cnn", V5E, 1e6) == Kind.SMALL


def test_every_margin_states_what_it_is_from() -> None:
    for kind, margin in MARGINS.items():
        assert margin.kind is kind and margin.num_cells > 0 and margin.source and 0 < margin.reserve < 1


def test_a_layout_fits_by_its_upper_estimate() -> None:
    program = zoo_program("mlp")
    best = spanax.search(program, V5E, layout="data").best
    assert best is not None
    upper = float(upper_bytes(program, V5E.chip, np.asarray(float(best.peak_bytes))))

    def fitting(limit: float) -> bool:
        machine = dataclasses.replace(V5E, memory_bytes=int(limit))
        return any(each.remat == best.remat for each in spanax.search(program, machine, layout="data").candidates)

    assert fitting(upper + 1) and not fitting(best.peak_bytes * 1.01)
