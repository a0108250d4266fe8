"""Propagates dependence on the batch's examples through the calls, loops and branches of a loss."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from spanax.trace.analysis.sorted_rows import SortedRows
from spanax.trace.jaxpr.graph import Body, Graph, Op, difference, remat_of, scan_counts
from spanax.trace.rewrites.microbatches.rules import (
    RANDOM,
    SAME,
    SUMMARIES,
    Dependence,
    Equation,
    Kind,
    first_mixed,
    is_zero,
    joined,
    mixed,
    results,
    rows,
)


class Misaligned(Exception):
    """Raised if the equations for a microbatch differ from those for the batch."""


@dataclass(eq=False)
class Flow:
    """One body at both batch sizes, its operations and values in pairs.

    Attributes:
      full, small: the body for the batch and for a microbatch.
      batch_size: the number of examples in the batch.
      is_tiled: layout of noise with several elements per example, as in `Equation`.
      sorted: rows sorted by expert in the full program, of which a microbatch sorts its own.
      is_outermost: whether values without trained parameters can be computed for the full batch.
      dependence: the dependence of each value of the body.
      ahead: values to compute for the full batch, before the microbatches.
    """

    full: Graph
    small: Graph
    batch_size: int
    is_tiled: bool = False
    is_outermost: bool = False
    sorted: SortedRows = field(default_factory=SortedRows)
    dependence: dict[int, Dependence] = field(default_factory=dict)
    ahead: dict[int, None] = field(default_factory=dict)

    def run(self, inputs: Sequence[Dependence]) -> list[Dependence]:
        """Returns the dependence of the results, given that of the inputs."""
        self.dependence = dict(zip(self.full.body.inputs, inputs, strict=True))
        for op, small_op in zip(self.full.body.ops, self.small.body.ops, strict=True):
            operands = tuple(map(self._of, op.inputs))
            equation = Equation(self.full, self.small, op, operands, self.batch_size, self.is_tiled)
            outs = self._sorted(equation) or self._results(equation, small_op)
            self.dependence |= zip(op.outputs, map(self._ahead, op.outputs, outs), strict=True)
        return [self._of(value) for value in self.full.body.outputs]

    def _sorted(self, equation: Equation) -> list[Dependence] | None:
        """Returns the dependence of results that are rows sorted by expert, or are added to their tokens.

        The results of a token do not depend on the order of rows, and so not on which other tokens are sorted with it.
        """
        op = equation.op
        row_op = self.sorted.ops.get(op)
        dims = dict(self.sorted.dims)
        places = [(value, dims.get(value)) for value in op.outputs]
        if row_op is not None and row_op.column is not None:
            places = list(zip(op.outputs, row_op.outputs, strict=True))
        if op.bodies or any(dim is None for _, dim in places):
            return None
        of_rows = row_op.inputs if row_op else tuple(map(dims.get, op.inputs))
        for value, operand, dim in zip(op.inputs, equation.operands, of_rows, strict=True):
            is_position = op.name == "sort" and operand.kind is Kind.MIXED and not operand.is_trained
            is_rows = operand.kind is Kind.ROWS and (operand.dim == dim or operand.inner is None)
            is_whole = operand.kind is Kind.SAME and (dim is None or operand.is_zero)
            if not (is_position or is_rows or is_whole or value in self.sorted.counts):
                return None
        sizes = [(self.full.shape(value)[dim] // self.batch_size, dim) for value, dim in places if dim is not None]
        return [rows(dim, inner).trained(equation.is_trained) for inner, dim in sizes]

    def _of(self, value: int) -> Dependence:
        if value not in self.dependence:
            self.dependence[value] = self._constant(value)
        return self.dependence[value]

    def _constant(self, value: int) -> Dependence:
        const = self.full.constants[value]
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

    def _results(self, equation: Equation, small: Op) -> list[Dependence]:
        """Returns the dependence of an operation's results, following its bodies, if any."""
        name = equation.name
        op = equation.op
        kinds = equation.kinds()
        if not op.bodies or kinds <= {Kind.SAME} and not any(map(equation.sized_by_batch, op.outputs)):
            outs = results(equation)
        elif Kind.MIXED in kinds:
            outs = [first_mixed(equation.operands)] * len(op.outputs)
        elif self.is_outermost and kinds <= {Kind.SAME, *SUMMARIES}:
            outs = [Dependence(Kind.TOTAL)] * len(op.outputs)
        elif name == "scan":
            outs = self._scanned(equation, small)
        elif name == "while":
            outs = self._repeated(equation, small)
        elif name == "cond":
            outs = self._branched(equation, small)
        elif remat_of(op.eqn) is None and is_changed(self.full, self.small, op.bodies[0], small.bodies[0]):
            outs = [mixed(op)] * len(op.outputs)  # a replacement would not have its custom derivative
        else:
            outs = self._within(op.bodies[0], small.bodies[0], equation.operands)
        if not self.is_outermost:
            # A body cannot use totals, which are available only after all microbatches.
            outs = [mixed(op) if out.kind in (Kind.TOTAL, Kind.EXTREME) else out for out in outs]
        return [out.trained(equation.is_trained) for out in outs]

    def _within(self, full: Body, small: Body, inputs: Sequence[Dependence]) -> list[Dependence]:
        bodies = self.full.within(full), self.small.within(small)
        return Flow(*bodies, self.batch_size, self.is_tiled, sorted=self.sorted).run(inputs)

    def _scanned(self, equation: Equation, small: Op) -> list[Dependence]:
        op = equation.op
        num_consts, num_carried = scan_counts(self.full, op)
        before = equation.operands[: num_consts + num_carried]
        stacked = equation.operands[num_consts + num_carried :]
        if op.params["length"] != small.params["length"]:
            return self._scanned_examples(equation, num_carried)
        if any(each.kind is Kind.ROWS and each.dim == 0 for each in stacked):
            return [mixed(op)] * len(op.outputs)
        slices = [replace(each, dim=each.dim - 1) if each.kind is Kind.ROWS else each for each in stacked]
        consts = before[:num_consts]
        carry = list(before[num_consts:])
        bodies = (op.bodies[0], small.bodies[0])
        outs = self._fixed_point(op, carry, lambda carry: self._within(*bodies, [*consts, *carry, *slices]))
        stacked_outs = [replace(out, dim=out.dim + 1) if out.kind is Kind.ROWS else out for out in outs[num_carried:]]
        return [*carry, *stacked_outs]

    def _scanned_examples(self, equation: Equation, num_carried: int) -> list[Dependence]:
        """A scan over the examples without a carry is independent per example."""
        op = equation.op
        sized = [each for each in equation.operands if each.kind is Kind.ROWS]
        is_mapped = num_carried == 0 and sized and all(each.dim == 0 and each.inner in (1, None) for each in sized)
        return [rows(0, 1) if is_mapped else mixed(op)] * len(op.outputs)

    def _repeated(self, equation: Equation, small: Op) -> list[Dependence]:
        op = equation.op
        operands = equation.operands
        tests, bodies = zip(op.bodies, small.bodies, strict=True)
        num_test = op.params["cond_nconsts"]
        num_body = op.params["body_nconsts"]
        consts = operands[num_test : num_test + num_body]
        carry = list(operands[num_test + num_body :])
        self._fixed_point(op, carry, lambda carry: self._within(*bodies, [*consts, *carry]))
        (stops,) = self._within(*tests, [*operands[:num_test], *carry])
        return carry if stops.kind is Kind.SAME else [mixed(op)] * len(op.outputs)

    def _branched(self, equation: Equation, small: Op) -> list[Dependence]:
        op = equation.op
        index, *operands = equation.operands
        if index.kind is not Kind.SAME:
            return [mixed(op)] * len(op.outputs)
        first, *more = [self._within(*pair, operands) for pair in zip(op.bodies, small.bodies, strict=True)]
        for outs in more:
            first = [joined(*pair, op) for pair in zip(first, outs, strict=True)]
        return first

    def _fixed_point(self, op: Op, carry: list[Dependence], body: Any) -> list[Dependence]:
        """Iterates a loop body until the dependence of its carry is stable; returns its results and updates `carry`."""
        while True:
            outs = body(carry)
            after = [joined(*pair, op) for pair in zip(carry, outs[: len(carry)], strict=True)]
            if after == carry:
                return outs
            carry[:] = after


def check_aligned(full: Graph, small: Graph, *, ranks: bool = True) -> None:
    """Checks that two programs have the same operations on the same values.

    Raises:
      Misaligned: the operations differ or, with `ranks`, two values differ in rank.
    """
    num_dims = lambda graph: [len(graph.shape(value)) for value in range(len(graph.avals))]  # noqa: E731
    is_alike = full.constants.keys() == small.constants.keys() and not difference(full.body, small.body)
    if not is_alike or (ranks and num_dims(full) != num_dims(small)):
        raise Misaligned


def draws(full: Graph, small: Graph, op: Op) -> bool:
    """Whether an operation draws noise for all examples from the same key."""
    is_sized = any(full.shape(value) != small.shape(value) for value in op.outputs)
    return op.name in RANDOM and is_sized and all(full.shape(value) == small.shape(value) for value in op.inputs)


def is_changed(full: Graph, small: Graph, full_body: Body, small_body: Body) -> bool:
    """Whether a body draws noise per example, or has constants that depend on the batch size."""
    for value in {*full_body.outputs, *(value for op in full_body.ops for value in op.inputs)} & full.constants.keys():
        is_alike = full.shape(value) == small.shape(value)
        if is_alike and _differ(full.constants[value], small.constants[value]):
            return True
    ops = zip(full_body.ops, small_body.ops, strict=True)
    bodies = (pair for op, small_op in ops for pair in zip(op.bodies, small_op.bodies, strict=True))
    is_noisy = any(draws(full, small, op) for op in full_body.ops)
    return is_noisy or any(is_changed(full, small, *pair) for pair in bodies)


def _differ(first: Any, second: Any) -> bool:
    is_known = first is not second and not any(isinstance(each, jax.core.Tracer) for each in (first, second))
    return is_known and not np.array_equal(
        first, second, equal_nan=bool(np.issubdtype(np.result_type(first), np.inexact))
    )
