"""Inlined jaxpr equations, and the mapping from a result's dims to the dims of its operands."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend import core, source_info_util

from spanax.trace.jaxpr.dim_rules import ELEMENTWISE, reshape_groups
from spanax.trace.jaxpr.graph import opened
from spanax.trace.rewrites.attention.scores import NONE

CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "eval_jaxpr"})
"""Calls without a custom derivative rule, which only wrap a jaxpr."""

Labels = tuple[int, ...]
"""For every dim of a value, the label of the dim that it corresponds to."""


@dataclass(frozen=True, eq=False)
class Line:
    """One equation of an inlined jaxpr, in value numbers; `caller` is the innermost inlined call."""

    eqn: core.JaxprEqn
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    caller: "Line | None" = None

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.eqn.primitive.name

    @property
    def where(self) -> str:
        """The user's source line; for an equation inside a JAX function, that of the call."""
        summary: str = source_info_util.summarize(self.eqn.source_info)
        return summary or (self.caller.where if self.caller is not None else "")


@dataclass(eq=False)
class Lines:
    """A jaxpr as lines; `known` maps literals and constants to their values, `maker` results to line indices."""

    lines: list[Line] = field(default_factory=list)
    avals: list[Any] = field(default_factory=list)
    known: dict[int, Any] = field(default_factory=dict)
    maker: dict[int, int] = field(default_factory=dict)
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()

    @staticmethod
    def of(jaxpr: core.Jaxpr, consts: Sequence[Any]) -> "Lines":
        """Returns the lines of a jaxpr."""
        lines = Lines()
        lines.inputs = tuple(lines._number(var.aval) for var in jaxpr.invars)
        lines.outputs = tuple(lines._run(jaxpr, consts, lines.inputs))
        return lines

    def shape(self, value: int) -> tuple[int, ...]:
        """Returns the shape of a value."""
        return tuple(getattr(self.avals[value], "shape", ()))

    def made_by(self, value: int) -> Line | None:
        """Returns the line that produces a value; None for an input or a constant."""
        index = self.maker.get(value)
        return None if index is None else self.lines[index]

    def behind(self, value: int, names: frozenset[str]) -> int:
        """Returns the value viewed by `value`, through lines of these names along their first operand."""
        while (line := self.made_by(value)) is not None and line.name in names:
            value = line.ins[line.outs.index(value)] if line.name == "optimization_barrier" else line.ins[0]
        return value

    def _number(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def _run(
        self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[int], caller: Line | None = None
    ) -> list[int]:
        values = dict(zip(jaxpr.invars, args, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            values[var] = self._number(var.aval)
            self.known[values[var]] = const

        def read(atom: Any) -> int:
            if not isinstance(atom, core.Literal):
                return values[atom]
            index = self._number(atom.aval)
            self.known[index] = atom.val
            return index

        for eqn in jaxpr.eqns:
            ins = tuple(read(atom) for atom in eqn.invars)
            if eqn.primitive.name in CALLS:
                inner, inner_consts = opened(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")))
                outs = self._run(inner, inner_consts, ins, Line(eqn, ins, (), caller))
            else:
                outs = [self._number(var.aval) for var in eqn.outvars]
                self.maker |= dict.fromkeys(outs, len(self.lines))
                self.lines.append(Line(eqn, ins, tuple(outs), caller))
            values.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]


def back(lines: Lines, line: Line, labels: Labels) -> list[Labels] | None:
    """Returns the labels of a line's operands, given those of its result; None if they cannot be propagated."""
    out = lines.shape(line.outs[0])
    if line.name in ELEMENTWISE:
        operand_labels = []
        for value in line.ins:
            shape = lines.shape(value)
            if shape and len(shape) != len(out):
                return None
            sizes = zip(labels, shape, out, strict=True) if shape else ()
            operand_labels.append(tuple(label if size == out_size else NONE for label, size, out_size in sizes))
        return operand_labels
    (shape, *_) = [lines.shape(value) for value in line.ins]
    if line.name == "broadcast_in_dim":
        out_dims = line.eqn.params["broadcast_dimensions"]
        pairs = zip(out_dims, shape, strict=True)
        return [tuple(labels[dim] if out[dim] == size else NONE for dim, size in pairs)]
    if line.name == "transpose":
        order = line.eqn.params["permutation"]
        return [tuple(labels[order.index(dim)] for dim in range(len(shape)))]
    if line.name in ("reshape", "squeeze", "expand_dims"):
        in_labels = [NONE] * len(shape)
        for ins, outs in reshape_groups(shape, out):
            if len(ins) == len(outs) == 1:
                in_labels[ins[0]] = labels[outs[0]]
            elif any(labels[dim] != NONE for dim in outs):
                return None
        return [tuple(in_labels)]
    return None
