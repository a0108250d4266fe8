"""A traced program as numbered values and operations.

A jaxpr calls cached sub-jaxprs (`jit`, `custom_jvp`) from many call sites; an analysis on the shared body would join
dims of unrelated call sites. Calls are therefore inlined, each with its own values. Loops, branches, remat and opaque
kernels remain operations with bodies.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core, source_info_util
from jax.interpreters import partial_eval

from spanax.frames import is_library, is_spanax
from spanax.trace.jaxpr.dim_maps.relations import DimMap, Family, Kind
from spanax.trace.jaxpr.dim_maps.table import dim_map, names

NAME = "name"
PREFIX = "spanax:"
GRADIENT = "gradient:"
METRIC = "metric:"
QUANTIZED = "quantized:"
PRODUCT = "quantized product:"
"""Marks of the results of quantized matmuls, with the paths of weights; a product has no batch dims."""

SAVED = "saved:"
"""Marks of the values that a layer saves, with their names."""

CANDIDATE = "spanax candidate:"
"""Names of the values that a layer may save; unlike a mark, each is an operation of the graph."""

LOSS_CHUNKS = "spanax_loss_chunks"
"""Name of the scan of a chunked loss in the name stack, and of its gradients in remat policies."""

LAYER_PARTS = "spanax_layer_parts"
"""Name of the operations that partition arrays stacked along layers, or concatenate their parts, in the name stack."""

PADDING = "spanax_padding"
"""Name of the operations that pad a dim of an uneven axis, or cut it, in the name stack."""

MAX_FRAMES = 100
"""The number of frames, from the innermost, among which the line of an operation is."""


def marked(value: Any, mark: str) -> Any:
    """Returns the same value; `Graph.marks` records it under its mark.

    Example:
      >>> from spanax.trace.jaxpr.graph import from_jaxpr
      >>> graph = from_jaxpr(jax.make_jaxpr(lambda x: marked(2 * x, "double") + 1)(1.0))
      >>> [op.name for op in graph.ops()], list(graph.marks)
      (['mul', 'add'], ['double'])
    """
    return checkpoint_name(value, PREFIX + mark)


def marked_gradients(gradients: Any) -> Any:
    """Returns the gradients, each marked with the path of its parameter."""

    def mark(path: Any, gradient: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        return marked(gradient, GRADIENT + name)

    return jax.tree_util.tree_map_with_path(mark, gradients)


def mark_of(eqn: Any) -> str | None:
    """Returns the mark that an equation sets on its operand; None for other equations."""
    name = eqn.params.get("name") if eqn.primitive.name == NAME else None
    return name.removeprefix(PREFIX) if isinstance(name, str) and name.startswith(PREFIX) else None


CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "eval_jaxpr"})
"""Calls that only wrap a jaxpr; they have no derivative rule of their own."""

INLINED = CALLS | {
    *"custom_jvp_call custom_vjp_call custom_vmap_call composite linear_call".split(),
    *"custom_linear_solve call_hi_primitive".split(),
}
"""Calls that only wrap a jaxpr once the train step, including its gradient, has been traced."""

CONTRACTIONS = names(Family.CONTRACTION)
"""Operations that sum over contracted dims: matmuls and convolutions."""

RAGGED = "ragged_dot_general"
"""The primitive of a matmul of which every row belongs to a group with a matrix of its own."""

OWN_KERNEL = "spanax_kernel"
"""The primitive of a kernel of the user's own that is sharded like its reference (`trace/kernels`)."""

REMAT = frozenset({"remat2", "checkpoint"})
"""The primitives of `jax.checkpoint`, by JAX version."""

HIGH_LEVEL = "call_hi_primitive"
"""The primitive that binds those that JAX expands at lowering: under `jax_remat3`, `jax.checkpoint` is one."""

CALLED = ("jaxpr", "call_jaxpr", "call", "callee")
"""The parameters of calls that hold the callee, which differ by primitive and JAX version."""

BODIES = {"scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr"), "cond": ("branches",)}
"""Loops and branches, and the parameters that hold their bodies."""

CALLS_WITH_BODY = CALLS | REMAT | {"custom_jvp_call", "custom_vjp_call", "custom_vmap_call", "composite"}
"""Calls of one body on all operands, which remain operations with a body where they are not inlined."""


@dataclass(frozen=True, eq=False, slots=True)
class Body:
    """A closed list of operations, with its inputs and outputs as value numbers."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ops: tuple["Op", ...]


@dataclass(frozen=True, eq=False)
class Op:
    """One operation: its primitive with parameters, operands, results and bodies; `callers` has the innermost first."""

    name: str
    eqn: core.JaxprEqn
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    bodies: tuple[Body, ...] = ()
    callers: tuple[core.JaxprEqn, ...] = ()

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

    @property
    def indexed(self) -> tuple[int, ...]:
        """The dims of a table in which a lookup selects by indices, without those of which it takes all."""
        numbers = self.params["dimension_numbers"]
        dims = numbers.start_index_map if self.family is Family.GATHER else numbers.scatter_dims_to_operand_dims
        whole = self.dim_map.dims(Kind.SAME)
        return tuple(dim for dim in dims if (0, dim) not in whole)

    @property
    def where(self) -> str:
        """The innermost line of the user's code, or else of a library; inside a JAX function, that of the call."""
        return source_line((self.eqn, *self.callers))

    def bind(self, ins: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
        """Runs the operation on arrays or tracers; `params` replaces the parameters it was traced with."""
        primitive = self.eqn.primitive
        with self.eqn.ctx.manager:
            out = primitive.bind(*ins, **primitive.get_bind_params(self.params if params is None else params))
        return list(out) if primitive.multiple_results else [out]


def source_line(eqns: Iterable[core.JaxprEqn]) -> str:
    """Returns the innermost line of the user's code among those of equations, or else of a library.

    Spanax rewrites steps, as for microbatches: a line of its own outside of models is that of no operation.
    """
    frames = [
        line for eqn in eqns for line in reversed(source_info_util.summarize(eqn.source_info, MAX_FRAMES).splitlines())
    ]
    of_model = list(itertools.takewhile(lambda line: not is_spanax(line.partition(":")[0]), frames))
    user = (line for line in of_model if not is_library(line.partition(":")[0]))
    return next(user, next(iter(of_model), ""))


@dataclass(frozen=True, eq=False)
class Graph:
    """A program: its outermost body, the aval of every value, constants by value number, and marked values."""

    body: Body
    avals: Sequence[Any]
    constants: dict[int, Any]
    marks: dict[str, int] = field(default_factory=dict)

    @cached_property
    def producers(self) -> dict[int, Op]:
        """The operation that produces each value; inputs and constants have none."""
        return {value: op for op in self.ops() for value in op.outputs}

    @cached_property
    def readers(self) -> defaultdict[int, list[Op]]:
        """The operations that read each value, once for each operand."""
        readers = defaultdict[int, list[Op]](list)
        for op in self.ops():
            for value in op.inputs:
                readers[value].append(op)
        return readers

    @cached_property
    def positions(self) -> dict[Op, int]:
        """The index of each operation in the order of `ops`."""
        return {op: index for index, op in enumerate(self.ops())}

    @property
    def captured(self) -> list[int]:
        """The constants that are traced arrays of an enclosing function, such as a batch that a loss closes over."""
        return [value for value, constant in self.constants.items() if isinstance(constant, jax.core.Tracer)]

    def shape(self, value: int) -> tuple[int, ...]:
        """Returns the shape of a value, by its number."""
        return getattr(self.avals[value], "shape", ())

    def num_bytes(self, value: int) -> int:
        """Returns the global bytes of a value."""
        aval = self.avals[value]
        return int(getattr(aval, "size", 1)) * int(getattr(getattr(aval, "dtype", None), "itemsize", 4))

    def is_on_host(self, value: int) -> bool:
        """Whether a value is in host memory, such as an offloaded residual."""
        return getattr(self.avals[value], "memory_space", None) == jax.memory.Space.Host

    def within(self, body: Body) -> "Graph":
        """Returns a body as a program of its own, with the same value numbers."""
        return self if body is self.body else replace(self, body=body)

    def slice(
        self, values: Iterable[int], known: Container[int] | Callable[[int], bool] = (), roots: Iterable[Op] = ()
    ) -> list[Op]:
        """Returns the operations of one body that compute values, in order.

        Args:
          values: the values to compute.
          known: values whose producers are not included, or a function that returns whether a value is one.
          roots: operations to include with those that compute their operands.

        Example:
          >>> graph = from_jaxpr(jax.make_jaxpr(lambda x: (jax.numpy.sin(x) + 1, jax.numpy.cos(x)))(1.0))
          >>> [[op.name for op in graph.slice([value])] for value in graph.body.outputs]
          [['sin', 'add'], ['cos']]
        """
        is_known = known if callable(known) else known.__contains__
        needed = set(roots)
        stack = [*values, *(value for op in needed for value in op.inputs)]
        while stack:
            value = stack.pop()
            op = None if is_known(value) else self.producers.get(value)
            if op is not None and op not in needed:
                needed.add(op)
                stack += op.inputs
        return sorted(needed, key=self.positions.__getitem__)

    def origin(self, value: int, names: Container[str]) -> int:
        """Returns the value that `value` is derived from through operations of these names, along first operands."""
        while (op := self.producers.get(value)) is not None and op.name in names:
            value = op.inputs[op.outputs.index(value)] if op.name == "optimization_barrier" else op.inputs[0]
        return value

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

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """All of them."""
        return (*self.inputs, *self.outputs, *self.carried)


def scan_counts(graph: Graph, op: Op) -> tuple[int, int]:
    """Returns the number of consts and the number of carried values of a scan.

    Derived from ranks: the parameters that count them differ by JAX version.

    Example:
      >>> import jax.numpy as jnp
      >>> loop = lambda w, x: jax.lax.scan(lambda total, row: (total + row @ w, row.sum()), jnp.zeros(2), x)
      >>> graph = from_jaxpr(jax.make_jaxpr(loop)(jnp.ones((3, 2)), jnp.ones((4, 3))))
      >>> [scan_counts(graph, op) for op in graph.ops() if op.name == "scan"]
      [(1, 1)]
    """
    (body,) = op.bodies
    differs = lambda pair: len(graph.shape(pair[0])) != len(graph.shape(pair[1]))  # noqa: E731
    num_scanned = sum(map(differs, zip(op.inputs, body.inputs, strict=True)))
    num_stacked = sum(map(differs, zip(op.outputs, body.outputs, strict=True)))
    num_carried = len(op.outputs) - num_stacked
    return len(op.inputs) - num_scanned - num_carried, num_carried


def _scan_wires(graph: Graph, op: Op) -> Wires:
    (body,) = op.bodies
    num_consts, num_carried = scan_counts(graph, op)
    carried = zip(body.inputs[num_consts : num_consts + num_carried], body.outputs[:num_carried], strict=True)
    inputs = tuple(zip(op.inputs, body.inputs, strict=True))
    outputs = tuple(zip(op.outputs, body.outputs, strict=True))
    return Wires(inputs, outputs, tuple(carried))


def _while_wires(op: Op) -> Wires:
    test, body = op.bodies
    num_test = op.params["cond_nconsts"]
    num_body = op.params["body_nconsts"]
    carried = op.inputs[num_test + num_body :]
    test_inputs = zip(op.inputs[:num_test] + carried, test.inputs, strict=True)
    body_inputs = zip(op.inputs[num_test : num_test + num_body] + carried, body.inputs, strict=True)
    carry_pairs = zip(body.inputs[num_body:], body.outputs, strict=True)
    return Wires((*test_inputs, *body_inputs), tuple(zip(op.outputs, body.outputs, strict=True)), tuple(carry_pairs))


def difference(first: Body, second: Body) -> str:
    """Returns how two bodies differ in operations or in their values; empty if they do not."""
    if (first.inputs, first.outputs, len(first.ops)) != (second.inputs, second.outputs, len(second.ops)):
        return "it traces to other operations"
    for old, new in zip(first.ops, second.ops, strict=True):
        same = (old.name, old.inputs, old.outputs) == (new.name, new.inputs, new.outputs)
        if not same or len(old.bodies) != len(new.bodies):
            return f"its `{old.name}` becomes `{new.name}`"
        if inner := next(filter(None, map(difference, old.bodies, new.bodies)), ""):
            return inner
    return ""


def _walk(body: Body) -> Iterator[Op]:
    for op in body.ops:
        yield op
        for inner in op.bodies:
            yield from _walk(inner)


def from_jaxpr(closed: Any, inlined: frozenset[str] = INLINED, *, as_traced: bool = False) -> Graph:
    """Returns the graph of a jaxpr.

    Args:
      closed: a closed or open jaxpr.
      inlined: the calls to inline; others remain operations.
      as_traced: whether to include dead code, and marks as operations, so that evaluating the graph changes neither.

    Example:
      >>> import jax
      >>> graph = from_jaxpr(jax.make_jaxpr(lambda x: jax.nn.relu(x) + 1.0)(jax.ShapeDtypeStruct((3,), "float32")))
      >>> [op.name for op in graph.ops()]
      ['max', 'add']
    """
    jaxpr, consts = opened(closed)
    if not as_traced:
        jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    builder = _Builder(inlined, as_traced)
    return Graph(builder.body(jaxpr, consts), builder.avals, builder.constants, builder.marks)


@dataclass(eq=False)
class _Builder:
    """The values of a graph under construction."""

    inlined: frozenset[str]
    as_traced: bool
    avals: list[Any] = field(default_factory=list)
    constants: dict[int, Any] = field(default_factory=dict)
    marks: dict[str, int] = field(default_factory=dict)

    def body(self, jaxpr: core.Jaxpr, consts: Sequence[Any], callers: tuple[core.JaxprEqn, ...] = ()) -> Body:
        inputs = tuple(self._number(var.aval) for var in jaxpr.invars)
        ops = list[Op]()
        outputs = self._flatten(jaxpr, consts, inputs, ops, callers)
        return Body(inputs, tuple(outputs), tuple(ops))

    def _number(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def _constant(self, aval: Any, value: Any) -> int:
        self.constants[index := self._number(aval)] = value
        return index

    def _flatten(
        self,
        jaxpr: core.Jaxpr,
        consts: Sequence[Any],
        args: Sequence[int],
        ops: list[Op],
        callers: tuple[core.JaxprEqn, ...],
    ) -> list[int]:
        """Adds the operations of a jaxpr to `ops`; returns its outputs."""
        values = dict(zip(jaxpr.invars, args, strict=True))
        values |= {var: self._constant(var.aval, value) for var, value in zip(jaxpr.constvars, consts, strict=True)}

        def read(atom: Any) -> int:
            return self._constant(atom.aval, atom.val) if isinstance(atom, core.Literal) else values[atom]

        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            ins = tuple(read(atom) for atom in eqn.invars)
            if not self.as_traced and (mark := mark_of(eqn)) is not None:
                self.marks[mark] = ins[0]
                outs = list(ins)
            elif name in self.inlined:
                callee, operands = called(eqn, ins)
                outs = self._flatten(*opened(callee), operands, ops, (eqn, *callers))
            else:
                outs = [self._number(var.aval) for var in eqn.outvars]
                bodies = tuple(self.body(*opened(body), (eqn, *callers)) for body in bodies_of(eqn))
                ops.append(Op(name, eqn, ins, tuple(outs), bodies, callers))
            values.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]


def bodies_of(eqn: core.JaxprEqn) -> list[Any]:
    """Returns the jaxprs that an equation runs as loop, branch, remat or call, in order."""
    if (remat := remat_of(eqn)) is not None:
        return [remat["jaxpr"]]
    if eqn.primitive.name in CALLS_WITH_BODY:
        return [called(eqn, ())[0]]
    jaxprs = (eqn.params[key] for key in BODIES.get(eqn.primitive.name, ()))
    return [body for value in jaxprs for body in (value if isinstance(value, tuple) else (value,))]


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


def contains(eqn: core.JaxprEqn, is_match: Callable[[core.JaxprEqn], Any]) -> bool:
    """Returns whether an equation in the jaxprs of an equation matches, at any depth."""
    return any(is_match(inner) or contains(inner, is_match) for inner in _nested(eqn))


def _nested(eqn: core.JaxprEqn) -> Iterator[core.JaxprEqn]:
    for value in (remat_of(eqn) or eqn.params).values():
        for jaxpr in value if isinstance(value, tuple | list) else (value,):
            yield from getattr(opened(jaxpr)[0], "eqns", ())


def opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Returns a jaxpr and its constants, whether it is closed or open (JAX uses both, by version)."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())
