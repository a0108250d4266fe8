"""Untrusted run folders: for any kind of entry, every command ends without touching files outside."""

from collections.abc import Iterable
from pathlib import Path

import pytest

import foreign

WEIGHTS = Path(__file__).resolve().parent.parent / "interop" / "weights" / "gpt2"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> foreign.Place:
    return foreign.Place.written(tmp_path_factory.mktemp("written"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> foreign.Place:
    return foreign.Place.trained(tmp_path_factory.mktemp("trained"), WEIGHTS)


def problems(place: foreign.Place, verb: str, cases: Iterable[tuple[str, str]], root: Path) -> list[str]:
    failures = (foreign.problem(place, verb, name, kind, root) for name, kind in cases)
    return [wrong for wrong in failures if wrong]


@pytest.mark.parametrize("verb", [*foreign.LIGHT, "train"])
def test_a_sample_of_foreign_entries(verb: str, written: foreign.Place, tmp_path: Path) -> None:
    assert not (failures := problems(written, verb, foreign.sample(written, verb), tmp_path)), "\n".join(failures)


@pytest.mark.slow
@pytest.mark.parametrize("verb", foreign.VERBS)
def test_every_foreign_entry(verb: str, trained: foreign.Place, tmp_path: Path) -> None:
    failures = problems(trained, verb, foreign.cases(trained, verb), tmp_path)
    assert not failures, f"{len(failures)} cases\n" + "\n".join(failures)
