"""Partition: what one operation moves, case by case as Megatron, ZeRO and GSPMD have it.

Mesh axes are bits: DATA splits the batch, MODEL splits heads, mlp or vocabulary, FSDP stores.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax

from programs import array, graph_of
from spanax.plan.sharding.partition import Masks, PartitionedOp, Reshard, as_masks, spmd_partition, transition, union

DATA, MODEL, FSDP = 1, 2, 4

Moves = list[tuple[str, str, int, int]]
"""Kind, whose (x, w or out), over, kept."""


def divided(
    function: Any, shapes: Sequence[Any], ins: Sequence[Masks], out: Masks, labels: Sequence[Any] = ()
) -> tuple[Moves, PartitionedOp]:
    """What the last operation of a function moves; `labels` are those of its operands, then of its result."""
    graph = graph_of(function, *shapes)
    op = graph.body.ops[-1]
    names = dict(zip((*op.inputs, *op.outputs), ["x", "w", "u"][: len(op.inputs)] + ["out"], strict=True))
    classes: list[tuple[int | None, ...]] = [(None,) * len(graph.shape(value)) for value in range(len(graph.avals))]
    for value, arguments in zip((*op.inputs, *op.outputs), labels, strict=bool(labels)):
        classes[value] = arguments
    split = spmd_partition(graph, classes, op, ins, [out])
    assert all(shift.is_operand == (names[shift.value] != "out") for shift in split.shifts)
    return [(shift.kind, names[shift.value], shift.over, shift.unchanged) for shift in split.shifts], split


def einsum(spec: str, x: Masks, w: Masks, out: Masks, sizes: str = "") -> tuple[Moves, PartitionedOp]:
    """A matmul under splits; dims have size 8, those in `sizes` 64."""
    left, right = spec.partition("->")[0].split(",")
    shapes = [tuple(64 if dim in sizes else 8 for dim in dims) for dims in (left, right)]
    return divided(lambda a, b: jnp.einsum(spec, a, b), shapes, [x, w], out)


# Matmuls


def test_column_parallel_moves_nothing() -> None:
    moves, split = einsum("bd,df->bf", (DATA, 0), (0, MODEL), (DATA, MODEL))
    assert moves == []
    assert split.work == DATA | MODEL and split.result == (DATA, MODEL)


def test_row_parallel_is_an_all_reduce() -> None:
    moves, split = einsum("bf,fd->bd", (DATA, MODEL), (MODEL, 0), (DATA, 0))
    assert moves == [("all-reduce", "out", MODEL, DATA)]
    assert split.work == DATA | MODEL and split.result == (DATA, 0)


def test_row_parallel_into_a_sharded_sequence_is_a_reduce_scatter() -> None:
    moves, _ = einsum("btf,fd->btd", (DATA, 0, MODEL), (MODEL, 0), (DATA, MODEL, 0))
    assert moves == [("reduce-scatter", "out", MODEL, DATA)]


def test_column_parallel_gathers_a_sharded_sequence_before() -> None:
    moves, split = einsum("btd,df->btf", (DATA, MODEL, 0), (0, MODEL), (DATA, 0, MODEL))
    assert moves == [("all-gather", "x", MODEL, DATA)]
    assert split.operands[0] == (DATA, 0, 0) and split.work == DATA | MODEL


@pytest.mark.parametrize("stored", [(FSDP, 0), (0, FSDP)])
def test_a_stored_weight_is_gathered_if_the_batch_is_sharded_over_the_same_axis(stored: Masks) -> None:
    moves, split = einsum("bd,df->bf", (FSDP, 0), stored, (FSDP, 0))
    assert moves == [("all-gather", "w", FSDP, 0)]
    assert split.operands == ((FSDP, 0), (0, 0)) and split.work == FSDP


def test_a_stored_weight_is_gathered_within_its_model_part() -> None:
    moves, _ = einsum("bd,df->bf", (FSDP, 0), (FSDP, MODEL), (FSDP, MODEL))
    assert moves == [("all-gather", "w", FSDP, MODEL)]


def test_gathers_of_one_operand_over_two_axes_are_one() -> None:
    moves, _ = einsum("bd,df->bf", (DATA | FSDP, 0), (FSDP, DATA), (DATA | FSDP, 0))
    assert moves == [("all-gather", "w", DATA | FSDP, 0)]


def test_a_weight_gradient_is_summed_over_the_batch() -> None:
    assert einsum("bd,bf->df", (DATA, 0), (DATA, 0), (0, 0))[0] == [("all-reduce", "out", DATA, 0)]
    assert einsum("bd,bf->df", (FSDP, 0), (FSDP, 0), (0, FSDP))[0] == [("reduce-scatter", "out", FSDP, 0)]
    moves, split = einsum("bd,bf->df", (DATA | FSDP, 0), (DATA | FSDP, MODEL), (FSDP, MODEL))
    assert moves == [("reduce-scatter", "out", FSDP, MODEL), ("all-reduce", "out", DATA, MODEL | FSDP)]
    assert split.work == DATA | FSDP | MODEL


def test_batch_dims_remain_sharded() -> None:
    moves, split = einsum("bhtk,bhsk->bhts", (DATA, MODEL, 0, 0), (DATA, MODEL, 0, 0), (DATA, MODEL, 0, 0))
    assert moves == [] and split.work == DATA | MODEL
    moves, split = einsum("bhts,bhsk->bhtk", (DATA, MODEL, 0, 0), (DATA, MODEL, 0, 0), (DATA, MODEL, 0, 0))
    assert moves == [] and split.result == (DATA, MODEL, 0, 0)


def test_values_sharded_along_a_batch_dim_are_exchanged_after_a_matmul() -> None:
    """Tokens that are sent to experts: combined locally, and then sent."""
    moves, split = einsum("bte,btd->bed", (DATA, 0, 0), (DATA, 0, 0), (0, DATA, 0))
    assert moves == [("all-to-all", "out", DATA, 0)]
    assert split.work == DATA and split.result == (DATA, 0, 0)


@pytest.mark.parametrize(("spec", "out"), [("bte,ebd->btd", (DATA, 0, 0)), ("btd,ebd->bte", (DATA, 0, 0))])
def test_values_with_another_sharding_are_exchanged_before_a_batched_matmul(spec: str, out: Masks) -> None:
    """Tokens that return from experts: sent, and then combined; also in the gradient of the slots."""
    moves, split = einsum(spec, (DATA, 0, 0), (DATA, 0, 0), out)
    assert moves == [("all-to-all", "w", DATA, 0)]
    assert split.operands == ((DATA, 0, 0), (0, DATA, 0)) and split.work == DATA


def test_an_operand_replicated_along_a_batch_dim_is_sliced() -> None:
    moves, split = einsum("bij,bjk->bik", (DATA, 0, 0), (0, 0, 0), (DATA, 0, 0))
    assert moves == [] and split.work == DATA


def test_a_contraction_sharded_in_one_operand_slices_the_other() -> None:
    moves, split = einsum("bf,fd->bd", (0, MODEL), (0, 0), (0, 0))
    assert moves == [("all-reduce", "out", MODEL, 0)]
    assert split.operands == ((0, MODEL), (MODEL, 0)) and split.work == MODEL


def test_keys_and_values_of_a_sharded_sequence_are_gathered() -> None:
    """Context parallel attention: the queries' positions stay, the keys' are needed everywhere."""
    moves, split = einsum("btk,bsk->bts", (0, MODEL, 0), (0, MODEL, 0), (0, MODEL, 0))
    assert moves == [("all-gather", "w", MODEL, 0)] and split.work == MODEL
    moves, split = einsum("bts,bsk->btk", (0, MODEL, 0), (0, MODEL, 0), (0, MODEL, 0))
    assert moves == [("all-gather", "w", MODEL, 0)] and split.work == MODEL


def test_an_axis_that_splits_a_sum_here_and_a_free_dim_there_gathers_one_of_them() -> None:
    moves, _ = einsum("bf,fd->bd", (DATA, MODEL), (0, MODEL), (DATA, MODEL))
    assert moves == [("all-gather", "x", MODEL, DATA)]
    moves, split = einsum("bf,fd->bd", (DATA, MODEL), (0, MODEL), (DATA, 0))
    assert moves == [("all-gather", "w", MODEL, 0), ("all-reduce", "out", MODEL, DATA)]
    assert split.operands[1] == (MODEL, 0)


def test_a_result_sharded_along_a_replicated_dim_is_computed_sharded() -> None:
    moves, split = einsum("bd,df->bf", (0, 0), (0, 0), (0, MODEL))
    assert moves == [] and split.work == MODEL and split.result == (0, MODEL)


def test_a_replicated_result_gathers_the_smaller_value() -> None:
    # The operand (8 x 8) is smaller than the result (8 x 64), and the other way round.
    assert einsum("bd,df->bf", (0, 0), (0, MODEL), (0, 0), sizes="b")[0] == [("all-gather", "w", MODEL, 0)]
    assert einsum("bd,df->bf", (0, 0), (0, MODEL), (0, 0), sizes="d")[0] == [("all-gather", "out", MODEL, 0)]


def test_a_convolution_is_sharded_by_batch_and_channels() -> None:
    def convolve(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def of(x: Masks, w: Masks, out: Masks) -> Moves:
        return divided(convolve, [(8, 4, 4, 8), (3, 3, 8, 16)], [x, w], out)[0]

    assert of((DATA, 0, 0, 0), (0, 0, 0, MODEL), (DATA, 0, 0, MODEL)) == []
    assert of((DATA, 0, 0, MODEL), (0, 0, MODEL, 0), (DATA, 0, 0, 0)) == [("all-reduce", "out", MODEL, DATA)]
    assert of((FSDP, 0, 0, 0), (0, 0, FSDP, 0), (FSDP, 0, 0, 0)) == [("all-gather", "w", FSDP, 0)]
    # Windows are not sharded: operands that are sharded along one are gathered.
    assert of((0, MODEL, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0)) == [("all-gather", "x", MODEL, 0)]


# All else

B, T, V, D, F = range(5)


def test_elementwise_follows_its_operands() -> None:
    labels = [(B, D), (B, D), (B, D)]
    moves, split = divided(jnp.add, [(8, 8), (8, 8)], [(DATA, 0), (DATA, 0)], (DATA, 0), labels)
    assert moves == [] and split.work == DATA
    moves, split = divided(jnp.add, [(8, 8), (8, 8)], [(DATA, 0), (0, 0)], (DATA, 0), labels)
    assert moves == [] and split.result == (DATA, 0)
    moves, _ = divided(jnp.add, [(8, 8), (8, 8)], [(MODEL, 0), (0, MODEL)], (0, MODEL), labels)
    assert moves == [("all-gather", "x", MODEL, 0)]


@pytest.mark.parametrize(
    ("out", "expected"),
    [((0,), [("all-reduce", "out", DATA, 0)]), ((DATA,), [("reduce-scatter", "out", DATA, 0)])],
)
def test_a_reduction_over_a_sharded_dim_is_partial(out: Masks, expected: Moves) -> None:
    assert divided(lambda x: x.sum(0), [(8, 8)], [(DATA, 0)], out, [(B, D), (D,)])[0] == expected


def test_a_reduction_over_another_dim_moves_nothing() -> None:
    assert divided(lambda x: x.sum(1), [(8, 8)], [(DATA, 0)], (DATA,), [(B, D), (B,)])[0] == []


def test_operations_along_a_sharded_dim_gather_it() -> None:
    moves, _ = divided(lambda x: x[:, 1:5], [(8, 8)], [(DATA, MODEL)], (DATA, 0), [(B, T), (B, None)])
    assert moves == [("all-gather", "x", MODEL, DATA)]


def look_up(table: Any, rows: Any) -> Any:
    return lax.gather(
        table,
        rows,
        lax.GatherDimensionNumbers(offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0,)),
        slice_sizes=(1, 8),
        mode="clip",
    )


LOOK_UP = [(V, D), (B, T, None), (B, T, D)]


@pytest.mark.parametrize(
    ("table", "out", "expected"),
    [
        ((0, 0), (DATA, 0, 0), []),
        # Each device answers for the rows it has, with zeros for the others.
        ((MODEL, 0), (DATA, 0, 0), [("all-reduce", "out", MODEL, DATA)]),
        ((MODEL, 0), (DATA, MODEL, 0), [("reduce-scatter", "out", MODEL, DATA)]),
        ((0, MODEL), (DATA, 0, MODEL), []),
        ((0, MODEL), (DATA, 0, 0), [("all-gather", "out", MODEL, DATA)]),
    ],
)
def test_a_lookup(table: Masks, out: Masks, expected: Moves) -> None:
    shapes = [(16, 8), array(8, 4, 1, dtype="int32")]
    assert divided(look_up, shapes, [table, (DATA, 0, 0)], out, LOOK_UP)[0] == expected


def add_up(table: Any, rows: Any, updates: Any) -> Any:
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(2,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
    )
    return lax.scatter_add(table, rows, updates, numbers, mode="clip")


@pytest.mark.parametrize(
    ("table", "updates", "out", "expected"),
    [
        # The gradient of a lookup: every device has rows of its own, and adds to zeros of its own.
        ((0, 0), (DATA, 0, 0), (0, 0), [("all-reduce", "out", DATA, 0)]),
        ((0, DATA), (DATA, 0, 0), (0, DATA), [("reduce-scatter", "out", DATA, 0)]),
        ((DATA, 0), (DATA, 0, 0), (DATA, 0), [("reduce-scatter", "out", DATA, 0)]),
        ((0, MODEL), (DATA, 0, MODEL), (0, MODEL), [("all-reduce", "out", DATA, MODEL)]),
        ((0, 0), (0, 0, 0), (0, 0), []),
    ],
)
def test_a_scatter_of_batch_rows(table: Masks, updates: Masks, out: Masks, expected: Moves) -> None:
    shapes = [(16, 8), array(8, 4, 1, dtype="int32"), (8, 4, 8)]
    labels = [(V, D), (B, T, None), (B, T, D), (V, D)]
    moves, _ = divided(add_up, shapes, [table, (updates[0], 0, 0), updates], out, labels)
    assert moves == expected


# Transitions


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((DATA, 0), (DATA, 0), []),
        ((0, 0), (DATA, MODEL), []),
        ((DATA, 0), (DATA, MODEL), []),
        ((MODEL, 0), (0, 0), [("all-gather", MODEL, 0)]),
        ((DATA, MODEL), (DATA, 0), [("all-gather", MODEL, DATA)]),
        ((MODEL, 0), (0, MODEL), [("all-to-all", MODEL, 0)]),
        ((DATA, MODEL, 0), (DATA, 0, MODEL), [("all-to-all", MODEL, DATA)]),
        ((DATA | MODEL, 0), (DATA, MODEL), [("all-to-all", MODEL, DATA)]),
        ((DATA, MODEL), (0, DATA), [("all-to-all", DATA, MODEL), ("all-gather", MODEL, DATA)]),
    ],
)
def test_transitions(before: Masks, after: Masks, expected: list[tuple[str, int, int]]) -> None:
    result = transition(7, before, after, is_operand=True)
    assert result == [Reshard(kind, 7, over, unchanged, True) for kind, over, unchanged in expected]


def test_masks_of_a_spec() -> None:
    bits = {"data": DATA, "model": MODEL}
    assert as_masks((("data", "model"), (), ("model",)), bits) == (DATA | MODEL, 0, MODEL)
    assert union((DATA, 0, MODEL)) == DATA | MODEL


def test_a_transpose_within_a_class_exchanges_only_an_unmoved_sharded_dim() -> None:
    def moved(out: Masks) -> Moves:
        return divided(lambda x: x.T, [(8, 8)], [(MODEL, 0)], out, [(D, D), (D, D)])[0]

    assert moved((0, MODEL)) == [], "each device has its part of the result"
    assert moved((MODEL, 0)) == [("all-to-all", "out", MODEL, 0)]
    assert moved((0, 0)) == [("all-gather", "out", MODEL, 0)]
