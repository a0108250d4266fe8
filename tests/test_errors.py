"""Every error message, byte for byte: golden/errors.txt is what a user reads (`make golden` writes it anew)."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spanax.errors import DataError, SpanaxError, WriteError, nearest
from spanax.hardware.mesh import MeshShape

GOLDEN = Path(__file__).parent / "golden" / "errors.txt"


def misspelt() -> None:
    raise SpanaxError(f"unknown layout 'fdsp'; {nearest('fdsp', ['data', 'fsdp', 'tensor'])}")


# What goes wrong -> the call that meets it. Add a line for every error a user can reach.
ERRORS: dict[str, Callable[[], Any]] = {
    "errors: a name nobody knows": misspelt,
    "mesh: a size of zero": lambda: MeshShape.of({"data": 0}),
    "mesh: a negative size in text": lambda: MeshShape.of("data=-2"),
    "mesh: a size that is no whole number": lambda: MeshShape.of({"data": 2.5}),  # type: ignore[dict-item]
    "mesh: a size that is a truth value": lambda: MeshShape.of({"data": True}),
    "mesh: an axis twice": lambda: MeshShape.of("data=4,data=2"),
    "mesh: no equals sign": lambda: MeshShape.of("data4"),
    "mesh: no name": lambda: MeshShape.of("=4"),
    "mesh: a size that is a word": lambda: MeshShape.of("data=4,model=two"),
    "mesh: too few devices": lambda: MeshShape.of("data=4,model=2").build(devices=[0, 1, 2, 3]),
}


def message(call: Callable[[], Any]) -> str:
    with pytest.raises(SpanaxError) as caught:
        call()
    return str(caught.value)


def test_messages_are_the_golden_ones() -> None:
    found = "".join(f"[{name}]\n{message(call)}\n\n" for name, call in ERRORS.items())
    if os.environ.get("SPANAX_GOLDEN") == "update":
        GOLDEN.write_text(found, newline="")
    assert found.encode() == GOLDEN.read_bytes(), "a message changed: `make golden`, then read the diff"


@pytest.mark.parametrize("name", ERRORS)
def test_a_message_is_short_and_whole(name: str) -> None:
    lines = message(ERRORS[name]).splitlines()
    assert 1 <= len(lines) <= 4
    assert all(line.strip() and line == line.rstrip() for line in lines)
    assert not any(sign in "".join(lines) for sign in ("<function", "object at 0x", "Traceback"))


def test_the_tree_of_errors() -> None:
    assert [kind.exit_code for kind in (SpanaxError, DataError, WriteError)] == [2, 65, 73]
    assert issubclass(DataError, SpanaxError) and issubclass(WriteError, SpanaxError)
    assert issubclass(SpanaxError, ValueError)
