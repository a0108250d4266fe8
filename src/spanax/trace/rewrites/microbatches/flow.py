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
"""Equations that call one body on their operands."""

LOOPS = frozenset({"scan", "while", "cond"})


class Misaligned(Exception):
    """Raised if the equations for a microbatch differ from those for the batch."""


@dataclass(eq=False)
class Flow:
    """One body at both batch sizes, its equations and values in pairs.

    Attributes:
      full, small: the body for the batch and for a microbatch.
      batch_size: the number of examples in the batch.
      is_tiled: layout of noise with several elements per example, as in `Equation`.
      is_outermost: whether values without trained parameters can be computed for the full batch.
      dependence: the dependence of each value of the body.
      ahead: values to compute for the full batch, before the microbatches.
    """

    full: Lines
    small: Lines
    batch_size: int
    is_tiled: bool = False
    is_outermost: bool = False
    dependence: dict[int, Dependence] = field(default_factory=dict)
    ahead: dict[int, None] = field(default_factory=dict)

    def run(self, inputs: Sequence[Dependence]) -> list[Dependence]:
        """Returns the dependence of the results, given that of the inputs."""
        self.dependence = dict(zip(self.full.inputs, inputs, strict=True))
        for value in self.full.known:
            self.dependence[value] = self._constant(value)
        for line, small_line in zip(self.full.lines, self.small.lines, strict=True):
            operands = tuple(self.dependence[value] for value in line.ins)
            equation = Equation(self.full, self.small, line, operands, self.batch_size, self.is_tiled)
            outs = self._results(equation, small_line)
            self.dependence |= zip(line.outs, map(self._ahead, line.outs, outs), strict=True)
        return [self.dependence[value] for value in self.full.outputs]

    def _constant(self, value: int) -> Dependence:
        const = self.full.known[value]
        if self.full.shape(value) == self.small.shape(value):
            return Dependence(Kind.SAME, is_zero=is_zero(const))
        return self._ahead(value, mixed(None))

    def _ahead(self, value: int, out: Dependence) -> Dependence:
        """Computes an unsupported value for the full batch if it does not depend on trained parameters."""
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

    def _results(self, equation: Equation, small_line: Line) -> list[Dependence]:
        """Returns the dependence of an equation's results, following its bodies, if any."""
        name, line, kinds = equation.name, equation.line, equation.kinds()
        if not has_bodies(line) or kinds <= {Kind.SAME} and not any(map(equation.sized_by_batch, line.outs)):
            outs = results(equation)
        elif Kind.MIXED in kinds:
            outs = [first_mixed(equation.operands)] * len(line.outs)
        elif self.is_outermost and kinds <= {Kind.SAME, *SUMMARIES}:
            outs = [Dependence(Kind.TOTAL)] * len(line.outs)
        elif name == "scan":
            outs = self._scanned(equation, small_line)
        elif name == "while":
            outs = self._repeated(equation, small_line)
        elif name == "cond":
            outs = self._branched(equation, small_line)
        elif name in CALLS and is_changed(bodies_of(line)[0], bodies_of(small_line)[0]):
            outs = [mixed(line)] * len(line.outs)  # a replacement would not have its custom derivative
        else:
            outs = self._within(bodies_of(line)[0], bodies_of(small_line)[0], equation.operands)
        if not self.is_outermost:
            # A body cannot use totals, which are available only after all microbatches.
            outs = [mixed(line) if out.kind in (Kind.TOTAL, Kind.EXTREME) else out for out in outs]
        return [out.trained(equation.is_trained) for out in outs]

    def _within(self, full: Any, small: Any, inputs: Sequence[Dependence]) -> list[Dependence]:
        return Flow(Lines.of(*opened(full)), Lines.of(*opened(small)), self.batch_size, self.is_tiled).run(inputs)

    def _scanned(self, equation: Equation, small_line: Line) -> list[Dependence]:
        line, params = equation.line, equation.line.eqn.params
        (full,), (small,) = bodies_of(line), bodies_of(small_line)
        num_consts, num_carried = counts(equation.full, line)
        before, stacked = equation.operands[: num_consts + num_carried], equation.operands[num_consts + num_carried :]
        if params["length"] != small_line.eqn.params["length"]:
            return self._examples_in_turn(equation, num_carried)
        if any(each.kind is Kind.ROWS and each.dim == 0 for each in stacked):
            return [mixed(line)] * len(line.outs)
        slices = [replace(each, dim=each.dim - 1) if each.kind is Kind.ROWS else each for each in stacked]
        consts, carry = before[:num_consts], list(before[num_consts:])
        outs = self._fixed_point(line, carry, lambda carry: self._within(full, small, [*consts, *carry, *slices]))
        stacked_outs = [replace(out, dim=out.dim + 1) if out.kind is Kind.ROWS else out for out in outs[num_carried:]]
        return [*carry, *stacked_outs]

    def _examples_in_turn(self, equation: Equation, num_carried: int) -> list[Dependence]:
        """A scan over the examples without a carry is independent per example."""
        line, sized = equation.line, [each for each in equation.operands if each.kind is Kind.ROWS]
        is_mapped = num_carried == 0 and sized and all(each.dim == 0 and each.inner in (1, None) for each in sized)
        return [rows(0, 1) if is_mapped else mixed(line)] * len(line.outs)

    def _repeated(self, equation: Equation, small_line: Line) -> list[Dependence]:
        line, operands = equation.line, equation.operands
        (test, body), (small_test, small_body) = bodies_of(line), bodies_of(small_line)
        num_test, num_body = line.eqn.params["cond_nconsts"], line.eqn.params["body_nconsts"]
        consts, carry = operands[num_test : num_test + num_body], list(operands[num_test + num_body :])
        self._fixed_point(line, carry, lambda carry: self._within(body, small_body, [*consts, *carry]))
        (stops,) = self._within(test, small_test, [*operands[:num_test], *carry])
        return carry if stops.kind is Kind.SAME else [mixed(line)] * len(line.outs)

    def _branched(self, equation: Equation, small_line: Line) -> list[Dependence]:
        line, (index, *operands) = equation.line, equation.operands
        if index.kind is not Kind.SAME:
            return [mixed(line)] * len(line.outs)
        pairs = zip(bodies_of(line), bodies_of(small_line), strict=True)
        first, *more = [self._within(full, small, operands) for full, small in pairs]
        for outs in more:
            first = [joined(*pair, line) for pair in zip(first, outs, strict=True)]
        return first

    def _fixed_point(self, line: Line, carry: list[Dependence], body: Any) -> list[Dependence]:
        """Iterates a loop body until the dependence of its carry is stable; returns its results and updates `carry`."""
        while True:
            outs = body(carry)
            after = [joined(*pair, line) for pair in zip(carry, outs[: len(carry)], strict=True)]
            if after == carry:
                return outs
            carry[:] = after


def check_aligned(full: Lines, small: Lines, *, ranks: bool = True) -> None:
    """Checks that two programs have the same equations on the same values.

    Raises:
      Misaligned: the equations differ or, with `ranks`, two values differ in rank.
    """
    structure = [
        (len(lines.avals), lines.known.keys(), lines.inputs, lines.outputs)
        + ([(line.name, line.ins, line.outs) for line in lines.lines],)
        + ([len(lines.shape(value)) for value in range(len(lines.avals))] if ranks else [],)
        for lines in (full, small)
    ]
    if structure[0] != structure[1]:
        raise Misaligned
    for line, small_line in zip(full.lines, small.lines, strict=True):
        for body, small_body in zip(bodies_of(line), bodies_of(small_line), strict=True) if has_bodies(line) else ():
            check_aligned(Lines.of(*opened(body)), Lines.of(*opened(small_body)), ranks=ranks)


def has_bodies(line: Line) -> bool:
    """Whether an equation has bodies that the analysis follows."""
    return line.name in LOOPS or line.name in CALLS or remat_of(line.eqn) is not None


def bodies_of(line: Line) -> list[Any]:
    """Returns the bodies of an equation, in order."""
    params = remat_of(line.eqn) or line.eqn.params
    if line.name == "while":
        return [params["cond_jaxpr"], params["body_jaxpr"]]
    if line.name == "cond":
        return list(params["branches"])
    key = next((key for key in (*CALLED, "fun_jaxpr") if key in params), None)
    return [] if key is None else [params[key]]


def counts(lines: Lines, line: Line) -> tuple[int, int]:
    """Returns the number of constants and of carried values of a scan."""
    body, _ = opened(bodies_of(line)[0])
    outside = ([len(lines.shape(value)) for value in values] for values in (line.ins, line.outs))
    inside = ([np.ndim(var.aval) for var in variables] for variables in (body.invars, body.outvars))
    (ins, outs), (body_ins, body_outs) = outside, inside
    return counts_by_rank(ins, body_ins, outs, body_outs)


def draws(full: Lines, small: Lines, line: Line) -> bool:
    """Whether an equation draws noise for all examples from the same key."""
    is_sized = any(full.shape(value) != small.shape(value) for value in line.outs)
    return line.name in RANDOM and is_sized and all(full.shape(value) == small.shape(value) for value in line.ins)


def is_changed(full_body: Any, small_body: Any) -> bool:
    """Whether a body draws noise per example, or has constants that depend on the batch size."""
    full, small = Lines.of(*opened(full_body)), Lines.of(*opened(small_body))
    for value, const in full.known.items():
        if full.shape(value) == small.shape(value) and _differ(const, small.known[value]):
            return True
    return any(
        draws(full, small, line) or (has_bodies(line) and any(map(is_changed, bodies_of(line), bodies_of(small_line))))
        for line, small_line in zip(full.lines, small.lines, strict=True)
    )


def _differ(first: Any, second: Any) -> bool:
    is_known = first is not second and not any(isinstance(each, jax.core.Tracer) for each in (first, second))
    return is_known and not np.array_equal(
        first, second, equal_nan=bool(np.issubdtype(np.result_type(first), np.inexact))
    )
