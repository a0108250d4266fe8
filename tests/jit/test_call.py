"""Errors of functions compiled by `spanax.jit` show the user's frames, and none of Spanax's."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import spanax
from spanax.jit.call import NOTE, WithoutSpanax

PACKAGE = Path(spanax.__file__).parent
X = np.ones((8, 4), "float32")


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, 8, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.linear(x) @ jnp.ones((3, 2))


def loss(model: Model, x: Any) -> Any:
    return model(x).sum()


@spanax.jit(mesh="fsdp=8")
def step(model: Model, x: Any) -> Any:
    return spanax.value_and_grad(loss)(model, x)[0]


@spanax.jit(mesh="fsdp=7")
def uneven(model: Model, x: Any) -> Any:
    return model.linear(x).sum()


def raised(function: Callable[..., Any], *args: Any) -> Exception:
    with pytest.raises(Exception) as info:
        function(*args)
    return info.value


def functions(error: BaseException) -> list[str]:
    """The frames of an error after those of this helper: user functions by name, files of Spanax by path."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name != "raised"]
    names = [
        frame.filename if Path(frame.filename).is_relative_to(PACKAGE) else frame.name
        for frame in frames
        if frame.filename == __file__ or Path(frame.filename).is_relative_to(PACKAGE)
    ]
    return names


def test_an_error_of_user_code_shows_only_its_frames(devices: list[Any]) -> None:
    model = Model(nnx.Rngs(0))
    for call in (step, step.prepare):
        error = raised(call, model, X)
        assert isinstance(error, TypeError) and functions(error) == ["step", "loss", "__call__"]
        assert sum("JAX_TRACEBACK_FILTERING" in note for note in error.__notes__) == 1


def test_an_error_of_spanax_has_no_frame_of_it(devices: list[Any]) -> None:
    error = raised(uneven, Model(nnx.Rngs(0)), X)
    assert isinstance(error, spanax.SpanaxError) and functions(error) == []
    assert not getattr(error, "__notes__", [])


def test_missing_arguments(devices: list[Any]) -> None:
    error = raised(step, Model(nnx.Rngs(0)))
    assert "missing 1 required positional argument: 'x'" in str(error) and functions(error) == []


def test_the_causes_of_an_error_and_a_note() -> None:
    def outer() -> None:
        with WithoutSpanax():
            spanax.function  # noqa: B018

    error = raised(outer)
    assert isinstance(error, AttributeError) and error.__notes__ == [NOTE] and functions(error) == ["outer"]

    def both() -> None:
        with WithoutSpanax():
            try:
                spanax.function  # noqa: B018
            except AttributeError as error:
                raise ValueError("outer") from error

    assert functions(raised(both).__cause__ or ValueError()) == ["both"]


def test_every_frame_is_shown_on_request(devices: list[Any]) -> None:
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        error = raised(uneven, Model(nnx.Rngs(0)), X)
    finally:
        jax.config.update("jax_traceback_filtering", before)
    assert str(PACKAGE / "jit" / "sharded_function.py") in functions(error)
