"""Which cases of a matrix `make test` runs: a few that cover it. `make slow` runs all the others."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Returns the cases as parameters of a test, marked `slow` unless they are in `quick`.

    Args:
      cases: every case in its order; a tuple holds the values of several parameters.
      quick: the cases that `make test` runs. Each is one of `cases`, so that a renamed case is not lost silently.
    """
    cases = list(cases)
    unknown = [case for case in quick if case not in cases]
    assert not unknown, f"there are no such cases: {unknown}"
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*row, marks=() if case in quick else pytest.mark.slow)
        for case, row in zip(cases, rows, strict=True)
    ]
