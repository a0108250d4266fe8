"""Rules that join the dims of operands and results that are sharded together. Users can register rules.

A rule takes an operation and joins dims. A dim that no rule joins stays replicated, which is always correct. A
primitive without a rule joins nothing and is counted; discovery reports it.
"""

import math
from collections.abc import Callable, Iterable, Iterator

from spanax.trace.axes.discover import Dims
from spanax.trace.jaxpr.graph import Graph, Op

Rule = Callable[[Op, Dims], None]

RULES: dict[str, Rule] = {}

ELEMENTWISE = frozenset(
    """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil clamp
clz complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor
ge gt igamma igamma_grad_a igammac imag integer_pow is_finite layout_constraint le le_to lgamma log log1p log2
logistic lt lt_to max min mul mulhi name ne neg nextafter not one_minus_square or pin polygamma polynomial
population_count pow pvary random_clone random_gamma_grad real reciprocal reduce_precision regularized_incomplete_beta
rem reshard round rsqrt select_n shard_alike sharding_constraint shift_left shift_right_arithmetic shift_right_logical
sign sin sinh sqrt square stochastic_round stop_gradient sub tan tanh unpin with_memory_space_constraint
xla_metadata_value xor zeros_like zeta
""".split()
)

FRESH = """
axis_index create_token empty empty2 eye iota iota_2x32_shape philox2x32 philox4x32 platform_index random_bits
random_fold_in random_gamma random_seed random_split random_unwrap random_wrap rng_bit_generator rng_uniform
threefry2x32 threefry4x32
""".split()

OPAQUE = """
buffer_callback call_exported custom_call custom_lin custom_partitioning debug_callback debug_print ffi_call fft
io_callback mosaic_gpu pallas_call pure_callback shard_map tpu_custom_call triton_kernel_call xla_pmap
""".split()


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for primitives, which replaces an earlier rule for the same name.

    Args:
      names: the primitives, as a jaxpr prints them.

    Example:
      >>> @rule("my_scale")                              # a custom primitive: y = scale(x), elementwise
      ... def my_scale(op, dims):
      ...     dims.same(*op.inputs, *op.outputs)
      >>> "my_scale" in RULES
      True
    """

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def apply(op: Op, dims: Dims) -> None:
    """Joins the dims that must be sharded together because of one operation."""
    dim_rule = RULES.get(op.name)
    if dim_rule is None:
        dims.unknown[op.name] += 1
    else:
        dim_rule(op, dims)


@rule(*ELEMENTWISE)
def _elementwise(op: Op, dims: Dims) -> None:
    dims.same(*op.inputs, *op.outputs)


@rule(*FRESH)
def _fresh(op: Op, dims: Dims) -> None:
    """Joins nothing: consumers determine how values created from no operand or a key are sharded."""


@rule(*OPAQUE)
def _opaque(op: Op, dims: Dims) -> None:
    dims.opaque[op.name] += 1
    if op.name == "fft":
        (x,), (out,) = op.inputs, op.outputs
        for dim in independent_dims(dims.graph, op, out):
            dims.join(x, dim, out, dim)


@rule("optimization_barrier", "device_put")
def _barrier(op: Op, dims: Dims) -> None:
    for x, out in zip(op.inputs, op.outputs, strict=True):
        dims.same(x, out)


@rule("dot_general")
def _dot_general(op: Op, dims: Dims) -> None:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = op.params["dimension_numbers"]
    (lhs, rhs), (out,) = op.inputs[:2], op.outputs
    for a, b in zip(lhs_contract, rhs_contract, strict=True):
        dims.join(lhs, a, rhs, b)
    for out_dim, (a, b) in enumerate(zip(lhs_batch, rhs_batch, strict=True)):
        dims.join(lhs, a, rhs, b)
        dims.join(lhs, a, out, out_dim)
    out_dim = len(lhs_batch)
    for value, used_dims in ((lhs, {*lhs_contract, *lhs_batch}), (rhs, {*rhs_contract, *rhs_batch})):
        for dim in _others(dims, value, used_dims):
            dims.join(value, dim, out, out_dim)
            out_dim += 1


@rule("ragged_dot_general")
def _ragged_dot_general(op: Op, dims: Dims) -> None:
    numbers = op.params["ragged_dot_dimension_numbers"]
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
    lhs, rhs, group_sizes = op.inputs[:3]
    out = op.outputs[0]
    for a, b in (*zip(lhs_contract, rhs_contract, strict=True), *zip(lhs_batch, rhs_batch, strict=True)):
        dims.join(lhs, a, rhs, b)
    groups = tuple(numbers.rhs_group_dimensions)
    for dim in groups:
        dims.join(rhs, dim, group_sizes, len(dims.shape(group_sizes)) - 1)
    # Result dims: group dims if a ragged dim is contracted, then batch, lhs free, rhs free.
    ragged_contracted = any(dim in lhs_contract for dim in numbers.lhs_ragged_dimensions)
    out_dim = 1 if ragged_contracted else 0
    if ragged_contracted:
        dims.join(group_sizes, len(dims.shape(group_sizes)) - 1, out, 0)
    for a in lhs_batch:
        dims.join(lhs, a, out, out_dim)
        out_dim += 1
    for dim in _others(dims, lhs, {*lhs_contract, *lhs_batch}):
        if dim in numbers.lhs_ragged_dimensions:
            dims.keep_whole(out, out_dim)
        dims.join(lhs, dim, out, out_dim)
        out_dim += 1
    for dim in _others(dims, rhs, {*rhs_contract, *rhs_batch, *groups}):
        dims.join(rhs, dim, out, out_dim)
        out_dim += 1


@rule("conv_general_dilated")
def _convolution(op: Op, dims: Dims) -> None:
    numbers, (lhs, rhs), (out,) = op.params["dimension_numbers"], op.inputs, op.outputs
    (lhs_n, lhs_c, *lhs_space), (rhs_o, rhs_i, *rhs_space) = numbers.lhs_spec, numbers.rhs_spec
    out_n, out_c, *out_space = numbers.out_spec
    groups, batch_groups = op.params["feature_group_count"], op.params["batch_group_count"]
    dims.join(rhs, rhs_o, out, out_c)
    if groups > 1:
        # Output channels of a group depend on its input channels only: both are group-major.
        dims.join(lhs, lhs_c, out, out_c, factor=groups)
    else:
        dims.join(lhs, lhs_c, rhs, rhs_i)
    if batch_groups > 1:
        dims.join(lhs, lhs_n, out, out_c, factor=batch_groups)
    else:
        dims.join(lhs, lhs_n, out, out_n)
    windows = zip(lhs_space, rhs_space, out_space, op.params["window_strides"], strict=True)
    for in_dim, window_dim, out_dim, stride in windows:
        if dims.shape(rhs)[window_dim] == 1 and stride == 1:
            dims.join(lhs, in_dim, out, out_dim)


@rule("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "reduce",
      "argmax", "argmin")  # fmt: skip
def _reduce(op: Op, dims: Dims) -> None:
    axes = set(op.params.get("axes", op.params.get("dimensions", ())))
    operands = op.inputs[: len(op.outputs)]
    dims.same(*operands)
    for out in op.outputs:
        for out_dim, dim in enumerate(_others(dims, operands[0], axes)):
            dims.join(operands[0], dim, out, out_dim)


@rule("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window", "select_and_scatter_add",
      "select_and_gather_add")  # fmt: skip
def _reduce_window(op: Op, dims: Dims) -> None:
    windows, strides = op.params["window_dimensions"], op.params["window_strides"]
    values = [value for value in (*op.inputs, *op.outputs) if len(dims.shape(value)) == len(windows)]
    for dim, (window, stride) in enumerate(zip(windows, strides, strict=True)):
        for value in values[1:] if window == stride == 1 else ():
            dims.join(values[0], dim, value, dim)


@rule("broadcast_in_dim")
def _broadcast(op: Op, dims: Dims) -> None:
    for dim, out_dim in enumerate(op.params["broadcast_dimensions"]):
        dims.join(op.inputs[0], dim, op.outputs[0], out_dim)


@rule("transpose")
def _transpose(op: Op, dims: Dims) -> None:
    for out_dim, dim in enumerate(op.params["permutation"]):
        dims.join(op.inputs[0], dim, op.outputs[0], out_dim)


@rule("squeeze")
def _squeeze(op: Op, dims: Dims) -> None:
    rank = len(dims.shape(op.inputs[0]))
    for out_dim, dim in enumerate(_others(dims, op.inputs[0], {dim % rank for dim in op.params["dimensions"]})):
        dims.join(op.inputs[0], dim, op.outputs[0], out_dim)


@rule("reshape")
def _reshape(op: Op, dims: Dims) -> None:
    x, out = op.inputs[0], op.outputs[0]
    for in_dims, out_dims in reshape_groups(dims.shape(x), dims.shape(out)):
        dims.merged((x, in_dims), (out, out_dims))


def reshape_groups(old: tuple[int, ...], new: tuple[int, ...]) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the smallest runs of dims, from the left, with equal products; dims of size 1 are omitted."""
    ins = [dim for dim, size in enumerate(old) if size != 1]
    outs = [dim for dim, size in enumerate(new) if size != 1]
    if 0 in old or 0 in new:
        return
    while ins and outs:
        left, right = [ins.pop(0)], [outs.pop(0)]
        while (a := math.prod(old[d] for d in left)) != (b := math.prod(new[d] for d in right)):
            (left if a < b else right).append((ins if a < b else outs).pop(0))
        yield left, right


@rule("concatenate")
def _concatenate(op: Op, dims: Dims) -> None:
    along, out = op.params["dimension"], op.outputs[0]
    for x in op.inputs:
        for dim in _others(dims, out, {along}):
            dims.join(x, dim, out, dim)
    dims.pieces((out, along), [(x, along) for x in op.inputs])


@rule("split")
def _split(op: Op, dims: Dims) -> None:
    along, x = op.params["axis"], op.inputs[0]
    for out in op.outputs:
        for dim in _others(dims, x, {along}):
            dims.join(x, dim, out, dim)
    dims.pieces((x, along), [(out, along) for out in op.outputs])


@rule("stack")
def _stack(op: Op, dims: Dims) -> None:
    out = op.outputs[0]
    along = op.params.get("axis", op.params.get("dimension", 0)) % len(dims.shape(out))
    for x in op.inputs:
        for in_dim, dim in enumerate(_others(dims, out, {along})):
            dims.join(x, in_dim, out, dim)


@rule("unstack")
def _unstack(op: Op, dims: Dims) -> None:
    x = op.inputs[0]
    along = op.params.get("axis", op.params.get("dimension", 0)) % len(dims.shape(x))
    for out in op.outputs:
        for out_dim, dim in enumerate(_others(dims, x, {along})):
            dims.join(x, dim, out, out_dim)


@rule("tile", "rev")
def _same_size_dims(op: Op, dims: Dims) -> None:
    x, out = op.inputs[0], op.outputs[0]
    for dim in range(min(len(dims.shape(x)), len(dims.shape(out)))):
        dims.join(x, dim, out, dim)


@rule("slice")
def _slice(op: Op, dims: Dims) -> None:
    x, out = op.inputs[0], op.outputs[0]
    strides = op.params["strides"] or (1,) * len(dims.shape(x))
    for dim, stride in enumerate(strides):
        if dims.shape(x)[dim] == dims.shape(out)[dim]:
            dims.join(x, dim, out, dim)
        elif stride == 1:
            dims.pieces((x, dim), [(out, dim)])


@rule("pad")
def _pad(op: Op, dims: Dims) -> None:
    x, out = op.inputs[0], op.outputs[0]
    for dim, (low, high, interior) in enumerate(op.params["padding_config"]):
        if low == high == interior == 0:
            dims.join(x, dim, out, dim)
        elif interior == 0 and low >= 0 and high >= 0:
            dims.pieces((out, dim), [(x, dim)])


@rule("dynamic_slice")
def _dynamic_slice(op: Op, dims: Dims) -> None:
    x, out = op.inputs[0], op.outputs[0]
    for dim in range(len(dims.shape(x))):
        if dims.size(x, dim) == dims.size(out, dim):
            dims.join(x, dim, out, dim)
        else:
            dims.drawn((x, dim), (out, dim))


@rule("dynamic_update_slice")
def _dynamic_update_slice(op: Op, dims: Dims) -> None:
    operand, update, out = op.inputs[0], op.inputs[1], op.outputs[0]
    dims.same(operand, out)
    for dim in range(len(dims.shape(operand))):
        dims.join(operand, dim, update, dim)


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _cumulative(op: Op, dims: Dims) -> None:
    dims.same(op.inputs[0], op.outputs[0])
    dims.keep_whole(op.outputs[0], op.params["axis"])


@rule("sort")
def _sort(op: Op, dims: Dims) -> None:
    dims.same(*op.inputs, *op.outputs)
    for out in op.outputs:
        dims.keep_whole(out, op.params["dimension"])


@rule("top_k", "approx_top_k")
def _top_k(op: Op, dims: Dims) -> None:
    x = op.inputs[0]
    for out in op.outputs:
        for dim in independent_dims(dims.graph, op, out):
            dims.join(x, dim, out, dim)


@rule("cholesky", "eig", "eigh", "lu", "lu_pivots_to_permutation", "qr", "householder_product", "geqrf", "geqp3",
      "ormqr", "schur", "svd", "triangular_solve", "tridiagonal", "tridiagonal_solve", "cholesky_update",
      "hessenberg", "symmetric_product")  # fmt: skip
def _linear_algebra(op: Op, dims: Dims) -> None:
    """Matrix dims stay replicated; leading dims are independent problems."""
    x = op.inputs[0]
    for value in (*op.inputs[1:], *op.outputs):
        for dim in independent_dims(dims.graph, op, value):
            dims.join(x, dim, value, dim)


def independent_dims(graph: Graph, op: Op, value: int) -> Iterable[int]:
    """Returns the dims of an operand or result along which a decomposition, top-k or FFT is independent per row."""
    rank, shape = len(graph.shape(op.inputs[0])), graph.shape(value)
    if op.name in ("top_k", "approx_top_k"):
        along = op.params.get("axis", op.params.get("reduction_dimension", rank - 1)) % rank
        return [dim for dim in range(len(shape)) if dim != along]
    inner_rank = len(op.params["fft_lengths"]) if op.name == "fft" else 2
    return range(min(rank - inner_rank, len(shape)))


@rule("gather")
def _gather(op: Op, dims: Dims) -> None:
    numbers, (operand, indices), (out,) = op.params["dimension_numbers"], op.inputs[:2], op.outputs
    sizes, window = op.params["slice_sizes"], iter(numbers.offset_dims)
    for dim in _others(dims, operand, {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}):
        out_dim = next(window)
        if sizes[dim] == dims.shape(operand)[dim]:
            dims.join(operand, dim, out, out_dim)
    lookup_dims = _others(dims, out, set(numbers.offset_dims))
    for dim, out_dim in zip(range(len(dims.shape(indices)) - 1), lookup_dims, strict=True):
        dims.join(indices, dim, out, out_dim)
    for dim in numbers.start_index_map if len(dims.shape(indices)) == 2 else ():
        if sizes[dim] == 1 and dims.size(operand, dim) == dims.size(indices, 0):  # one index per row: a permutation
            dims.drawn((operand, dim), (indices, 0))
    batching = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    for operand_dim, index_dim in batching:
        dims.join(operand, operand_dim, indices, index_dim)


@rule("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "scatter_add", "scatter_mul",
      "scatter_min", "scatter_max", "scatter_sub", "scatter-sub")  # fmt: skip
def _scatter(op: Op, dims: Dims) -> None:
    numbers, (operand, indices, updates), (out,) = op.params["dimension_numbers"], op.inputs[:3], op.outputs
    dims.same(operand, out)
    window = iter(numbers.update_window_dims)
    for dim in _others(dims, operand, {*numbers.inserted_window_dims, *numbers.operand_batching_dims}):
        dims.join(operand, dim, updates, next(window))
    scatter_dims = _others(dims, updates, set(numbers.update_window_dims))
    for dim, update_dim in zip(range(len(dims.shape(indices)) - 1), scatter_dims, strict=True):
        dims.join(indices, dim, updates, update_dim)
    batching = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    for operand_dim, index_dim in batching:
        dims.join(operand, operand_dim, indices, index_dim)


@rule("remat2", "checkpoint", "cond", "while", "scan")
def _bodies(op: Op, dims: Dims) -> None:
    """Joins dims across a body's boundary and its carry; a scanned value has an extra leading dim outside."""
    wires = dims.graph.wires(op)
    scanned = []
    for outer, inner in (*wires.inputs, *wires.outputs):
        extra = len(dims.shape(outer)) - len(dims.shape(inner))
        scanned += [outer] * extra
        for dim in range(len(dims.shape(inner))):
            dims.join(outer, dim + extra, inner, dim)
    for outer in scanned[1:]:
        dims.join(scanned[0], 0, outer, 0)
    for first, last in wires.carried:
        dims.same(first, last)


def _others(dims: Dims, value: int, used_dims: set[int]) -> list[int]:
    return [dim for dim in range(len(dims.shape(value))) if dim not in used_dims]
