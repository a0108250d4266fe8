"""How a value of the loss depends on the examples of the batch, by equation. Calls are in `flow`."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from fractions import Fraction

import jax.numpy as jnp
import numpy as np

from spanax.trace.jaxpr.dim_maps.relations import Family, Relation
from spanax.trace.jaxpr.dim_maps.relations import Kind as DimKind
from spanax.trace.jaxpr.dim_maps.table import names
from spanax.trace.jaxpr.graph import OWN_KERNEL, Graph, Op
from spanax.trace.jaxpr.linear import PRODUCTS, linear_operands


class Kind(Enum):
    """What a microbatch computes of a value.

    `SAME`: the value itself, which does not depend on the examples. `ROWS`: its rows for the examples of the
    microbatch. `INDEX`: the index of each example within the microbatch. `PARTIAL`: a term; the terms of all
    microbatches add up to the value. `EXTREME`: the maximum or minimum over the microbatch. `TOTAL`: nothing; the value
    is a function of sums over the batch. `MIXED`: nothing; the value combines examples in an unsupported manner.
    """

    SAME = auto()
    ROWS = auto()
    INDEX = auto()
    PARTIAL = auto()
    EXTREME = auto()
    TOTAL = auto()
    MIXED = auto()


@dataclass(frozen=True)
class Dependence:
    """How one value depends on the examples.

    Attributes:
      kind: what a microbatch computes of it.
      dim: for `ROWS` and `INDEX`, the example dim.
      inner: consecutive elements along `dim` that belong to one example; None where all rows are equal.
      is_trained: whether it depends on trained parameters.
      is_zero: whether it is zero everywhere.
      is_shifted: for `INDEX`, whether the batch size was added.
      columns: for an array of indices, its columns along the last dim that are `INDEX`.
      cause: for `MIXED`, the equation that combines examples.
    """

    kind: Kind
    dim: int = -1
    inner: int | None = None
    is_trained: bool = False
    is_zero: bool = False
    is_shifted: bool = False
    columns: frozenset[int] = frozenset()
    cause: Op | None = None

    def trained(self, is_trained: bool) -> "Dependence":
        """Returns this dependence, marked as depending on trained parameters if `is_trained`."""
        return replace(self, is_trained=True) if is_trained and not self.is_trained else self


SUMMARIES = frozenset({Kind.PARTIAL, Kind.EXTREME, Kind.TOTAL})
"""Values reduced over the examples, available only after all microbatches."""

SAME = Dependence(Kind.SAME)


def rows(dim: int, inner: int | None = 1) -> Dependence:
    """Returns the dependence of a value with examples along a dim."""
    return Dependence(Kind.ROWS, dim, inner)


def mixed(cause: Op | None) -> Dependence:
    """Returns the dependence of a value in which an equation combines several examples."""
    return Dependence(Kind.MIXED, cause=cause)


def first_mixed(operands: Iterable[Dependence]) -> Dependence:
    """Returns a mixed operand, preferring one that depends on trained parameters."""
    return max((operand for operand in operands if operand.kind is Kind.MIXED), key=lambda operand: operand.is_trained)


def joined(first: Dependence, second: Dependence, cause: Op | None) -> Dependence:
    """Returns the dependence of a value that is either of two: a loop's carry, or the result of a `cond`."""
    is_trained = first.is_trained or second.is_trained
    is_zero = first.is_zero and second.is_zero
    kinds = {first.kind, second.kind}
    if Kind.MIXED in kinds:
        result = first if first.kind is Kind.MIXED else second
    elif kinds == {Kind.SAME} or kinds == {Kind.PARTIAL}:
        result = first
    elif kinds == {Kind.SAME, Kind.PARTIAL}:
        same, partial = (first, second) if first.kind is Kind.SAME else (second, first)
        result = partial if same.is_zero else mixed(cause)
    elif kinds == {Kind.ROWS}:
        result = agreed([first, second]) or mixed(cause)
    else:
        result = mixed(cause)
    return replace(result, is_zero=is_zero).trained(is_trained)


def agreed(operands: Iterable[Dependence]) -> Dependence | None:
    """Returns rows along the example dim that all operands share; None if they differ."""
    operands = list(operands)
    inners = {operand.inner for operand in operands} - {None}
    if len({operand.dim for operand in operands}) != 1 or len(inners) > 1:
        return None
    return rows(operands[0].dim, next(iter(inners), None))


RANDOM = frozenset({"random_bits", "random_split", "rng_bit_generator"})
"""Random equations; a microbatch uses its rows of the draws for the full batch."""

VIEWS = names(Family.VIEW) | {"convert_element_type", "copy"}
SUMS = frozenset({"reduce_sum", "dot_general", "conv_general_dilated"})
EXTREMA = {"reduce_max": jnp.max, "reduce_min": jnp.min, "reduce_or": jnp.any, "reduce_and": jnp.all}
"""Reductions over microbatches other than sums, with the combining function; their gradients are not supported."""

ZERO_STAYS = VIEWS | {"neg", "slice"}


@dataclass(frozen=True, eq=False)
class Equation:
    """One operation at both batch sizes, with the dependence of its operands.

    Attributes:
      full, small: the programs for the batch and for a microbatch, with the same value numbering.
      op: the operation of the batch.
      operands: the dependence of each operand.
      batch_size: the number of examples in the batch.
      is_tiled: whether noise with several elements per example is several concatenated batches; otherwise, the
        elements of an example are consecutive.
    """

    full: Graph
    small: Graph
    op: Op
    operands: tuple[Dependence, ...]
    batch_size: int
    is_tiled: bool = False

    @property
    def name(self) -> str:
        """Name of the primitive."""
        return self.op.name

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
    kinds = equation.kinds()
    op = equation.op
    if Kind.MIXED in kinds:
        outs = [first_mixed(equation.operands)] * len(op.outputs)
    elif kinds & SUMMARIES:
        outs = [_of_sums(equation)] * len(op.outputs)
    elif Kind.INDEX in kinds:
        outs = [_of_index(equation)] * len(op.outputs)
    elif Kind.ROWS in kinds:
        outs = _of_rows(equation)
    else:
        outs = [_fresh(equation, value) for value in op.outputs]
    is_zero = op.name in ZERO_STAYS and equation.operands[0].is_zero
    return [_checked(equation, value, out, is_zero) for value, out in zip(op.outputs, outs, strict=True)]


def _checked(equation: Equation, value: int, out: Dependence, is_zero: bool) -> Dependence:
    """Returns the dependence if it agrees with the shapes at both batch sizes; otherwise mixed."""
    expected = [out.dim] if out.kind in (Kind.ROWS, Kind.INDEX) else []
    if out.kind is not Kind.MIXED and equation.sized_by_batch(value) != expected:
        out = mixed(equation.op)
    if is_zero:
        out = replace(out, is_zero=True)
    return out.trained(equation.is_trained)


def _of_sums(equation: Equation) -> Dependence:
    """Sums stay terms under linear equations; anything else is a function of totals."""
    if equation.kinds() & {Kind.ROWS, Kind.INDEX}:
        return mixed(equation.op)
    return Dependence(Kind.PARTIAL if _is_linear(equation) else Kind.TOTAL)


def _is_linear(equation: Equation) -> bool:
    name = equation.name
    operands = equation.operands
    if equation.kinds() & {Kind.TOTAL, Kind.EXTREME}:
        return False
    is_term = [operand.kind is Kind.PARTIAL or operand.is_zero for operand in operands]
    if name == "convert_element_type":
        before, after = (equation.full.avals[value].dtype for value in (equation.op.inputs[0], equation.op.outputs[0]))
        return jnp.issubdtype(after, jnp.inexact) or not jnp.issubdtype(before, jnp.inexact)
    if name in PRODUCTS:
        return sum(operand.kind is Kind.PARTIAL for operand in operands) == 1
    linear_in = linear_operands(equation.op)
    return bool(linear_in) and all(
        term if position in linear_in else operand.kind is Kind.SAME
        for position, (term, operand) in enumerate(zip(is_term, operands, strict=True))
    )


def _fresh(equation: Equation, value: int) -> Dependence:
    """Returns the dependence of a result without operands that depend on examples: a constant, an index, or noise."""
    sized = equation.sized_by_batch(value)
    if not sized:
        return SAME
    dim, *more = sized
    op = equation.op
    batch_size = equation.batch_size
    size = equation.shape(value)[dim]
    if more or size % batch_size:
        return mixed(op)
    repeated = op.dim_map.dims(DimKind.REPEATED)
    if op.is_elementwise or op.family is Family.VIEW or (len(op.inputs) + op.outputs.index(value), dim) in repeated:
        return rows(dim, None)
    if op.name in RANDOM:
        return rows(dim, 1 if equation.is_tiled else size // batch_size)
    is_index = op.family is Family.IOTA and size == batch_size
    return Dependence(Kind.INDEX, dim, 1) if is_index else mixed(op)


def _of_index(equation: Equation) -> Dependence:
    """Example indices may only be normalized for a gather; any other use needs the indices within the batch."""
    name = equation.name
    operands = equation.operands
    op = equation.op
    first = operands[0]
    if name == "lt" and first.kind is Kind.INDEX and operands[1].is_zero:
        return rows(first.dim, None)
    if name == "add" and first.kind is Kind.INDEX and not first.is_shifted and operands[1].kind is Kind.SAME:
        return Dependence(Kind.INDEX, first.dim, 1, is_shifted=True)
    if name == "select_n" and len(operands) == 3 and {operand.kind for operand in operands[1:]} == {Kind.INDEX}:
        is_normalized = [operand.is_shifted for operand in operands[1:]] == [False, True]
        return Dependence(Kind.INDEX, operands[1].dim, 1) if is_normalized else mixed(op)
    if name in VIEWS and first.kind is Kind.INDEX and not first.is_shifted:
        moved, *_ = _of_rows(equation)
        return Dependence(Kind.INDEX, moved.dim, 1) if moved.kind is Kind.ROWS else moved
    if name == "concatenate" and op.params["dimension"] == len(equation.shape(op.outputs[0])) - 1:
        return _columns(equation)
    if name == "gather" and operands[1].kind is Kind.INDEX and not operands[1].is_shifted:
        return _gathered(equation, frozenset([0]))
    return mixed(op)


def _columns(equation: Equation) -> Dependence:
    """Returns the dependence of an array of indices with some columns of example indices."""
    start = 0
    columns = set[int]()
    for value, operand in zip(equation.op.inputs, equation.operands, strict=True):
        size = equation.shape(value)[-1]
        if operand.kind is Kind.INDEX:
            if size != 1 or operand.is_shifted:
                return mixed(equation.op)
            columns.add(start)
        start += size
    sized = [operand for operand in equation.operands if operand.kind in (Kind.ROWS, Kind.INDEX)]
    out = agreed(sized) if len(sized) == len(equation.operands) else None
    return mixed(equation.op) if out is None else Dependence(Kind.ROWS, out.dim, out.inner, columns=frozenset(columns))


def _gathered(equation: Equation, columns: frozenset[int]) -> Dependence:
    """Returns the dependence of a gather in which each example reads its own row."""
    operand, indices = equation.operands[:2]
    numbers = equation.op.params["dimension_numbers"]
    local = {numbers.start_index_map[column] for column in columns}
    if operand.kind is not Kind.ROWS or local != {operand.dim} or operand.inner not in (1, None):
        return mixed(equation.op)
    rank = len(equation.shape(equation.op.outputs[0]))
    looked_up = [dim for dim in range(rank) if dim not in numbers.offset_dims]
    return rows(looked_up[indices.dim], 1)


def _of_rows(equation: Equation) -> list[Dependence]:
    op = equation.op
    operands = equation.operands
    sized = [
        (position, operand) for position, operand in enumerate(operands) if operand.kind in (Kind.ROWS, Kind.INDEX)
    ]
    if op.is_elementwise:
        out = agreed(operand for _, operand in sized)
        return [mixed(op) if out is None else out]
    for relation in op.dim_map.of_kind(DimKind.FACTORS):
        if (0, operands[0].dim) in relation.dims:
            return [_reshaped(equation, operands[0], relation)]
    if op.dim_map.dims(DimKind.PARTS).issuperset((position, operand.dim) for position, operand in sized):
        return _along(equation)
    if op.family in (Family.FRESH, Family.IOTA):
        (position, operand), *more = sized
        return [
            rows(operand.dim, operand.inner) if not more else agreed(each for _, each in sized) or mixed(op)
            for _ in op.outputs
        ]
    if op.name == "gather" and operands[1].columns:
        return [_gathered(equation, operands[1].columns)]
    return _by_relations(equation, sized)


def _by_relations(equation: Equation, sized: Sequence[tuple[int, Dependence]]) -> list[Dependence]:
    """Rows if the example dims of the operands correspond to a dim of the result; otherwise a sum."""
    op = equation.op
    dims = [(position, operand.dim) for position, operand in sized]
    related = op.dim_map.of_kind(DimKind.SAME, DimKind.CONTRACTED, DimKind.GROUPS)
    relation_of = {dim: relation for relation in related for dim in relation.dims}
    relations = {relation_of.get(dim) for dim in dims}
    # Dims of different sizes that correspond have as many parts: an example has its share of each.
    shares = {
        Fraction(operand.inner, equation.shape(op.inputs[position])[operand.dim])
        for position, operand in sized
        if operand.inner is not None
    }
    is_mixed = len(relations) > 1 or len(shares) > 1 or (None in relations and len(dims) > 1)
    is_mixed = is_mixed or any(op.dim_map.of_kind(DimKind.UNKNOWN))
    if is_mixed or not op.dim_map.dims(DimKind.REORDERED).isdisjoint(dims):
        return [mixed(op)] * len(op.outputs)
    (relation,) = relations
    result_dims = dict(relation.dims if relation else ())
    along = op.dim_map.dims(DimKind.ALONG)
    outs = []
    for array in range(len(op.inputs), len(op.inputs) + len(op.outputs)):
        dim = result_dims.get(array)
        if dim is None:
            outs.append(_reduced(equation, sized, array - len(op.inputs)))
            continue
        inner = next(iter(shares), Fraction(0)) * equation.shape(op.outputs[array - len(op.inputs)])[dim]
        is_apart = (array, dim) not in along and inner.denominator == 1
        outs.append(rows(dim, int(inner) or None) if is_apart else mixed(op))
    return outs


def _reduced(equation: Equation, sized: Sequence[tuple[int, Dependence]], result: int) -> Dependence:
    """Returns the dependence of a reduction over the examples: a sum, an extremum, or mixed."""
    op = equation.op
    position, operand = sized[0]
    is_sum = (
        op.name == OWN_KERNEL
        and op.params["classes"].operands[position][operand.dim] in (op.params["classes"].sums[result])
    )
    if op.name in SUMS or is_sum:
        return Dependence(Kind.PARTIAL)
    if op.name in EXTREMA:
        return Dependence(Kind.EXTREME)
    if op.family is Family.SCATTER_ADD and equation.operands[0].is_zero and sized[0][0] > 0:
        return Dependence(Kind.PARTIAL)
    return mixed(op)


def _reshaped(equation: Equation, operand: Dependence, relation: Relation) -> Dependence:
    """Returns the example dim of a reshaped array, with the elements per example along it."""
    old = equation.shape(equation.op.inputs[0])
    new = equation.shape(equation.op.outputs[0])
    before, after = ([dim for _, dim in run] for run in relation.runs)
    right = math.prod(old[dim] for dim in before if dim > operand.dim)
    sized = equation.sized_by_batch(equation.op.outputs[0])
    if len(sized) != 1 or sized[0] not in after:
        return mixed(equation.op)
    if operand.inner is None and right == 1:
        return rows(sized[0], None)
    num_elements = (operand.inner or 1) * right
    stride = math.prod(new[dim] for dim in after if dim > sized[0])
    block = equation.batch_size * num_elements // stride
    if num_elements % stride or new[sized[0]] % block:
        return mixed(equation.op)
    return rows(sized[0], num_elements // stride)


def _along(equation: Equation) -> list[Dependence]:
    """Concatenates, slices or splits batches along the example dim, if aligned to batches."""
    op = equation.op
    out = agreed(operand for operand in equation.operands if operand.kind is Kind.ROWS)
    if out is None or any(operand.kind is not Kind.ROWS for operand in equation.operands) or out.inner is None:
        return [mixed(op)] * len(op.outputs)
    block = equation.batch_size * out.inner
    params = op.params
    sizes = [equation.shape(value)[out.dim] for value in (*op.inputs, *op.outputs)]
    sizes += [params["start_indices"][out.dim]] if "start_indices" in params else []
    return [out if all(size % block == 0 for size in sizes) else mixed(op)] * len(op.outputs)


def is_zero(value: object) -> bool:
    """Whether a constant is zero everywhere."""
    return isinstance(value, int | float | bool | np.ndarray | np.generic) and not np.any(value)
