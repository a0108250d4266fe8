"""A traced program as numbered values and operations.

A jaxpr calls cached sub-jaxprs (`jit`, `custom_jvp`) from many call sites; an analysis on the shared body would join
dims of unrelated call sites. Calls are therefore inlined, each with its own values. Loops, branches, remat and opaque
kernels remain operations with bodies.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval

from spanax.trace.jaxpr.marks import mark_of

INLINED = frozenset(
    """
jit pjit closed_call core_call eval_jaxpr custom_jvp_call custom_vjp_call custom_vmap_call composite linear_call
custom_linear_solve call_hi_primitive
""".split()
)
"""Calls that are only a wrapping once the whole step, gradient included, has been traced."""

CONTRACTIONS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
"""Products that sum over dims: matmuls and convolutions."""

REMAT = frozenset({"remat2", "checkpoint"})
"""What `jax.checkpoint` is called, by version."""

HIGH_LEVEL = "call_hi_primitive"
"""What binds a primitive that JAX expands into others when it lowers: under `jax_remat3`, `jax.checkpoint` is one."""

CALLED = ("jaxpr", "call_jaxpr", "call", "callee")
"""What the parameter of a call is named that holds what it calls, by primitive and JAX version."""

BODIES = {
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
}
"""Operations whose bodies are followed, and the parameters that hold them."""


@dataclass(frozen=True, eq=False, slots=True)
class Body:
    """A closed list of operations: what goes in, what comes out, in value numbers."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ops: tuple["Op", ...]


@dataclass(frozen=True, eq=False, slots=True)
class Op:
    """One operation: its primitive with parameters, the values it reads and writes, and the bodies it runs."""

    name: str
    eqn: core.JaxprEqn
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    bodies: tuple[Body, ...] = ()

    @property
    def params(self) -> dict[str, Any]:
        """The primitive's parameters, as JAX keeps them."""
        return self.eqn.params

    def bind(self, ins: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
        """Run the operation on values, or under a trace; `params` replaces the parameters it was traced with."""
        return bind(self.eqn, ins, self.params if params is None else params)


@dataclass(frozen=True, eq=False)
class Graph:
    """A program: its outermost body, every value's shape and dtype, constants by value, and marked values."""

    body: Body
    avals: Sequence[Any]
    constants: dict[int, Any]
    marks: dict[str, int] = field(default_factory=dict)

    def shape(self, value: int) -> tuple[int, ...]:
        """The shape of a value, by its number."""
        return getattr(self.avals[value], "shape", ())

    def wires(self, op: Op) -> "Wires":
        """How the values around an operation meet those inside its bodies."""
        if op.name == "scan":
            return _scan_wires(self, op)
        if op.name == "while":
            return _while_wires(op)
        outer = op.inputs[1:] if op.name == "cond" else op.inputs
        inputs = [pair for body in op.bodies for pair in zip(outer, body.inputs, strict=True)]
        outputs = [pair for body in op.bodies for pair in zip(op.outputs, body.outputs, strict=True)]
        return Wires(tuple(inputs), tuple(outputs), ())

    def ops(self) -> Iterator[Op]:
        """Every operation, those inside bodies right after the one that runs them."""
        return _walk(self.body)


@dataclass(frozen=True, slots=True)
class Wires:
    """Pairs of values: (outer, inner) going in and coming out, and (inner in, inner out) around the loop."""

    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, int], ...]
    carried: tuple[tuple[int, int], ...]


def scan_counts(graph: Graph, op: Op) -> tuple[int, int]:
    """How many operands of a scan every turn takes alike, and how many values go from turn to turn.

    Read off the ranks: the parameters that count them differ by JAX version.
    """
    (body,) = op.bodies
    ranks = lambda values: [len(graph.shape(value)) for value in values]  # noqa: E731
    return counts_by_rank(ranks(op.inputs), ranks(body.inputs), ranks(op.outputs), ranks(body.outputs))


def counts_by_rank(
    ins: Sequence[int], body_ins: Sequence[int], outs: Sequence[int], body_outs: Sequence[int]
) -> tuple[int, int]:
    """As `scan_counts`, from the number of dims of every value outside and inside of the body.

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
    into_test = zip(op.inputs[:num_test] + carried, test.inputs, strict=True)
    into_body = zip(op.inputs[num_test : num_test + num_body] + carried, body.inputs, strict=True)
    around = zip(body.inputs[num_body:], body.outputs, strict=True)
    return Wires((*into_test, *into_body), tuple(zip(op.outputs, body.outputs, strict=True)), tuple(around))


def _walk(body: Body) -> Iterator[Op]:
    for op in body.ops:
        yield op
        for inner in op.bodies:
            yield from _walk(inner)


def from_jaxpr(closed: core.ClosedJaxpr) -> Graph:
    """The graph of a jaxpr, with calls inlined and what no output needs left out.

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
                held, taken = called(eqn, ins)
                inner, inner_consts = opened(held)
                numbered = [constant(v.aval, c) for v, c in zip(inner.constvars, inner_consts, strict=True)]
                outs = run(inner, numbered, taken)
            else:
                outs = [number(var.aval) for var in eqn.outvars]
                ops.append(Op(name, eqn, ins, tuple(outs), _bodies(eqn, number, constant, marks)))
            values.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    outputs = run(jaxpr, consts, inputs)
    return Body(inputs, tuple(outputs), tuple(ops))


def called(eqn: core.JaxprEqn, ins: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """What a call runs, and of what; of a linear solve, once it is differentiated, only the solution is left to do."""
    if eqn.primitive.name == HIGH_LEVEL:
        return _expanded(eqn), ins
    if eqn.primitive.name != "custom_linear_solve":
        return next(eqn.params[key] for key in CALLED if key in eqn.params), ins
    lengths = eqn.params["const_lengths"]
    before = lengths.matvec + lengths.vecmat
    return eqn.params["jaxprs"].solve, (*ins[before : before + lengths.solve], *ins[sum(lengths) :])


def _expanded(eqn: core.JaxprEqn) -> core.ClosedJaxpr:
    """What a high-level primitive expands to."""
    primitive = eqn.params["_prim"]

    def expand(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(primitive.expand(*jax.tree.unflatten(primitive.in_tree, leaves)))

    return jax.make_jaxpr(expand)(*(var.aval for var in eqn.invars))


def remat_of(eqn: core.JaxprEqn) -> dict[str, Any] | None:
    """The parameters of a remat, `jaxpr`, `policy` and `prevent_cse` among them; None for anything else.

    Under `jax_remat3`, a remat is a high-level primitive with parameters of the same names, which no gradient marks.
    """
    if eqn.primitive.name in REMAT:
        return eqn.params
    params = getattr(eqn.params.get("_prim"), "params", {}) if eqn.primitive.name == HIGH_LEVEL else {}
    return {"differentiated": False, "prevent_cse": True, **params} if {"jaxpr", "policy"} <= params.keys() else None


def has_remat(jaxpr: core.Jaxpr) -> bool:
    """Whether there is a remat in a jaxpr, however deep."""
    return any(remat_of(eqn) or any(map(has_remat, core.jaxprs_in_params(eqn.params))) for eqn in jaxpr.eqns)


def _bodies(
    eqn: core.JaxprEqn, number: Callable[[Any], int], constant: Callable[[Any, Any], int], marks: dict[str, int]
) -> tuple[Body, ...]:
    bodies = []
    for key in BODIES.get(eqn.primitive.name, ()):
        held = eqn.params[key]
        for closed in held if isinstance(held, tuple) else (held,):
            jaxpr, values = opened(closed)
            consts = [constant(var.aval, value) for var, value in zip(jaxpr.constvars, values, strict=True)]
            inputs = tuple(number(var.aval) for var in jaxpr.invars)
            bodies.append(_flatten(jaxpr, consts, inputs, number, constant, marks))
    return tuple(bodies)


def bind(eqn: core.JaxprEqn, ins: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Run an equation on values, or under a trace, with these parameters."""
    primitive = eqn.primitive
    with eqn.ctx.manager:
        out = primitive.bind(*ins, **primitive.get_bind_params(params))
    return list(out) if primitive.multiple_results else [out]


def retraced(old: Any, function: Callable[..., Sequence[Any]], leading: Sequence[Sequence[int]] = ()) -> Any:
    """A function traced as the body of an operation, in place of the body it had: closed or open as the old one was.

    `leading` has for every operand the sizes of dims that are new in front of it.
    """
    jaxpr, _ = opened(old)
    # The memory a value lies in (a residual kept on the host) stays; a sharding would name a mesh that is not ours.
    avals = [var.aval.update(sharding=None, weak_type=False) for var in jaxpr.invars]
    pairs = zip(avals, leading or [()] * len(avals), strict=True)
    avals = [aval.update(shape=(*sizes, *aval.shape)) if sizes else aval for aval, sizes in pairs]
    closed = jax.make_jaxpr(function)(*avals)
    if isinstance(old, core.ClosedJaxpr) and old is not jaxpr:
        return closed
    if closed.consts:  # an open body has no place for constants, and a call inside it has
        closed = jax.make_jaxpr(jax.jit(core.jaxpr_as_fun(closed)))(*avals)
    return closed.jaxpr


def opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr and its constants, whether it came closed or open (JAX keeps both kinds, by version)."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())
