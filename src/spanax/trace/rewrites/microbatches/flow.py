"""Propagates dependence on the batch's examples through the calls, loops and branches of a loss."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from spanax.trace.jaxpr.graph import CALLED, counts_by_rank, opened, remat_of
from spanax.trace.jaxpr.lines import Line, Lines
from spanax.trace.rewrites.microbatches.dependence import (
    SAME,
    SUMMARIES,
    Dependence,
    Kind,
    first_mixed,
    joined,
    mixed,
    rows,
)
from spanax.trace.rewrites.microbatches.rules import RANDOM, Equation, is_zero, results

CALLS = {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_vmap_call", "composite"}
"""Equations that run one body on their operands."""

LOOPS = frozenset({"scan", "while", "cond"})


class Misaligned(Exception):
    """The program of a microbatch has other equations than that of the batch."""


@dataclass(eq=False)
class Flow:
    """One body at both batch sizes, its equations and values in pairs.

    Attributes:
      full, small: the body for the batch and for a microbatch.
      batch_size: the number of examples in the batch.
      is_tiled: what noise for a multiple of the examples is for, as in `Equation`.
      is_outermost: whether what depends on no trained parameter can be computed for the whole batch.
      dependence: of every value of the body.
      ahead: values to compute for the whole batch, before the microbatches.
    """

    full: Lines
    small: Lines
    batch_size: int
    is_tiled: bool = False
    is_outermost: bool = False
    dependence: dict[int, Dependence] = field(default_factory=dict)
    ahead: dict[int, None] = field(default_factory=dict)

    def run(self, inputs: Sequence[Dependence]) -> list[Dependence]:
        """The dependence of the results, from that of the inputs."""
        self.dependence = dict(zip(self.full.inputs, inputs, strict=True))
        for value in self.full.known:
            self.dependence[value] = self._constant(value)
        for line, other in zip(self.full.lines, self.small.lines, strict=True):
            operands = tuple(self.dependence[value] for value in line.ins)
            equation = Equation(self.full, self.small, line, operands, self.batch_size, self.is_tiled)
            outs = self._results(equation, other)
            self.dependence |= zip(line.outs, map(self._ahead, line.outs, outs), strict=True)
        return [self.dependence[value] for value in self.full.outputs]

    def _constant(self, value: int) -> Dependence:
        held = self.full.known[value]
        if self.full.shape(value) == self.small.shape(value):
            return Dependence(Kind.SAME, is_zero=is_zero(held))
        return self._ahead(value, mixed(None))

    def _ahead(self, value: int, out: Dependence) -> Dependence:
        """What no rule covers is computed for the whole batch where it depends on no trained parameter."""
        if not self.is_outermost or out.is_trained or out.kind in (Kind.SAME, Kind.ROWS, Kind.INDEX):
            return out
        shapes = zip(self.full.shape(value), self.small.shape(value), strict=True)
        sized = [(dim, size) for dim, (size, small) in enumerate(shapes) if size != small]
        if not sized:
            self.ahead[value] = None
            return SAME
        if len(sized) == 1 and sized[0][1] == self.batch_size:
            self.ahead[value] = None
            return rows(sized[0][0], 1)
        return out

    def _results(self, equation: Equation, other: Line) -> list[Dependence]:
        """The dependence of an equation's results, through its bodies where it has some."""
        name, line, kinds = equation.name, equation.line, equation.kinds()
        if not has_bodies(line) or kinds <= {Kind.SAME} and not any(map(equation.sized_by_batch, line.outs)):
            outs = results(equation)
        elif Kind.MIXED in kinds:
            outs = [first_mixed(equation.operands)] * len(line.outs)
        elif self.is_outermost and kinds <= {Kind.SAME, *SUMMARIES}:
            outs = [Dependence(Kind.TOTAL)] * len(line.outs)
        elif name == "scan":
            outs = self._scanned(equation, other)
        elif name == "while":
            outs = self._repeated(equation, other)
        elif name == "cond":
            outs = self._branched(equation, other)
        elif name in CALLS and is_changed(bodies_of(line)[0], bodies_of(other)[0]):
            outs = [mixed(line)] * len(line.outs)  # what replaces it would not have its derivative
        else:
            outs = self._within(bodies_of(line)[0], bodies_of(other)[0], equation.operands)
        if not self.is_outermost:
            # Inside of a body a function of totals has no place: the totals are known after all microbatches.
            outs = [mixed(line) if out.kind in (Kind.TOTAL, Kind.EXTREME) else out for out in outs]
        return [out.trained(equation.is_trained) for out in outs]

    def _within(self, full: Any, small: Any, inputs: Sequence[Dependence]) -> list[Dependence]:
        return Flow(Lines.of(*opened(full)), Lines.of(*opened(small)), self.batch_size, self.is_tiled).run(inputs)

    def _scanned(self, equation: Equation, other: Line) -> list[Dependence]:
        line, params = equation.line, equation.line.eqn.params
        (full,), (small,) = bodies_of(line), bodies_of(other)
        num_consts, num_carried = counts(equation.full, line)
        before, stacked = equation.operands[: num_consts + num_carried], equation.operands[num_consts + num_carried :]
        if params["length"] != other.eqn.params["length"]:
            return self._examples_in_turn(equation, num_carried)
        if any(each.kind is Kind.ROWS and each.dim == 0 for each in stacked):
            return [mixed(line)] * len(line.outs)
        turns = [replace(each, dim=each.dim - 1) if each.kind is Kind.ROWS else each for each in stacked]
        consts, carry = before[:num_consts], list(before[num_consts:])
        outs = self._fixed_point(line, carry, lambda carry: self._within(full, small, [*consts, *carry, *turns]))
        left = [replace(out, dim=out.dim + 1) if out.kind is Kind.ROWS else out for out in outs[num_carried:]]
        return [*carry, *left]

    def _examples_in_turn(self, equation: Equation, num_carried: int) -> list[Dependence]:
        """A loop over the examples that hands nothing on treats them one by one."""
        line, sized = equation.line, [each for each in equation.operands if each.kind is Kind.ROWS]
        is_mapped = num_carried == 0 and sized and all(each.dim == 0 and each.inner in (1, None) for each in sized)
        return [rows(0, 1) if is_mapped else mixed(line)] * len(line.outs)

    def _repeated(self, equation: Equation, other: Line) -> list[Dependence]:
        line, operands = equation.line, equation.operands
        (test, body), (small_test, small_body) = bodies_of(line), bodies_of(other)
        num_test, num_body = line.eqn.params["cond_nconsts"], line.eqn.params["body_nconsts"]
        consts, carry = operands[num_test : num_test + num_body], list(operands[num_test + num_body :])
        self._fixed_point(line, carry, lambda carry: self._within(body, small_body, [*consts, *carry]))
        (stops,) = self._within(test, small_test, [*operands[:num_test], *carry])
        return carry if stops.kind is Kind.SAME else [mixed(line)] * len(line.outs)

    def _branched(self, equation: Equation, other: Line) -> list[Dependence]:
        line, (index, *operands) = equation.line, equation.operands
        if index.kind is not Kind.SAME:
            return [mixed(line)] * len(line.outs)
        pairs = zip(bodies_of(line), bodies_of(other), strict=True)
        first, *more = [self._within(full, small, operands) for full, small in pairs]
        for outs in more:
            first = [joined(*pair, line) for pair in zip(first, outs, strict=True)]
        return first

    def _fixed_point(self, line: Line, carry: list[Dependence], turn: Any) -> list[Dependence]:
        """The results of a loop's turn once its carry depends on what the turn makes of it; changes `carry`."""
        while True:
            outs = turn(carry)
            after = [joined(*pair, line) for pair in zip(carry, outs[: len(carry)], strict=True)]
            if after == carry:
                return outs
            carry[:] = after


def check_aligned(full: Lines, small: Lines, *, ranks: bool = True) -> None:
    """Check that two programs have the same equations, between the same values.

    Raises:
      Misaligned: they have not; or, with `ranks`, two values have different numbers of dims.
    """
    structure = [
        (len(lines.avals), lines.known.keys(), lines.inputs, lines.outputs)
        + ([(line.name, line.ins, line.outs) for line in lines.lines],)
        + ([len(lines.shape(value)) for value in range(len(lines.avals))] if ranks else [],)
        for lines in (full, small)
    ]
    if structure[0] != structure[1]:
        raise Misaligned
    for line, other in zip(full.lines, small.lines, strict=True):
        for body, small_body in zip(bodies_of(line), bodies_of(other), strict=True) if has_bodies(line) else ():
            check_aligned(Lines.of(*opened(body)), Lines.of(*opened(small_body)), ranks=ranks)


def has_bodies(line: Line) -> bool:
    """Whether an equation runs bodies that are followed."""
    return line.name in LOOPS or line.name in CALLS or remat_of(line.eqn) is not None


def bodies_of(line: Line) -> list[Any]:
    """The bodies of an equation, in the order in which it has them."""
    params = remat_of(line.eqn) or line.eqn.params
    if line.name == "while":
        return [params["cond_jaxpr"], params["body_jaxpr"]]
    if line.name == "cond":
        return list(params["branches"])
    key = next((key for key in (*CALLED, "fun_jaxpr") if key in params), None)
    return [] if key is None else [params[key]]


def counts(lines: Lines, line: Line) -> tuple[int, int]:
    """How many constants and how many carried values a scan has."""
    body, _ = opened(bodies_of(line)[0])
    outside = ([len(lines.shape(value)) for value in values] for values in (line.ins, line.outs))
    inside = ([np.ndim(var.aval) for var in variables] for variables in (body.invars, body.outvars))
    (ins, outs), (body_ins, body_outs) = outside, inside
    return counts_by_rank(ins, body_ins, outs, body_outs)


def draws(full: Lines, small: Lines, line: Line) -> bool:
    """Whether an equation draws noise for every example from one key."""
    is_sized = any(full.shape(value) != small.shape(value) for value in line.outs)
    return line.name in RANDOM and is_sized and all(full.shape(value) == small.shape(value) for value in line.ins)


def is_changed(full_body: Any, small_body: Any) -> bool:
    """Whether a body draws noise for every example, or has constants that depend on the size of the batch."""
    full, small = Lines.of(*opened(full_body)), Lines.of(*opened(small_body))
    for value, held in full.known.items():
        if full.shape(value) == small.shape(value) and _differ(held, small.known[value]):
            return True
    return any(
        draws(full, small, line) or (has_bodies(line) and any(map(is_changed, bodies_of(line), bodies_of(other))))
        for line, other in zip(full.lines, small.lines, strict=True)
    )


def _differ(first: Any, second: Any) -> bool:
    is_known = first is not second and not any(isinstance(each, jax.core.Tracer) for each in (first, second))
    return is_known and not np.array_equal(
        first, second, equal_nan=bool(np.issubdtype(np.result_type(first), np.inexact))
    )
