"""Compares two blocks for equality in everything but the values of their arrays, and counts their operations."""

import dataclasses
import functools
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from spanax.trace.axes.example_dims import runs_of
from spanax.trace.jaxpr.graph import from_jaxpr


def difference(first: Any, second: Any, path: str = "", seen: set[int] | None = None) -> str:
    """Returns the first difference between two blocks other than array values, or an empty string.

    Functions are equal if their code and closures are, such as the initializers that two equal calls return. `seen` has
    the objects that were compared already.

    Example:
      >>> make = lambda width: nnx.Linear(4, width, rngs=nnx.Rngs(0))
      >>> difference(make(4), make(4))
      ''
      >>> difference(make(4), make(8))
      '`bias` is float32[4] and float32[8]'
    """
    seen = set() if seen is None else seen
    if id(first) in seen:
        return ""
    if type(first) is not type(second):
        return f"{_subject(path)} is {_summary(first)} and {_summary(second)}"
    if isinstance(first, nnx.Variable):
        if not same(first.get_metadata(), second.get_metadata()):
            return f"{_subject(path)} has different metadata"
        return difference(first.get_value(), second.get_value(), path, seen)
    if isinstance(first, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        alike = first.shape == second.shape and first.dtype == second.dtype
        return "" if alike else f"{_subject(path)} is {_summary(first)} and {_summary(second)}"
    children = _children(first)
    if children is None:
        return "" if same(first, second) else f"{_subject(path)} is {_summary(first)} and {_summary(second)}"
    seen.add(id(first))
    other_children = _children(second) or {}
    for name in sorted({*children, *other_children}, key=str):
        child_path = f"{path}.{name}" if path else str(name)
        if name not in children or name not in other_children:
            return f"{_subject(child_path)} is missing in one of them"
        if mismatch := difference(children[name], other_children[name], child_path, seen):
            return mismatch
    return ""


def same(first: Any, second: Any) -> bool:
    """Returns whether two values are equal, where functions are equal if their code and closures are.

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


def _children(value: Any) -> dict[Any, Any] | None:
    """Returns the attributes or items of a container by name, or None for a leaf."""
    if isinstance(value, nnx.Pytree):
        return {name: child for name, child in vars(value).items() if not name.startswith("_pytree__")}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.compare}
    if isinstance(value, dict):
        return value
    return dict(enumerate(value)) if isinstance(value, list | tuple) else None


def _subject(path: str) -> str:
    return f"`{path}`" if path else "the class"


def _summary(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, nnx.Pytree):
        return type(value).__name__
    return getattr(value, "__qualname__", None) or repr(value)


def operation_counts(function: Callable[..., Any], *args: Any) -> Counter[str]:
    """Returns how often each operation runs, by primitive name and operand types or literals, without computing it.

    The body of a scan counts once per iteration.

    Example:
      >>> def looped(x):
      ...     return jax.lax.scan(lambda x, _: (2 * jax.numpy.sin(x), None), x, length=3)[0]
      >>> sorted(operation_counts(looped, jax.ShapeDtypeStruct((4,), "float32")).items())
      [('mul 2.0 float32[4]', 3), ('sin float32[4]', 3)]
    """
    graph = from_jaxpr(jax.make_jaxpr(function)(*args))
    counts = Counter[str]()
    for op, runs in runs_of(graph.body, 1):
        numbers = (graph.constants.get(value) if graph.shape(value) == () else None for value in op.inputs)
        avals = (graph.avals[value].str_short() for value in op.inputs)
        operands = (aval if number is None else str(number) for number, aval in zip(numbers, avals, strict=True))
        counts[" ".join([op.name, *operands])] += runs * (not op.bodies)
    return +counts
