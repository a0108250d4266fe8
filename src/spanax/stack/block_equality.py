"""Whether two blocks are equal but for the values of their arrays, and in what they are not."""

import dataclasses
import functools
import types
from typing import Any

import jax
import numpy as np
from flax import nnx


def difference(first: Any, second: Any, path: str = "") -> str:
    """In what two blocks differ first, arrays' values aside; empty where in nothing.

    Functions are equal that are made alike, such as the initializers which two calls return.

    Example:
      >>> make = lambda width: nnx.Linear(4, width, rngs=nnx.Rngs(0))
      >>> difference(make(4), make(4))
      ''
      >>> difference(make(4), make(8))
      '`bias` is float32[4] and float32[8]'
    """
    return _difference(first, second, path, set())


def _difference(first: Any, second: Any, path: str, seen: set[int]) -> str:
    if id(first) in seen:
        return ""
    if type(first) is not type(second):
        return f"{_named(path)} is {_told(first)} and {_told(second)}"
    if isinstance(first, nnx.Variable):
        if not same(first.get_metadata(), second.get_metadata()):
            return f"{_named(path)} has other metadata in each"
        return _difference(first.get_value(), second.get_value(), path, seen)
    if isinstance(first, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        alike = first.shape == second.shape and first.dtype == second.dtype
        return "" if alike else f"{_named(path)} is {_told(first)} and {_told(second)}"
    inside = _inside(first)
    if inside is None:
        return "" if same(first, second) else f"{_named(path)} is {_told(first)} and {_told(second)}"
    seen.add(id(first))
    other = _inside(second) or {}
    for name in sorted({*inside, *other}, key=str):
        below = f"{path}.{name}" if path else str(name)
        if name not in inside or name not in other:
            return f"only one has {_named(below)}"
        if found := _difference(inside[name], other[name], below, seen):
            return found
    return ""


def same(first: Any, second: Any) -> bool:
    """Whether two values that are no arrays do the same.

    Example:
      >>> from flax import nnx
      >>> normal = nnx.initializers.normal
      >>> normal(0.02) == normal(0.02), same(normal(0.02), normal(0.02)), same(normal(0.02), normal(0.01))
      (False, True, False)
    """
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, types.FunctionType):
        parts = [
            (f.__code__, f.__defaults__, f.__kwdefaults__, [cell.cell_contents for cell in f.__closure__ or ()])
            for f in (first, second)
        ]
        return same(*parts)
    if isinstance(first, functools.partial):
        return same((first.func, first.args, first.keywords), (second.func, second.args, second.keywords))
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    return bool(np.all(first == second))


def _inside(value: Any) -> dict[Any, Any] | None:
    """What it consists of, by name; None for what is compared as a whole."""
    if isinstance(value, nnx.Pytree):
        return {name: held for name, held in vars(value).items() if not name.startswith("_pytree__")}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.compare}
    if isinstance(value, dict):
        return value
    return dict(enumerate(value)) if isinstance(value, list | tuple) else None


def _named(path: str) -> str:
    return f"`{path}`" if path else "the class"


def _told(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, nnx.Pytree):
        return type(value).__name__
    return getattr(value, "__qualname__", None) or repr(value)
