"""A traced program as numbered values and operations.

A jaxpr calls cached sub-jaxprs (`jit`, `custom_jvp`) from many call sites; an analysis on the shared body would join
dims of unrelated call sites. Calls are therefore inlined, each with its own values. Loops, branches, remat and opaque
kernels remain operations with bodies.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval

from spanax.trace.jaxpr.dim_maps.relations import DimMap, Family
from spanax.trace.jaxpr.dim_maps.table import dim_map, names
from spanax.trace.jaxpr.marks import mark_of

INLINED = frozenset(
    """
jit pjit closed_call core_call eval_jaxpr custom_jvp_call custom_vjp_call custom_vmap_call composite linear_call
custom_linear_solve call_hi_primitive
""".split()
)
"""Calls that only wrap a jaxpr once the train step, including its gradient, has been traced."""

CONTRACTIONS = names(Family.CONTRACTION)
"""Operations that sum over contracted dims: matmuls and convolutions."""

REMAT = frozenset({"remat2", "checkpoint"})
"""The primitives of `jax.checkpoint`, by JAX version."""

HIGH_LEVEL = "call_hi_primitive"
"""The primitive that binds those that JAX expands at lowering: under `jax_remat3`, `jax.checkpoint` is one."""

CALLED = ("jaxpr", "call_jaxpr", "call", "callee")
"""The parameters of calls that hold the callee, which differ by primitive and JAX version."""

BODIES = {
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
}
"""Operations whose bodies are analyzed, and the parameters that hold the bodies."""


@dataclass(frozen=True, eq=False, slots=True)
class Body:
    """A closed list of operations, with its inputs and outputs as value numbers."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ops: tuple["Op", ...]


@dataclass(frozen=True, eq=False)
class Op:
    """One operation: its primitive with parameters, operands, results, and bodies."""

    name: str
    eqn: core.JaxprEqn
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    bodies: tuple[Body, ...] = ()

    @property
    def params(self) -> dict[str, Any]:
        """The primitive's parameters, as JAX stores them."""
        return self.eqn.params

    @cached_property
    def dim_map(self) -> DimMap:
        """How the dims of its operands and results are related."""
        return dim_map(self.eqn)

    @property
    def family(self) -> Family:
        """The family of its primitive."""
        return self.dim_map.family

    @property
    def is_elementwise(self) -> bool:
        """Whether element i of a result depends on element i of the operands alone, which may be broadcast."""
        return self.family is Family.ELEMENTWISE

    def bind(self, ins: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
        """Runs the operation on arrays or tracers; `params` replaces the parameters it was traced with."""
        return bind(self.eqn, ins, self.params if params is None else params)


@dataclass(frozen=True, eq=False)
class Graph:
    """A program: its outermost body, the aval of every value, constants by value number, and marked values."""

    body: Body
    avals: Sequence[Any]
    constants: dict[int, Any]
    marks: dict[str, int] = field(default_factory=dict)

    def shape(self, value: int) -> tuple[int, ...]:
        """Returns the shape of a value, by its number."""
        return getattr(self.avals[value], "shape", ())

    def wires(self, op: Op) -> "Wires":
        """Returns how the values outside of an operation map to those inside its bodies."""
        if op.name == "scan":
            return _scan_wires(self, op)
        if op.name == "while":
            return _while_wires(op)
        outer = op.inputs[1:] if op.name == "cond" else op.inputs
        inputs = [pair for body in op.bodies for pair in zip(outer, body.inputs, strict=True)]
        outputs = [pair for body in op.bodies for pair in zip(op.outputs, body.outputs, strict=True)]
        return Wires(tuple(inputs), tuple(outputs), ())

    def ops(self) -> Iterator[Op]:
        """Yields every operation; those inside bodies follow the operation that runs them."""
        return _walk(self.body)


@dataclass(frozen=True, slots=True)
class Wires:
    """Pairs of values: (outer, inner) for inputs and outputs, and (body input, body output) for the loop's carry."""

    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, int], ...]
    carried: tuple[tuple[int, int], ...]


def scan_counts(graph: Graph, op: Op) -> tuple[int, int]:
    """Returns the number of consts and the number of carried values of a scan.

    Derived from ranks: the parameters that count them differ by JAX version.
    """
    (body,) = op.bodies
    ranks = lambda values: [len(graph.shape(value)) for value in values]  # noqa: E731
    return counts_by_rank(ranks(op.inputs), ranks(body.inputs), ranks(op.outputs), ranks(body.outputs))


def counts_by_rank(
    ins: Sequence[int], body_ins: Sequence[int], outs: Sequence[int], body_outs: Sequence[int]
) -> tuple[int, int]:
    """Returns the same as `scan_counts`, given the rank of every value outside and inside the body.

    Example:
      >>> counts_by_rank([2, 1, 2], [2, 1, 1], [1, 1], [1, 0])
      (1, 1)
    """
    num_scanned = sum(outer > inner for outer, inner in zip(ins, body_ins, strict=True))
    num_carried = sum(outer == inner for outer, inner in zip(outs, body_outs, strict=True))
    return len(ins) - num_scanned - num_carried, num_carried


def _scan_wires(graph: Graph, op: Op) -> Wires:
    (body,) = op.bodies
    num_consts, num_carried = scan_counts(graph, op)
    carried = zip(body.inputs[num_consts : num_consts + num_carried], body.outputs[:num_carried], strict=True)
    inputs = tuple(zip(op.inputs, body.inputs, strict=True))
    outputs = tuple(zip(op.outputs, body.outputs, strict=True))
    return Wires(inputs, outputs, tuple(carried))


def _while_wires(op: Op) -> Wires:
    test, body = op.bodies
    num_test, num_body = op.params["cond_nconsts"], op.params["body_nconsts"]
    carried = op.inputs[num_test + num_body :]
    test_inputs = zip(op.inputs[:num_test] + carried, test.inputs, strict=True)
    body_inputs = zip(op.inputs[num_test : num_test + num_body] + carried, body.inputs, strict=True)
    carry_pairs = zip(body.inputs[num_body:], body.outputs, strict=True)
    return Wires((*test_inputs, *body_inputs), tuple(zip(op.outputs, body.outputs, strict=True)), tuple(carry_pairs))


def _walk(body: Body) -> Iterator[Op]:
    for op in body.ops:
        yield op
        for inner in op.bodies:
            yield from _walk(inner)


def from_jaxpr(closed: core.ClosedJaxpr) -> Graph:
    """Returns the graph of a jaxpr, with calls inlined and dead code eliminated.

    Example:
      >>> import jax
      >>> graph = from_jaxpr(jax.make_jaxpr(lambda x: jax.nn.relu(x) + 1.0)(jax.ShapeDtypeStruct((3,), "float32")))
      >>> [op.name for op in graph.ops()]
      ['max', 'add']
    """
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    avals: list[Any] = []
    constants: dict[int, Any] = {}

    def number(aval: Any) -> int:
        avals.append(aval)
        return len(avals) - 1

    def constant(aval: Any, value: Any) -> int:
        constants[index := number(aval)] = value
        return index

    inputs = tuple(number(var.aval) for var in jaxpr.invars)
    consts = [constant(var.aval, value) for var, value in zip(jaxpr.constvars, closed.consts, strict=True)]
    marks: dict[str, int] = {}
    body = _flatten(jaxpr, consts, inputs, number, constant, marks)
    return Graph(body, avals, constants, marks)


def _flatten(
    jaxpr: Any,
    consts: Sequence[int],
    inputs: tuple[int, ...],
    number: Callable[[Any], int],
    constant: Callable[[Any, Any], int],
    marks: dict[str, int],
) -> Body:
    ops: list[Op] = []

    def run(jaxpr: Any, consts: Sequence[int], args: Sequence[int]) -> list[int]:
        values = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> int:
            return constant(atom.aval, atom.val) if isinstance(atom, core.Literal) else values[atom]

        for eqn in jaxpr.eqns:
            name, ins = eqn.primitive.name, tuple(read(atom) for atom in eqn.invars)
            if (mark := mark_of(eqn)) is not None:
                marks[mark], outs = ins[0], list(ins)
            elif name in INLINED:
                callee, operands = called(eqn, ins)
                inner, inner_consts = opened(callee)
                numbered = [constant(v.aval, c) for v, c in zip(inner.constvars, inner_consts, strict=True)]
                outs = run(inner, numbered, operands)
            else:
                outs = [number(var.aval) for var in eqn.outvars]
                ops.append(Op(name, eqn, ins, tuple(outs), _bodies(eqn, number, constant, marks)))
            values.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    outputs = run(jaxpr, consts, inputs)
    return Body(inputs, tuple(outputs), tuple(ops))


def called(eqn: core.JaxprEqn, ins: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """Returns the callee of a call and its operands; a differentiated linear solve only needs its `solve`."""
    if eqn.primitive.name == HIGH_LEVEL:
        return _expanded(eqn), ins
    if eqn.primitive.name != "custom_linear_solve":
        return next(eqn.params[key] for key in CALLED if key in eqn.params), ins
    lengths = eqn.params["const_lengths"]
    before = lengths.matvec + lengths.vecmat
    return eqn.params["jaxprs"].solve, (*ins[before : before + lengths.solve], *ins[sum(lengths) :])


def _expanded(eqn: core.JaxprEqn) -> core.ClosedJaxpr:
    """Returns the jaxpr that a high-level primitive expands to."""
    primitive = eqn.params["_prim"]

    def expand(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(primitive.expand(*jax.tree.unflatten(primitive.in_tree, leaves)))

    return jax.make_jaxpr(expand)(*(var.aval for var in eqn.invars))


def remat_of(eqn: core.JaxprEqn) -> dict[str, Any] | None:
    """Returns the parameters of a remat, including `jaxpr`, `policy` and `prevent_cse`; None for other equations.

    Under `jax_remat3`, a remat is a high-level primitive with parameters of the same names, without `differentiated`.
    """
    if eqn.primitive.name in REMAT:
        return eqn.params
    params = getattr(eqn.params.get("_prim"), "params", {}) if eqn.primitive.name == HIGH_LEVEL else {}
    return {"differentiated": False, "prevent_cse": True, **params} if {"jaxpr", "policy"} <= params.keys() else None


def has_remat(jaxpr: core.Jaxpr) -> bool:
    """Returns whether a jaxpr contains a remat, at any depth."""
    return any(remat_of(eqn) or any(map(has_remat, core.jaxprs_in_params(eqn.params))) for eqn in jaxpr.eqns)


def _bodies(
    eqn: core.JaxprEqn, number: Callable[[Any], int], constant: Callable[[Any, Any], int], marks: dict[str, int]
) -> tuple[Body, ...]:
    bodies = []
    for key in BODIES.get(eqn.primitive.name, ()):
        jaxprs = eqn.params[key]
        for closed in jaxprs if isinstance(jaxprs, tuple) else (jaxprs,):
            jaxpr, values = opened(closed)
            consts = [constant(var.aval, value) for var, value in zip(jaxpr.constvars, values, strict=True)]
            inputs = tuple(number(var.aval) for var in jaxpr.invars)
            bodies.append(_flatten(jaxpr, consts, inputs, number, constant, marks))
    return tuple(bodies)


def bind(eqn: core.JaxprEqn, ins: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Runs an equation on arrays or tracers, with the given parameters."""
    primitive = eqn.primitive
    with eqn.ctx.manager:
        out = primitive.bind(*ins, **primitive.get_bind_params(params))
    return list(out) if primitive.multiple_results else [out]


def retraced(old: Any, function: Callable[..., Sequence[Any]], leading: Sequence[Sequence[int]] = ()) -> Any:
    """Returns a function traced as the body of an operation, closed or open like the old body.

    `leading` has, for every operand, the sizes of its new leading dims.
    """
    jaxpr, _ = opened(old)
    # Keep memory spaces (residuals offloaded to the host), and drop shardings, which may name another mesh.
    avals = [var.aval.update(sharding=None, weak_type=False) for var in jaxpr.invars]
    pairs = zip(avals, leading or [()] * len(avals), strict=True)
    avals = [aval.update(shape=(*sizes, *aval.shape)) if sizes else aval for aval, sizes in pairs]
    closed = jax.make_jaxpr(function)(*avals)
    if isinstance(old, core.ClosedJaxpr) and old is not jaxpr:
        return closed
    if closed.consts:  # an open jaxpr cannot hold constants, but a call inside it can
        closed = jax.make_jaxpr(jax.jit(core.jaxpr_as_fun(closed)))(*avals)
    return closed.jaxpr


def opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Returns a jaxpr and its constants, whether it is closed or open (JAX uses both, by version)."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())
