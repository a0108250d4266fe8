"""The table of primitives: one row per primitive, with its family and the relations of its dims.

This is the only place to edit for a new primitive; users add rows with `spanax.rule`.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from jax.extend import core

from spanax.trace.jaxpr.dim_maps.registry import (
    TABLE,
    UNKNOWN,
    Padding,
    aligned,
    limits_of,
    neutral_element,
    row,
    same,
    shape_of,
    slice_sizes_of,
)
from spanax.trace.jaxpr.dim_maps.relations import Dim, DimMap, Equation, Family, Kind, Relation, Shape


def dim_map(eqn: core.JaxprEqn) -> DimMap:
    """Returns the dim map of an equation."""
    row = TABLE.get(eqn.primitive.name, UNKNOWN)
    equation = Equation(eqn)
    relations = tuple(row.relations(equation))
    family = row.family
    if family is None:
        family = Family.ELEMENTWISE if set(relations) == set(_elementwise(equation)) else Family.OTHER
    return DimMap(family, relations, tuple(map(len, equation.shapes[: len(eqn.invars)])))


def names(*families: Family) -> frozenset[str]:
    """Returns the primitives of some families.

    Example:
      >>> sorted(names(Family.VIEW))
      ['broadcast_in_dim', 'reshape', 'squeeze', 'transpose']
    """
    return frozenset(name for name, row in TABLE.items() if row.family in families)


@row(
    Family.ELEMENTWISE,
    """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil clamp
clz complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor
ge gt igamma igamma_grad_a igammac imag integer_pow is_finite layout_constraint le le_to lgamma log log1p log2
logistic lt lt_to max min mul mulhi name ne neg nextafter not one_minus_square or pin polygamma polynomial
population_count pow pvary random_clone random_gamma_grad real reciprocal reduce_precision regularized_incomplete_beta
rem reshard round rsqrt select_n shard_alike sharding_constraint shift_left shift_right_arithmetic shift_right_logical
sign sin sinh sqrt square stochastic_round stop_gradient sub tan tanh unpin with_memory_space_constraint
xla_metadata_value xor zeros_like zeta
""",
    Padding(),
)
def _elementwise(equation: Equation) -> Iterable[Relation]:
    return aligned(equation.shapes, tuple(range(len(equation.shapes))))


@row(
    Family.FRESH,
    """
axis_index create_token empty empty2 eye iota_2x32_shape philox2x32 philox4x32 platform_index random_bits
random_fold_in random_gamma random_seed random_split random_unwrap random_wrap rng_bit_generator rng_uniform
threefry2x32 threefry4x32
""",
)
def _fresh(equation: Equation) -> Iterator[Relation]:
    for out in equation.outputs:
        yield from (Relation(Kind.NEW, ((out, dim),)) for dim in range(len(equation.shapes[out])))


@row(Family.IOTA, "iota", Padding(shape_of("shape")))
def _iota(equation: Equation) -> Iterator[Relation]:
    (out,) = equation.outputs
    for dim in range(len(equation.shapes[out])):
        yield Relation(Kind.NEW if dim == equation.params["dimension"] else Kind.REPEATED, ((out, dim),))


OPAQUE_KERNELS = ("ffi_call", "mosaic_gpu", "pallas_call", "tpu_custom_call", "triton_kernel_call")
"""The primitives of kernels that no compiler can partition: every device computes all of their results."""


@row(
    Family.OTHER,
    """
buffer_callback call_exported custom_call custom_lin custom_partitioning debug_callback debug_print io_callback
pure_callback shard_map xla_pmap
""",
)
@row(Family.KERNEL, " ".join(OPAQUE_KERNELS))
def _opaque(equation: Equation) -> Iterator[Relation]:
    yield Relation(Kind.OPAQUE)


@row(Family.OTHER, "optimization_barrier", Padding())
@row(Family.OTHER, "device_put")
def _barrier(equation: Equation) -> Iterator[Relation]:
    for pair in zip(equation.inputs, equation.outputs, strict=True):
        yield from aligned(equation.shapes, pair)


@row(Family.CONTRACTION, "dot_general", Padding(fill=lambda _: 0))
def _dot_general(equation: Equation) -> Iterator[Relation]:
    contracted, batch = equation.params["dimension_numbers"]
    yield from _contracted(contracted)
    for dim, (lhs, rhs) in enumerate(zip(*batch, strict=True)):
        yield same((0, lhs), (1, rhs), (2, dim))
    yield from _free(equation, 2, len(batch[0]), ({*contracted[0], *batch[0]}, {*contracted[1], *batch[1]}))


def _contracted(pairs: Sequence[Sequence[int]]) -> Iterator[Relation]:
    for lhs, rhs in zip(*pairs, strict=True):
        yield Relation(Kind.CONTRACTED, ((0, lhs), (1, rhs)))


def _free(equation: Equation, out: int, first: int, used: Sequence[set[int]]) -> Iterator[Relation]:
    free = [(side, dim) for side, dims in enumerate(used) for dim in equation.others(side, dims)]
    yield from (same(dim, (out, first + index)) for index, dim in enumerate(free))


@row(Family.CONTRACTION, "ragged_dot_general")
def _ragged_dot_general(equation: Equation) -> Iterator[Relation]:
    numbers = equation.params["ragged_dot_dimension_numbers"]
    contracted, batch = numbers.dot_dimension_numbers
    groups = tuple(numbers.rhs_group_dimensions)
    ragged = numbers.lhs_ragged_dimensions
    (out,) = equation.outputs
    count = 2, len(equation.shapes[2]) - 1
    yield from _contracted(contracted)
    yield from (same((1, dim), count) for dim in groups)
    # Result dims: group dims if a ragged dim is contracted, then batch, lhs free, rhs free.
    first = int(any(dim in contracted[0] for dim in ragged))
    if first:
        yield same(count, (out, 0))
    for index, (lhs, rhs) in enumerate(zip(*batch, strict=True)):
        yield same((0, lhs), (1, rhs), (out, first + index))
    used = {*contracted[0], *batch[0]}, {*contracted[1], *batch[1], *groups}
    for relation in _free(equation, out, first + len(batch[0]), used):
        yield relation
        if relation.dims[0] in [(0, dim) for dim in ragged]:
            yield Relation(Kind.ALONG, relation.dims[1:])


@row(Family.CONTRACTION, "conv_general_dilated", Padding(fill=lambda _: 0))
def _convolution(equation: Equation) -> Iterator[Relation]:
    numbers = equation.params["dimension_numbers"]
    params = equation.params
    lhs_n, lhs_c, *lhs_space = numbers.lhs_spec
    rhs_o, rhs_i, *rhs_space = numbers.rhs_spec
    out_n, out_c, *out_space = numbers.out_spec
    groups = params["feature_group_count"]
    batch_groups = params["batch_group_count"]
    if batch_groups > 1:
        yield Relation(Kind.GROUPS, ((0, lhs_n), (1, rhs_o), (2, out_c)), factor=batch_groups)
    else:
        yield same((0, lhs_n), (2, out_n))
    if groups > 1:
        # Output channels of a group depend on its input channels only: both are group-major.
        yield Relation(Kind.GROUPS, ((0, lhs_c), (1, rhs_o), (2, out_c)), factor=groups)
    else:
        yield Relation(Kind.CONTRACTED, ((0, lhs_c), (1, rhs_i)))
        if batch_groups == 1:
            yield same((1, rhs_o), (2, out_c))
    windows = zip(lhs_space, rhs_space, out_space, params["window_strides"], strict=True)
    for in_dim, window_dim, out_dim, stride in windows:
        if equation.shapes[1][window_dim] == 1 and stride == 1:
            yield Relation(Kind.REORDERED, ((0, in_dim), (2, out_dim)))


@row(
    Family.REDUCTION,
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor",
    Padding(fill=neutral_element),
)
@row(Family.REDUCTION, "argmax argmin", Padding())
@row(Family.REDUCTION, "reduce")
def _reduce(equation: Equation) -> Iterator[Relation]:
    axes = equation.params.get("axes", equation.params.get("dimensions", ()))
    operands = equation.inputs[: len(equation.outputs)]
    outs = equation.outputs
    for dim in axes:
        yield Relation(Kind.CONTRACTED, tuple((operand, dim) for operand in operands))
    for out_dim, dim in enumerate(equation.others(0, axes)):
        yield same(*((operand, dim) for operand in operands), *((out, out_dim) for out in outs))


@row(
    Family.WINDOW,
    "reduce_window_sum reduce_window_max reduce_window_min reduce_window select_and_scatter_add select_and_gather_add",
)
def _reduce_window(equation: Equation) -> Iterator[Relation]:
    windows = equation.params["window_dimensions"]
    strides = equation.params["window_strides"]
    arrays = [array for array, shape in enumerate(equation.shapes) if len(shape) == len(windows)]
    for dim, (window, stride) in enumerate(zip(windows, strides, strict=True)):
        if window == stride == 1:
            yield same(*((array, dim) for array in arrays))


@row(Family.VIEW, "broadcast_in_dim", Padding(shape_of("shape")))
def _broadcast(equation: Equation) -> Iterator[Relation]:
    (out,) = equation.outputs
    operand_dims = dict(zip(equation.params["broadcast_dimensions"], itertools.count()))
    for dim, size in enumerate(equation.shapes[out]):
        operand_dim = operand_dims.get(dim)
        if operand_dim is None or equation.shapes[0][operand_dim] != size:
            yield Relation(Kind.REPEATED, ((out, dim),))
        else:
            yield same((0, operand_dim), (out, dim))


@row(Family.VIEW, "transpose", Padding())
def _transpose(equation: Equation) -> Iterator[Relation]:
    return (same((0, dim), (1, out_dim)) for out_dim, dim in enumerate(equation.params["permutation"]))


@row(Family.VIEW, "squeeze", Padding())
def _squeeze(equation: Equation) -> Iterator[Relation]:
    rank = len(equation.shapes[0])
    remaining = equation.others(0, {dim % rank for dim in equation.params["dimensions"]})
    return (same((0, dim), (1, out_dim)) for out_dim, dim in enumerate(remaining))


@row(Family.VIEW, "reshape", Padding(shape_of("new_sizes")))
def _reshape(equation: Equation) -> Iterator[Relation]:
    (out,) = equation.outputs
    for ins, outs in reshape_groups(equation.shapes[0], equation.shapes[out]):
        left = tuple((0, dim) for dim in ins)
        right = tuple((out, dim) for dim in outs)
        yield same(*left, *right) if len(left) == len(right) == 1 else Relation(Kind.FACTORS, left, right)


def reshape_groups(old: Shape, new: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the smallest runs of dims, from the left, with equal products; dims of size 1 are omitted."""
    ins = [dim for dim, size in enumerate(old) if size != 1]
    outs = [dim for dim, size in enumerate(new) if size != 1]
    if 0 in old or 0 in new:
        return
    while ins and outs:
        left = [ins.pop(0)]
        right = [outs.pop(0)]
        while (a := math.prod(old[d] for d in left)) != (b := math.prod(new[d] for d in right)):
            (left if a < b else right).append((ins if a < b else outs).pop(0))
        yield left, right


@row(Family.RESIZE, "concatenate", Padding())
def _concatenate(equation: Equation) -> Iterator[Relation]:
    return _along(equation, equation.params["dimension"], (*equation.outputs, *equation.inputs))


@row(Family.RESIZE, "split", Padding())
def _split(equation: Equation) -> Iterator[Relation]:
    return _along(equation, equation.params["axis"], (0, *equation.outputs))


def _along(equation: Equation, along: int, arrays: Sequence[int]) -> Iterator[Relation]:
    """Yields the relations of an array and of its parts along a dim."""
    for dim in range(len(equation.shapes[arrays[0]])):
        dims = tuple((array, dim) for array in arrays)
        if dim == along:
            ends = itertools.accumulate(equation.shapes[array][dim] for array in arrays[1:])
            yield Relation(Kind.PARTS, dims, starts=(0, *ends)[:-1])
        else:
            yield Relation(Kind.SAME, dims)


@row(Family.OTHER, "stack", Padding())
def _stack(equation: Equation) -> Iterator[Relation]:
    return _stacked(equation, equation.outputs[0], equation.inputs)


@row(Family.OTHER, "unstack", Padding())
def _unstack(equation: Equation) -> Iterator[Relation]:
    return _stacked(equation, 0, equation.outputs)


def _stacked(equation: Equation, stacked: int, arrays: Sequence[int]) -> Iterator[Relation]:
    axis = equation.params.get("axis", equation.params.get("dimension", 0)) % len(equation.shapes[stacked])
    for index, dim in enumerate(equation.others(stacked, {axis})):
        yield same((stacked, dim), *((array, index) for array in arrays))


@row(Family.REORDER, "tile rev")
def _reorder(equation: Equation) -> Iterator[Relation]:
    (out,) = equation.outputs
    moved = equation.params.get("dimensions", ())
    for dim, sizes in enumerate(zip(equation.shapes[0], equation.shapes[out], strict=False)):
        if sizes[0] == 1 < sizes[1]:
            yield Relation(Kind.REPEATED, ((out, dim),))
        else:
            is_same = dim not in moved and sizes[0] == sizes[1]
            yield Relation(Kind.SAME if is_same else Kind.REORDERED, ((0, dim), (out, dim)))


@row(Family.RESIZE, "slice", Padding(limits_of))
def _slice(equation: Equation) -> Iterator[Relation]:
    (out,) = equation.outputs
    strides = equation.params["strides"] or (1,) * len(equation.shapes[0])
    for dim, stride in enumerate(strides):
        if equation.shapes[0][dim] == equation.shapes[out][dim]:
            yield same((0, dim), (out, dim))
        elif stride == 1:
            yield Relation(Kind.PARTS, ((0, dim), (out, dim)), starts=(equation.params["start_indices"][dim],))


@row(Family.RESIZE, "pad", Padding())
def _pad(equation: Equation) -> Iterator[Relation]:
    (out,) = equation.outputs
    for dim, (low, high, interior) in enumerate(equation.params["padding_config"]):
        if low == high == interior == 0:
            yield same((0, dim), (out, dim))
        elif interior == 0 and low >= 0 and high >= 0:
            yield Relation(Kind.PARTS, ((out, dim), (0, dim)), starts=(int(low),))


@row(Family.DYNAMIC_SLICE, "dynamic_slice", Padding(slice_sizes_of))
def _dynamic_slice(equation: Equation) -> Iterator[Relation]:
    (out,) = equation.outputs
    for dim, (size, out_size) in enumerate(zip(equation.shapes[0], equation.shapes[out], strict=True)):
        yield Relation(Kind.SAME if size == out_size else Kind.SELECTED, ((0, dim), (out, dim)))


@row(Family.DYNAMIC_UPDATE, "dynamic_update_slice", Padding())
def _dynamic_update_slice(equation: Equation) -> Iterator[Relation]:
    (out,) = equation.outputs
    for dim, (size, num_written) in enumerate(zip(*equation.shapes[:2], strict=True)):
        if size == num_written:
            yield same((0, dim), (1, dim), (out, dim))
        else:
            yield Relation(Kind.REORDERED, ((0, dim), (out, dim)))


@row(Family.CUMULATIVE, "cumsum cumprod cummax cummin cumlogsumexp sort", Padding())
def _cumulative(equation: Equation) -> Iterator[Relation]:
    yield from aligned(equation.shapes, tuple(range(len(equation.shapes))))
    axis = equation.params["axis"] if "axis" in equation.params else equation.params["dimension"]
    yield from (Relation(Kind.ALONG, ((out, axis),)) for out in equation.outputs)


@row(Family.KERNEL, "top_k approx_top_k", Padding())
def _top_k(equation: Equation) -> Iterator[Relation]:
    rank = len(equation.shapes[0])
    outs = equation.outputs
    along = equation.params.get("axis", equation.params.get("reduction_dimension", rank - 1)) % rank
    yield from (same(*((array, dim) for array in (0, *outs))) for dim in equation.others(0, {along}))
    yield from (Relation(Kind.NEW, ((out, along),)) for out in outs)


DECOMPOSITIONS = """
cholesky eig eigh lu qr householder_product geqrf geqp3 ormqr schur svd tridiagonal tridiagonal_solve cholesky_update
hessenberg symmetric_product
"""
"""Linear algebra that JAX does not compute in bfloat16 or float16."""


@row(Family.KERNEL, f"{DECOMPOSITIONS} lu_pivots_to_permutation triangular_solve")
def _linear_algebra(equation: Equation) -> Iterator[Relation]:
    """Matrix dims stay replicated; leading dims are independent problems."""
    return _problems(equation, 2)


@row(Family.KERNEL, "fft")
def _fft(equation: Equation) -> Iterator[Relation]:
    yield Relation(Kind.OPAQUE)
    yield from _problems(equation, len(equation.params["fft_lengths"]))


def _problems(equation: Equation, inner_rank: int) -> Iterator[Relation]:
    for dim in range(len(equation.shapes[0]) - inner_rank):
        yield same(*((array, dim) for array, shape in enumerate(equation.shapes) if dim < len(shape)))


@row(Family.GATHER, "gather", Padding(slice_sizes_of))
def _gather(equation: Equation) -> Iterator[Relation]:
    numbers = equation.params["dimension_numbers"]
    operand, indices, *_ = equation.shapes
    (out,) = equation.outputs
    sizes = equation.params["slice_sizes"]
    batching = _batching(numbers, numbers.start_indices_batching_dims)
    windows = equation.others(0, {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims})
    for dim, out_dim in zip(windows, numbers.offset_dims, strict=True):
        if sizes[dim] == operand[dim]:
            yield same((0, dim), (out, out_dim))
    rows = equation.others(out, numbers.offset_dims)
    for dim, out_dim in zip(range(len(indices) - 1), rows, strict=True):
        yield same(*batching.get(dim, ()), (1, dim), (out, out_dim))
    for dim in numbers.start_index_map if len(indices) == 2 else ():
        if sizes[dim] == 1 and operand[dim] == indices[0]:  # one index per row: a permutation
            yield Relation(Kind.SELECTED, ((0, dim), (1, 0)))


@row(Family.SCATTER_ADD, "scatter-add scatter_add", Padding())
@row(
    Family.SCATTER,
    "scatter scatter-mul scatter-min scatter-max scatter-sub scatter_mul scatter_min scatter_max scatter_sub",
    Padding(),
)
def _scatter(equation: Equation) -> Iterator[Relation]:
    numbers = equation.params["dimension_numbers"]
    operand, indices, updates, *_ = equation.shapes
    (out,) = equation.outputs
    batching = _batching(numbers, numbers.scatter_indices_batching_dims)
    windows = equation.others(0, {*numbers.inserted_window_dims, *numbers.operand_batching_dims})
    columns = dict(zip(windows, numbers.update_window_dims, strict=True))
    for dim, size in enumerate(operand):
        if dim in columns and updates[columns[dim]] == size:
            yield same((0, dim), (2, columns[dim]), (out, dim))
        elif dim not in numbers.operand_batching_dims:
            yield Relation(Kind.REORDERED, ((0, dim), (out, dim)))
    rows = equation.others(2, numbers.update_window_dims)
    for dim, update_dim in zip(range(len(indices) - 1), rows, strict=True):
        operands = batching.get(dim, ())
        yield same(*operands, (1, dim), (2, update_dim), *((out, operand_dim) for _, operand_dim in operands))


def _batching(numbers: object, index_dims: Sequence[int]) -> dict[int, tuple[Dim]]:
    """Returns the operand's dim of each dim of the indices that is batched with it."""
    return {index: ((0, dim),) for index, dim in zip(index_dims, numbers.operand_batching_dims, strict=True)}  # type: ignore[attr-defined]
