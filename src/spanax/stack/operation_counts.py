"""What a model computes, counted: the same for a list of blocks and for the stack of them."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core


def operation_counts(function: Callable[..., Any], *args: Any) -> Counter[str]:
    """How often each operation runs, by name, and by the shapes and literals that it takes; nothing is computed.

    Example:
      >>> def looped(x):
      ...     return jax.lax.scan(lambda x, _: (2 * jax.numpy.sin(x), None), x, length=3)[0]
      >>> sorted(work(looped, jax.ShapeDtypeStruct((4,), "float32")).items())
      [('mul 2.0 float32[4]', 3), ('sin float32[4]', 3)]
    """
    found: Counter[str] = Counter()
    _count(jax.make_jaxpr(function)(*args).jaxpr, 1, found)
    return found


def _count(jaxpr: Any, times: int, found: Counter[str]) -> None:
    for eqn in jaxpr.eqns:
        bodies = [body for value in eqn.params.values() for body in _bodies(value)]
        for body in bodies:
            _count(body, times * eqn.params.get("length", 1), found)
        if not bodies:
            found[" ".join([eqn.primitive.name, *map(_told, eqn.invars)])] += times


def _bodies(value: Any) -> list[Any]:
    held = value if isinstance(value, tuple | list) else (value,)
    return [getattr(one, "jaxpr", one) for one in held if isinstance(one, core.ClosedJaxpr | core.Jaxpr)]


def _told(atom: Any) -> str:
    return str(atom.val) if isinstance(atom, core.Literal) else atom.aval.str_short()
