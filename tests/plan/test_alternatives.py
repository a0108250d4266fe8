"""Padding that a search chooses without a request, and where it does not price it."""

from typing import Any

import jax
import optax
import pytest

import spanax
from sampling import sampled
from spanax.models import gpt
from spanax.plan import choose
from spanax.plan.candidate import Search
from spanax.plan.candidates import alternatives
from spanax.plan.candidates.request import Request
from spanax.plan.choose import chosen, searched
from spanax.plan.plan import Plan
from spanax.plan.reason import Code
from spanax.plan.sharding.assign import Pins
from spanax.trace.program import Program
from spanax.trace.rewrites.padding import Multiples

MACHINE = spanax.cluster("h100:8")


def wide(num_heads: int = 25, num_layers: int = 4, vocab_size: int = 1024) -> Program:
    """Two examples on eight devices, which only tensor or context parallelism shards."""
    config = gpt.GPTConfig(
        vocab_size, seq_len=256, num_layers=num_layers, num_heads=num_heads, embed_dim=num_heads * 128
    )
    tokens = {name: jax.ShapeDtypeStruct((2, 256), "int32") for name in ("inputs", "targets")}
    return spanax.trace(
        build=lambda rngs: gpt.GPT(config, rngs), optimizer=optax.adamw(1e-3), batch=tokens, loss=gpt.loss
    )


@pytest.fixture(scope="module")
def uneven() -> Program:
    return wide()


FORBIDDEN = {"seq": None, "head_dim": None}


@pytest.fixture(scope="module")
def plain(uneven: Program) -> Search:
    """The search without padding."""
    return searched(uneven, MACHINE, Request(pins=FORBIDDEN, pad="none"))


def test_uneven_heads_are_padded_where_that_is_faster(uneven: Program, plain: Search) -> None:
    result = searched(uneven, MACHINE, Request(pins=FORBIDDEN))
    assert result.alternative is not None and result.alternative.code is Code.PADDED
    assert result.best.step_seconds * (1 + alternatives.ASSIGNMENT_MARGIN) <= plain.best.step_seconds
    plan = chosen(result)
    assert plan.schedule.padded and "heads padded: a step takes" in plan.why and "25 heads padded to" in plan.why
    assert Plan.from_json(plan.to_json()) == plan == spanax.plan(uneven, MACHINE, forbid=[*FORBIDDEN])
    assert chosen(plain).schedule.padded == ()


def test_a_small_gain_pads_nothing(uneven: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alternatives, "ASSIGNMENT_MARGIN", 10.0)
    result = searched(uneven, MACHINE, Request(pins=FORBIDDEN))
    assert result.alternative is None and chosen(result).schedule.padded == ()


@pytest.mark.parametrize("request_", [Request(layout="tensor"), Request(mesh="model=8")])
def test_requested_layouts_are_not_padded(uneven: Program, request_: Request) -> None:
    assert searched(uneven, MACHINE, request_).alternative is None


def test_only_forms_that_can_gain_are_priced(plain: Search) -> None:
    """Not on simulated devices, and not even axes."""
    assert alternatives._variants(plain)
    even = searched(wide(24, num_layers=1), MACHINE, Request(pins=FORBIDDEN, pad="none"))
    assert alternatives._variants(even) == []
    simulated = searched(wide(num_layers=1), spanax.cluster("cpu:8"), Request(pins=FORBIDDEN))
    assert simulated.alternative is None


def test_a_padded_form_without_a_layout_is_rejected_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two examples on eight devices, and heads padded for two devices: two more would have nothing to shard."""
    monkeypatch.setattr(alternatives, "ASSIGNMENT_MARGIN", 0.0)
    pins = dict.fromkeys(["seq", "head_dim", "embed"])
    result = searched(wide(3, num_layers=1), MACHINE, Request(pins=pins, attention="plain", loss_chunks=1))
    assert result.best is not None and result.alternative is None
    (reason,) = (reason for reason in result.rejected if reason.code is Code.NOT_PLACED)
    assert str(reason) == "heads padded: no layout shards a batch of 2 over 8 devices."


BOUND = [(25, FORBIDDEN), (25, {}), (12, {})]


@pytest.mark.parametrize(("num_heads", "pins"), sampled(BOUND, BOUND[2:]))
def test_the_bound_of_a_padded_form_does_not_exceed_its_search(
    num_heads: int, pins: Pins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 heads do not divide by 8; a vocabulary of 1,023 by nothing."""
    program = wide(num_heads, num_layers=1, vocab_size=1023)
    bounds = dict[Multiples, float]()
    found = dict[Multiples, float]()
    least = choose._Requested.least_padded
    in_model = choose._Requested.in_model

    def counted(self: Any, written: Program, padded: Multiples) -> float:
        bounds[padded] = least(self, written, padded)
        return 0.0

    def searched_in(self: Any, padded: Program, model: int) -> Search:
        result = in_model(self, padded, model)
        found[padded.options.padded] = result.best.step_seconds if result.best else float("inf")
        return result

    monkeypatch.setattr(choose._Requested, "least_padded", counted)
    monkeypatch.setattr(choose._Requested, "in_model", searched_in)
    searched(program, MACHINE, Request(pins=pins))
    assert found and all(bounds[padded] <= seconds for padded, seconds in found.items())


def test_a_form_whose_bound_is_too_slow_is_not_traced(uneven: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose._Requested, "least_padded", lambda self, program, padded: float("inf"))
    monkeypatch.setattr(choose._Requested, "in_model", None)
    assert searched(uneven, MACHINE, Request(pins=FORBIDDEN)).alternative is None
