"""Dependence rules: how an equation's results depend on examples, given its operands. Calls are in `flow`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from spanax.trace.axes.discover import Dims
from spanax.trace.jaxpr.dim_rules import ELEMENTWISE, FRESH, apply, reshape_groups
from spanax.trace.jaxpr.graph import Body, Graph, Op
from spanax.trace.jaxpr.lines import Line, Lines
from spanax.trace.rewrites.chunked_loss.chunked import LINEAR, LINEAR_IN, PRODUCTS
from spanax.trace.rewrites.microbatches.dependence import (
    SAME,
    SUMMARIES,
    Dependence,
    Kind,
    agreed,
    first_mixed,
    mixed,
    rows,
)

RANDOM = frozenset({"random_bits", "random_split", "rng_bit_generator"})
"""Random equations; a microbatch uses its rows of the draws for the full batch."""

REORDERS = frozenset({"rev", "tile"})
"""Equations that move rows along dims that their rule joins."""

VIEWS = frozenset({"broadcast_in_dim", "reshape", "squeeze", "convert_element_type", "copy", "transpose"})
SUMS = frozenset({"reduce_sum", "dot_general", "conv_general_dilated"})
EXTREMA = {"reduce_max": jnp.max, "reduce_min": jnp.min, "reduce_or": jnp.any, "reduce_and": jnp.all}
"""Reductions over microbatches other than sums, with the combining function; their gradients are not supported."""

ZERO_STAYS = VIEWS | {"neg", "slice"}


@dataclass(frozen=True, eq=False)
class Equation:
    """One equation at both batch sizes, with the dependence of its operands.

    Attributes:
      full, small: the programs for the batch and for a microbatch, with the same value numbering.
      line: the equation of the batch.
      operands: the dependence of each operand.
      batch_size: the number of examples in the batch.
      is_tiled: whether noise with several elements per example is several concatenated batches; otherwise, the
        elements of an example are consecutive.
    """

    full: Lines
    small: Lines
    line: Line
    operands: tuple[Dependence, ...]
    batch_size: int
    is_tiled: bool = False

    @property
    def name(self) -> str:
        """Name of the primitive."""
        return self.line.name

    @property
    def is_trained(self) -> bool:
        """Whether an operand depends on trained parameters."""
        return any(operand.is_trained for operand in self.operands)

    def kinds(self) -> set[Kind]:
        """Returns the kinds of its operands."""
        return {operand.kind for operand in self.operands}

    def shape(self, value: int) -> tuple[int, ...]:
        """Returns the shape of a value for the full batch."""
        return self.full.shape(value)

    def sized_by_batch(self, value: int) -> list[int]:
        """Returns the dims of a value whose size depends on the batch size."""
        pairs = enumerate(zip(self.full.shape(value), self.small.shape(value), strict=True))
        return [dim for dim, (size, small) in pairs if size != small]


def results(equation: Equation) -> list[Dependence]:
    """Returns the dependence of each result of an equation without bodies."""
    kinds, line = equation.kinds(), equation.line
    if Kind.MIXED in kinds:
        outs = [first_mixed(equation.operands)] * len(line.outs)
    elif kinds & SUMMARIES:
        outs = [_of_sums(equation)] * len(line.outs)
    elif Kind.INDEX in kinds:
        outs = [_of_index(equation)] * len(line.outs)
    elif Kind.ROWS in kinds:
        outs = _of_rows(equation)
    else:
        outs = [_fresh(equation, value) for value in line.outs]
    is_zero = line.name in ZERO_STAYS and equation.operands[0].is_zero
    return [_checked(equation, value, out, is_zero) for value, out in zip(line.outs, outs, strict=True)]


def _checked(equation: Equation, value: int, out: Dependence, is_zero: bool) -> Dependence:
    """Returns the dependence if it agrees with the shapes at both batch sizes; otherwise mixed."""
    expected = [out.dim] if out.kind in (Kind.ROWS, Kind.INDEX) else []
    if out.kind is not Kind.MIXED and equation.sized_by_batch(value) != expected:
        out = mixed(equation.line)
    if is_zero:
        out = replace(out, is_zero=True)
    return out.trained(equation.is_trained)


def _of_sums(equation: Equation) -> Dependence:
    """Sums stay terms under linear equations; anything else is a function of totals."""
    if equation.kinds() & {Kind.ROWS, Kind.INDEX}:
        return mixed(equation.line)
    return Dependence(Kind.PARTIAL if _is_linear(equation) else Kind.TOTAL)


def _is_linear(equation: Equation) -> bool:
    name, operands = equation.name, equation.operands
    if equation.kinds() & {Kind.TOTAL, Kind.EXTREME}:
        return False
    is_term = [operand.kind is Kind.PARTIAL or operand.is_zero for operand in operands]
    if name == "convert_element_type":
        before, after = (equation.full.avals[value].dtype for value in (equation.line.ins[0], equation.line.outs[0]))
        return jnp.issubdtype(after, jnp.inexact) or not jnp.issubdtype(before, jnp.inexact)
    if name in PRODUCTS:
        return sum(operand.kind is Kind.PARTIAL for operand in operands) == 1
    if name in LINEAR:
        return all(is_term)
    linear_in = LINEAR_IN.get(name, ())
    return bool(linear_in) and all(
        term if position in linear_in else operand.kind is Kind.SAME
        for position, (term, operand) in enumerate(zip(is_term, operands, strict=True))
    )


def _fresh(equation: Equation, value: int) -> Dependence:
    """Returns the dependence of a result without operands that depend on examples: a constant, an index, or noise."""
    sized = equation.sized_by_batch(value)
    if not sized:
        return SAME
    (dim, *more), name, batch_size = sized, equation.name, equation.batch_size
    size = equation.shape(value)[dim]
    if more or size % batch_size:
        return mixed(equation.line)
    if name == "iota":
        if equation.line.eqn.params["dimension"] != dim:
            return rows(dim, None)
        return Dependence(Kind.INDEX, dim, 1) if size == batch_size else mixed(equation.line)
    if name in RANDOM:
        return rows(dim, 1 if equation.is_tiled else size // batch_size)
    is_repeated = name == "tile" and equation.shape(equation.line.ins[0])[dim] == 1
    is_constant = name in VIEWS or name in ELEMENTWISE or is_repeated
    return rows(dim, None) if is_constant else mixed(equation.line)


def _of_index(equation: Equation) -> Dependence:
    """Example indices may only be normalized for a gather; any other use needs the indices within the batch."""
    name, operands, line = equation.name, equation.operands, equation.line
    first = operands[0]
    if name == "lt" and first.kind is Kind.INDEX and operands[1].is_zero:
        return rows(first.dim, None)
    if name == "add" and first.kind is Kind.INDEX and not first.is_shifted and operands[1].kind is Kind.SAME:
        return Dependence(Kind.INDEX, first.dim, 1, is_shifted=True)
    if name == "select_n" and len(operands) == 3 and {op.kind for op in operands[1:]} == {Kind.INDEX}:
        is_normalized = [op.is_shifted for op in operands[1:]] == [False, True]
        return Dependence(Kind.INDEX, operands[1].dim, 1) if is_normalized else mixed(line)
    if name in VIEWS and first.kind is Kind.INDEX and not first.is_shifted:
        (moved, *_) = _of_rows(equation)
        return Dependence(Kind.INDEX, moved.dim, 1) if moved.kind is Kind.ROWS else moved
    if name == "concatenate" and line.eqn.params["dimension"] == len(equation.shape(line.outs[0])) - 1:
        return _columns(equation)
    if name == "gather" and operands[1].kind is Kind.INDEX and not operands[1].is_shifted:
        return _gathered(equation, frozenset([0]))
    return mixed(line)


def _columns(equation: Equation) -> Dependence:
    """Returns the dependence of an array of indices with some columns of example indices."""
    start, columns = 0, set[int]()
    for value, operand in zip(equation.line.ins, equation.operands, strict=True):
        size = equation.shape(value)[-1]
        if operand.kind is Kind.INDEX:
            if size != 1 or operand.is_shifted:
                return mixed(equation.line)
            columns.add(start)
        start += size
    sized = [operand for operand in equation.operands if operand.kind in (Kind.ROWS, Kind.INDEX)]
    out = agreed(sized) if len(sized) == len(equation.operands) else None
    return (
        mixed(equation.line) if out is None else Dependence(Kind.ROWS, out.dim, out.inner, columns=frozenset(columns))
    )


def _gathered(equation: Equation, columns: frozenset[int]) -> Dependence:
    """Returns the dependence of a gather in which each example reads its own row."""
    operand, indices = equation.operands[:2]
    numbers = equation.line.eqn.params["dimension_numbers"]
    local = {numbers.start_index_map[column] for column in columns}
    if operand.kind is not Kind.ROWS or local != {operand.dim} or operand.inner not in (1, None):
        return mixed(equation.line)
    rank = len(equation.shape(equation.line.outs[0]))
    looked_up = [dim for dim in range(rank) if dim not in numbers.offset_dims]
    return rows(looked_up[indices.dim], 1)


def _of_rows(equation: Equation) -> list[Dependence]:
    line, operands = equation.line, equation.operands
    sized = [
        (position, operand) for position, operand in enumerate(operands) if operand.kind in (Kind.ROWS, Kind.INDEX)
    ]
    if line.name in ELEMENTWISE:
        out = agreed(operand for _, operand in sized)
        return [mixed(line) if out is None else out]
    if line.name in ("reshape", "squeeze"):
        return [_reshaped(equation, operands[0])]
    if line.name in ("concatenate", "slice", "split") and all(
        operand.dim == line.eqn.params.get("dimension", line.eqn.params.get("axis", operand.dim))
        for _, operand in sized
    ):
        return _along(equation)
    if line.name in FRESH:
        (position, operand), *more = sized
        return [
            rows(operand.dim, operand.inner) if not more else agreed(each for _, each in sized) or mixed(line)
            for _ in line.outs
        ]
    if line.name == "gather" and operands[1].columns:
        return [_gathered(equation, operands[1].columns)]
    if line.name in REORDERS and _reorders(equation, operands[0].dim):
        return [mixed(line)] * len(line.outs)
    return _by_joins(equation, sized)


def _reorders(equation: Equation, dim: int) -> bool:
    """Whether a `rev` or a `tile` moves rows along a dim."""
    (source,), params = equation.line.ins, equation.line.eqn.params
    if equation.name == "rev":
        return dim in params["dimensions"]
    return equation.shape(source)[dim] != equation.shape(equation.line.outs[0])[dim]


def _by_joins(equation: Equation, sized: Sequence[tuple[int, Dependence]]) -> list[Dependence]:
    """Rows if the registered rule joins the example dims of the operands with a dim of the result; otherwise a sum."""
    line, num_ins = equation.line, len(equation.line.ins)
    numbers = tuple(range(num_ins + len(line.outs)))
    op = Op(line.name, line.eqn, numbers[:num_ins], numbers[num_ins:])
    avals = [equation.full.avals[value] for value in (*line.ins, *line.outs)]
    dims = Dims(Graph(Body(op.inputs, op.outputs, (op,)), avals, {}))
    apply(op, dims)
    if dims.unknown:
        return [mixed(line)] * len(line.outs)
    outs = []
    for value in op.outputs:
        labels = {dims.find(position, operand.dim) for position, operand in sized}
        into = [dim for dim, label in enumerate(dims.classes(value)) if label in labels]
        inners = {operand.inner for _, operand in sized} - {None}
        is_replicated = any((value, dim) in dims.replicated for dim in into)
        if len(labels) > 1 or len(inners) > 1 or len(into) > 1 or is_replicated or _scatters(equation, sized):
            outs.append(mixed(line))
        elif into:
            outs.append(rows(into[0], next(iter(inners), None)))
        else:
            outs.append(_reduced(equation, sized))
    return outs


def _scatters(equation: Equation, sized: Sequence[tuple[int, Dependence]]) -> bool:
    """Whether a scatter writes along the example dim at positions given by its indices."""
    if not equation.name.startswith("scatter"):
        return False
    scattered = equation.line.eqn.params["dimension_numbers"].scatter_dims_to_operand_dims
    return any(position == 0 and operand.dim in scattered for position, operand in sized)


def _reduced(equation: Equation, sized: Sequence[tuple[int, Dependence]]) -> Dependence:
    """Returns the dependence of a reduction over the examples: a sum, an extremum, or mixed."""
    line = equation.line
    if line.name in SUMS:
        return Dependence(Kind.PARTIAL)
    if line.name in EXTREMA:
        return Dependence(Kind.EXTREME)
    if line.name in ("scatter-add", "scatter_add") and equation.operands[0].is_zero and sized[0][0] > 0:
        return Dependence(Kind.PARTIAL)
    return mixed(line)


def _reshaped(equation: Equation, operand: Dependence) -> Dependence:
    """Returns the example dim of a reshaped array, with the elements per example along it."""
    old, new = equation.shape(equation.line.ins[0]), equation.shape(equation.line.outs[0])
    for before, after in reshape_groups(old, new):
        if operand.dim not in before:
            continue
        right = math.prod(old[dim] for dim in before if dim > operand.dim)
        sized = equation.sized_by_batch(equation.line.outs[0])
        if len(sized) != 1 or sized[0] not in after:
            return mixed(equation.line)
        if operand.inner is None and right == 1:
            return rows(sized[0], None)
        num_elements = (operand.inner or 1) * right
        stride = math.prod(new[dim] for dim in after if dim > sized[0])
        block = equation.batch_size * num_elements // stride
        if num_elements % stride or new[sized[0]] % block:
            return mixed(equation.line)
        return rows(sized[0], num_elements // stride)
    return mixed(equation.line)


def _along(equation: Equation) -> list[Dependence]:
    """Concatenates, slices or splits batches along the example dim, if aligned to batches."""
    line = equation.line
    out = agreed(operand for operand in equation.operands if operand.kind is Kind.ROWS)
    if out is None or any(operand.kind is not Kind.ROWS for operand in equation.operands) or out.inner is None:
        return [mixed(line)] * len(line.outs)
    block, params = equation.batch_size * out.inner, line.eqn.params
    if line.name == "slice":
        sizes = [params["start_indices"][out.dim], params["limit_indices"][out.dim]]
        is_strided = bool(params["strides"]) and params["strides"][out.dim] > 1
    else:
        sizes, is_strided = [equation.shape(value)[out.dim] for value in (*line.ins, *line.outs)], False
    is_aligned = not is_strided and all(size % block == 0 for size in sizes)
    return [out if is_aligned else mixed(line)] * len(line.outs)


def is_zero(value: object) -> bool:
    """Whether a constant is zero everywhere."""
    return isinstance(value, int | float | bool | np.ndarray | np.generic) and not np.any(value)
