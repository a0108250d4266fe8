"""What the gradient of a kernel reads, and along which classes it is sharded."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import own_kernels
from spanax.trace.kernels.operation import Described, described
from spanax.trace.kernels.runs import Flat, Forward

SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "norm": ((32, 8), (8,)),
    "cross_entropy": ((32, 8), (8, 16), (32,)),
    "attention": ((2, 4, 16, 8),) * 3,
    "grouped": ((32, 8), (2, 8, 16), (4,)),
    "rotary": ((2, 16, 4, 8), (16, 4), (16, 4)),
}


def described_as(kernel: Any, reference: Any, *shapes: tuple[int, ...], ints: tuple[int, ...] = ()) -> Described:
    operands = tuple(
        jax.ShapeDtypeStruct(shape, "int32" if index in ints else "float32") for index, shape in enumerate(shapes)
    )
    tree = jax.tree.structure((0,) * len(shapes))
    return described(Forward(Flat(kernel, tree), Flat(reference, tree)), operands)


@pytest.mark.parametrize(
    "name, reads, outs, extras, sums",
    [
        ("norm", (0, 1), (), 1, [(), (0,)]),
        ("cross_entropy", (0, 1, 2), (), 1, [(), (0,)]),
        ("attention", (0, 1, 2), (0,), 1, [(), (), ()]),
        ("grouped", (0, 1, 2), (), 0, [(3,), (0,)]),
        ("rotary", (1, 2), (), 0, [(), (0, 2), (0, 2)]),
    ],
)
def test_a_gradient_reads_only_its_residuals(name: str, reads: Any, outs: Any, extras: int, sums: Any) -> None:
    make, reference = own_kernels.PAIRS[name]
    known = described_as(
        make(True), reference, *SHAPES[name], ints=(2,) if name in ("cross_entropy", "grouped") else ()
    )
    assert known.backward is not None
    assert (known.reads, known.outs) == (reads, outs)
    assert len(known.forward["classes"].results) == len(known.results) + extras
    assert known.backward["run"].saves
    assert list(known.backward["classes"].sums) == sums


def test_results_are_computed_again_where_a_residual_combines_all_rows() -> None:
    """The largest value of a shard is not that of the array."""
    scaled = own_kernels.with_gradient(
        lambda x: (2 * x, jnp.abs(x).max()), lambda largest, grad: (2 * grad + 0 * largest,)
    )
    known = described_as(scaled, lambda x: 2 * x, (8, 4))
    assert known.backward is not None and not known.backward["run"].saves
    assert [label for label, _ in known.backward["classes"].ways] == [0, 1]


def test_classes_that_a_residual_lacks_are_whole() -> None:
    summed = own_kernels.with_gradient(lambda x: (2 * x, x.sum(1)), lambda rows, grad: (2 * grad + 0 * rows[:, None],))
    known = described_as(summed, lambda x: 2 * x, (8, 4))
    assert known.backward is not None and known.backward["run"].saves
    assert [label for label, _ in known.backward["classes"].ways] == [0]
    assert "stores values for its gradient" in known.forward["classes"].whole[0][1]
