"""Operations that compute what an earlier one has computed: compilers run them once.

Example: a GAN that generates the same images for the losses of generator and discriminator.
"""

from collections.abc import Iterable
from typing import Any

from spanax.trace.jaxpr.graph import Body, Graph, Op

UNMERGED = frozenset({"optimization_barrier"})
"""Operations that compilers never merge: barriers separate recomputed values from those of the forward pass."""


def repeated_ops(graph: Graph) -> frozenset[Op]:
    """Returns the operations that equal an earlier operation of the same body with equal operands.

    Operations with bodies (loops, branches, rematerialized regions) or effects equal no other.
    Source: openxla/xla xla/hlo/transforms/simplifiers/hlo_cse.cc (`HloCSE`); the programs of gan and perceiver in
    tests/data/program_cells.json.

    Example:
      >>> import jax
      >>> from spanax.trace.jaxpr.graph import from_jaxpr
      >>> graph = from_jaxpr(jax.make_jaxpr(lambda x: (x @ x) + jax.numpy.sin(x @ x))(jax.numpy.ones((2, 2))))
      >>> [op.name for op in repeated_ops(graph)]
      ['dot_general']
    """
    result = set[Op]()
    _visit(graph.body, _equal_constants(graph), result)
    return frozenset(result)


def _equal_constants(graph: Graph) -> dict[int, int]:
    """Returns, for every scalar constant, the first equal one."""
    seen = dict[tuple[str, str], int]()
    scalars = [value for value in graph.constants if not graph.shape(value)]
    keys = [(str(getattr(graph.avals[value], "dtype", "")), repr(graph.constants[value])) for value in scalars]
    return {value: seen.setdefault(key, value) for value, key in zip(scalars, keys, strict=True)}


def _visit(body: Body, constants: dict[int, int], result: set[Op]) -> None:
    number = dict(constants)
    seen = dict[tuple[Any, ...], Op]()
    for op in body.ops:
        for inner in op.bodies:
            _visit(inner, constants, result)
        if op.bodies or op.eqn.effects or op.name in UNMERGED:
            continue
        key = (op.name, _params(op.params.items()), tuple(number.get(value, value) for value in op.inputs))
        first = seen.setdefault(key, op)
        if first is not op:
            result.add(op)
            number |= {value: number.get(equal, equal) for value, equal in zip(op.outputs, first.outputs, strict=True)}


def _params(items: Iterable[tuple[str, Any]]) -> tuple[Any, ...]:
    """Returns a hashable form of an operation's parameters, in which only equal parameters are equal."""
    return tuple((name, value if _is_hashable(value) else id(value)) for name, value in items)


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
