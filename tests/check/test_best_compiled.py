"""The first layouts of a search: the best fits as its compiler counts memory, and the second may be as fast."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import optax
import pytest
from flax import nnx

import spanax
from spanax.check import best_compiled
from spanax.check.best_compiled import MOST_COMPILED, with_best_compiled
from spanax.errors import CompilerError
from spanax.plan.candidate import Search
from spanax.plan.reason import Code, Reason


@pytest.fixture(scope="module")
def search() -> Search:
    program = spanax.trace(
        build=lambda rngs: nnx.Linear(256, 256, rngs=rngs),
        optimizer=optax.adam(0.1),
        batch=jax.ShapeDtypeStruct((1024, 256), "float32"),
        loss=lambda model, x: (model(x) ** 2).mean(),
    )
    result = spanax.search(program, spanax.cluster("v5e:2x4"), top=MOST_COMPILED + 2)
    assert len(result.candidates) == MOST_COMPILED + 2
    return result


@pytest.mark.parametrize(
    ("outcomes", "num_left_out", "last"),
    [
        ([True], 0, "compiled {}: 3 GiB of 4 GiB"),
        ([False, False, True], 2, "compiled {}: 3 GiB of 4 GiB"),
        ([False] * MOST_COMPILED, 0, "compiled {}: 3 GiB of 4 GiB, which does not fit"),
        ([False, None], 0, "not compiled {}: the compiler took longer than 120 s."),
    ],
)
def test_layouts_are_compiled_until_one_fits(
    outcomes: list[bool | None], num_left_out: int, last: str, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    remaining = iter(outcomes)

    def compile_next(*args: Any, **settings: Any) -> Any:
        fits = next(remaining)
        if fits is None:
            raise CompilerError("the compiler took longer than 120 s.")
        return SimpleNamespace(fits=fits, compiled=SimpleNamespace(peak_bytes=3 << 30), limit_bytes=4 << 30)

    monkeypatch.setattr(best_compiled, "highest_level", lambda cluster: 3)
    monkeypatch.setattr(best_compiled, "check", compile_next)
    result, compiled = with_best_compiled(search)
    assert [each.fits for each in compiled] == outcomes
    assert result.candidates == search.candidates[num_left_out:]
    reason = Reason(Code.TOO_LARGE)
    assert result.rejected.get(reason, 0) == search.rejected.get(reason, 0) + num_left_out
    tried = search.candidates[len(outcomes) - 1]
    assert str(compiled[-1]) == last.format(f"{tried.layout} ({tried.whole_mesh})")


@pytest.mark.parametrize(("seconds", "is_named"), [(1.05, True), (0.95, True), (1.1, False)])
def test_the_second_layout_is_named_where_predictions_cannot_tell(
    seconds: float, is_named: bool, search: Search
) -> None:
    first, second = (
        replace(each, step_seconds=of) for each, of in zip(search.candidates[:2], (1.0, seconds), strict=True)
    )
    assert replace(search, candidates=(first, second)).runner_up == (second if is_named else None)
    assert replace(search, candidates=(first,)).runner_up is None


def test_without_a_compiler_nothing_is_compiled(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_compiled, "highest_level", lambda cluster: 2)
    assert with_best_compiled(search) == (search, ())
