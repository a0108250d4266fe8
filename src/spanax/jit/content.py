"""The content of values that are neither objects nor arrays: what a compiled program may have read from them."""

import sys
import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence, MutableSet
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MappingProxyType, ModuleType
from typing import Any

import jax
import numpy as np
from flax import nnx

ATOMS = frozenset({int, bool, str, bytes, type(None), type(...)})
"""Immutable types whose equal values are the same, signs and types of nested values included."""

ENTITIES = frozenset({type, FunctionType, BuiltinFunctionType, ModuleType})

BUFFERS = bytearray | np.ndarray | np.generic

MUTABLE = MutableMapping | MutableSequence | MutableSet | MappingProxyType

LIBRARIES = frozenset({*sys.stdlib_module_names, "jax", "jaxlib", "numpy", "flax", "optax"})
"""Packages whose objects without an equality of their own are compared by identity, such as functions and loggers."""


@dataclass(frozen=True)
class Unhashable:
    """A copy of a value whose type defines nothing but equality."""

    value: Any

    def __hash__(self) -> int:
        return hash(type(self.value))


@dataclass(frozen=True)
class Slots:
    """The attributes of an object without a dict, such as a dataclass with slots."""

    value: Any
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Any]:
        return (getattr(self.value, name, None) for name in self.names)


def content(value: Any, inside: tuple[int, ...] = ()) -> Hashable:
    """Returns a hashable value that is equal for values of equal types and contents, at any depth.

    Unlike the value, it does not change when the value is mutated in place.

    Args:
      value: any value.
      inside: the identities of the values that contain it, which may be cyclic.

    Example:
      >>> content({"a": [1]}) == content({"a": [1]}), content((2, -0.0)) == content((2.0, 0.0))
      (True, False)
    """
    kind = type(value)
    if kind in ATOMS:
        return kind, value
    if kind is float or kind is complex:
        return kind, repr(value)
    if kind in ENTITIES:
        return kind, value
    if isinstance(value, BUFFERS):
        array = np.asarray(value)
        return kind, array.dtype.str, array.shape, array.tobytes()
    if id(value) in inside:
        return kind, inside.index(id(value))
    inside = (*inside, id(value))
    if isinstance(value, set | frozenset):
        return kind, frozenset(content(item, inside) for item in value)
    views = parts(value)
    if not views:
        return kind, _hashable(value)
    is_itself = _is_itself(kind)
    if is_dataclass(value) and not is_itself:
        compared = ((field.name, getattr(value, field.name, None)) for field in fields(value) if field.compare)
        return kind, tuple((name, content(item, inside)) for name, item in compared)
    return kind, value if is_itself else None, tuple(tuple(content(item, inside) for item in view) for view in views)


def parts(value: Any) -> list[Any]:
    """Returns iterables over what a value consists of, which change with it; none if it is compared as a whole."""
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return [value.keys(), value.values()]
    if isinstance(value, dict):
        views: list[Any] = [value.keys(), value.values()]
    elif isinstance(value, list | tuple | set | frozenset | deque):
        views = [value]
    elif _is_record(value):
        names = tuple(name for kind in type(value).__mro__ for name in _names(kind))
        views = [Slots(value, names)] if names else []
    else:
        return []
    attributes = getattr(value, "__dict__", None)
    return views if attributes is None else [*views, attributes.keys(), attributes.values()]


def watched(values: Iterable[Any], seen: dict[int, Any]) -> Iterator[Any]:
    """Yields the values, at any depth, that can be mutated in place, each once.

    Args:
      values: any values.
      seen: the values seen so far, by identity.
    """
    for value in values:
        if type(value) in ATOMS or type(value) in ENTITIES or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, MUTABLE) or _is_record(value):
            yield value
        for view in parts(value):
            yield from watched(view, seen)


def _is_record(value: Any) -> bool:
    """Returns whether an object is compared by its attributes."""
    kind = type(value)
    if isinstance(value, type | Enum | jax.Array | nnx.Pytree | nnx.Variable):
        return False
    if _is_itself(kind):
        return kind.__module__.partition(".")[0] not in LIBRARIES
    return is_dataclass(value) or kind.__hash__ is None or isinstance(value, MutableMapping | MutableSequence)


def _is_itself(kind: Any) -> bool:
    """Returns whether values of a type are equal only to themselves."""
    return bool(kind.__eq__ is object.__eq__)


def _names(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _hashable(value: Any) -> Hashable:
    """Returns the value, or a copy that is compared by equality if it has no hash; arrays and objects by identity."""
    if isinstance(value, nnx.Pytree):
        return weakref.ref(value)
    if isinstance(value, nnx.Variable | jax.Array):
        return id(value), Unhashable(value)
    try:
        hash(value)
    except TypeError:
        try:
            return Unhashable(deepcopy(value))
        except Exception:  # what an arbitrary type raises if it cannot be copied
            return Unhashable(value)
    result: Hashable = value
    return result
