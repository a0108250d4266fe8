"""Counts of a function's operations, which are equal for a list of blocks and for the stack of those blocks."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core


def operation_counts(function: Callable[..., Any], *args: Any) -> Counter[str]:
    """Returns how often each operation runs, by primitive name and operand types or literals, without computing it.

    The body of a scan counts once per iteration.

    Example:
      >>> def looped(x):
      ...     return jax.lax.scan(lambda x, _: (2 * jax.numpy.sin(x), None), x, length=3)[0]
      >>> sorted(operation_counts(looped, jax.ShapeDtypeStruct((4,), "float32")).items())
      [('mul 2.0 float32[4]', 3), ('sin float32[4]', 3)]
    """
    counts: Counter[str] = Counter()
    _count(jax.make_jaxpr(function)(*args).jaxpr, 1, counts)
    return counts


def _count(jaxpr: Any, times: int, counts: Counter[str]) -> None:
    for eqn in jaxpr.eqns:
        bodies = [body for value in eqn.params.values() for body in _bodies(value)]
        for body in bodies:
            _count(body, times * eqn.params.get("length", 1), counts)
        if not bodies:
            counts[" ".join([eqn.primitive.name, *map(_operand_text, eqn.invars)])] += times


def _bodies(value: Any) -> list[Any]:
    values = value if isinstance(value, tuple | list) else (value,)
    return [getattr(item, "jaxpr", item) for item in values if isinstance(item, core.ClosedJaxpr | core.Jaxpr)]


def _operand_text(atom: Any) -> str:
    return str(atom.val) if isinstance(atom, core.Literal) else atom.aval.str_short()
