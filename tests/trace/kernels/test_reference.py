"""Which dims of a kernel its plain reference allows to shard, and why not others."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import own_kernels
from spanax.trace.jaxpr.graph import from_jaxpr
from spanax.trace.kernels.reference import KernelDims, Reference


def dims_of(function: Any, *shapes: Sequence[int], ints: Sequence[int] = ()) -> KernelDims:
    arrays = [
        jax.ShapeDtypeStruct(shape, "int32" if index in ints else "float32") for index, shape in enumerate(shapes)
    ]

    def trace(avals: Sequence[Any]) -> Any:
        return from_jaxpr(jax.make_jaxpr(function)(*avals))

    return Reference(trace(arrays)).dims(trace)


def sharded(dims: KernelDims) -> set[int]:
    return {label for label, _ in dims.ways}


def scanned(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda total, row: (total + row @ w, None), jnp.zeros((x.shape[1], w.shape[1])), x)[0]


CASES: dict[str, tuple[Any, tuple[tuple[int, ...], ...], str, str]] = {
    # function, operands, the dims that can be sharded (a sum: in brackets), part of a reason
    "elementwise": (lambda x, y: x * y, ((8, 4), (8, 4)), "00 01", ""),
    "norm": (own_kernels.plain_norm, ((8, 4), (4,)), "00", "`add`"),
    "matmul": (jnp.matmul, ((8, 6), (6, 4)), "00 (01) 11", ""),
    "matmul, bias": (lambda x, w: x @ w + 1.0, ((8, 6), (6, 4)), "00 11", "`add`"),
    "matmul, relu": (lambda x, w: jax.nn.relu(x @ w), ((8, 6), (6, 4)), "00 11", "`max`"),
    "two sums": (lambda x, w: 2 * (x @ w) - x @ w, ((8, 6), (6, 4)), "00 (01) 11", ""),
    "a sum of squares": (lambda x, w: (x * w).sum(0), ((8, 6), (6,)), "(00) 01", ""),
    "mean": (lambda x: x.mean(0), ((8, 6),), "01", "such as a mean over them"),
    "largest": (lambda x: x.max(0), ((8, 6),), "01", "`reduce_max`"),
    "softmax": (lambda x: jax.nn.softmax(x, -1), ((8, 6),), "00", "`reduce_max`"),
    "cumsum": (lambda x: jnp.cumsum(x, 1), ((8, 6),), "00", "`cumsum`"),
    "drawn": (lambda x: x + jax.random.normal(jax.random.key(0), x.shape), ((8, 6),), "", "draws numbers for them"),
    "positions": (lambda x: x + jnp.arange(6.0), ((8, 6),), "00", "cannot be traced with twice as many"),
    "constant": (lambda x: x + np.asarray([1.0, 2.0, 3.0]), ((8, 3),), "00", "cannot be traced with twice as many"),
    "constant in remat": (jax.checkpoint(lambda x: x * np.asarray([1.0, 2.0])), ((8, 2),), "00", "with twice as many"),
    "returned constant": (lambda x: (x, np.ones(8, "float32")), ((8,),), "", "result 1 does not depend on them"),
    "branches": (lambda x, i: jax.lax.cond(i[0] > 0, jnp.sin, lambda x: 2 * x, x), ((8, 3), (1,)), "00 01", ""),
    "merged": (lambda x: x.reshape(-1, 4) * 2.0, ((8, 6, 4),), "00", "their rows in another order"),
    "split": (lambda x: x.reshape(4, 2, 6) * 2.0, ((8, 6),), "", "cannot be traced with twice as many"),
    "itself": (lambda x: x @ x.T, ((8, 6),), "(01)", "has two dims along them"),
    "ignored": (lambda x, y: (2.0 * x, y.sum()), ((8,), (6,)), "", "does not depend on them"),
    "gathered": (lambda x, i: x[i], ((8, 4), (6,)), "01 10", "`gather`"),
    "halves": (own_kernels.plain_rotary, ((2, 8, 4, 6), (8, 3), (8, 3)), "00 01 02", "`split`"),
    "attention": (own_kernels.plain_attention, ((2, 3, 8, 4), (2, 3, 8, 4), (2, 3, 8, 6)), "00 01 23", "`ge`"),
    "blocks": (own_kernels.plain_grouped, ((32, 4), (2, 4, 6), (4,)), "00 (01) 12", "`gather`"),
    "loss": (own_kernels.plain_loss, ((8, 4), (4, 6), (8,)), "00", "`reduce_max`"),
    "remat": (jax.checkpoint(lambda x, w: 2.0 * (x @ w)), ((8, 6), (6, 4)), "00 (01) 11", ""),
    "scan": (scanned, ((5, 8, 6), (6, 3)), "01 (02) 11", "`scan`"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_dims_are_sharded_where_the_reference_computes_rows_or_sums(case: str) -> None:
    function, shapes, expected, reason = CASES[case]
    ints = [2] if case in ("blocks", "loss") else [1] if case == "gathered" else []
    dims = dims_of(function, *shapes, ints=ints)
    found = {}
    for operand, labels in enumerate(dims.operands):
        for dim, label in enumerate(labels):
            if label in sharded(dims) and label not in found:
                found[label] = f"({operand}{dim})" if any(label in each for each in dims.sums) else f"{operand}{dim}"
    assert " ".join(found.values()) == expected
    assert reason in " ".join(text for _, text in dims.whole)
    assert bool(reason) == bool(dims.whole)


def test_products_have_the_classes_of_their_dims() -> None:
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((8, 4), "float32"), ((4, 6), "float32"), ((8,), "int32"))
    ]
    graph = from_jaxpr(jax.make_jaxpr(own_kernels.plain_loss)(*shapes))
    (product,) = Reference(graph, [(0, 1), (1, 2), (0,)]).products()
    assert product.flops == 2 * 8 * 4 * 6
    assert product.sizes == (((8, 0),), ((6, 2),), ((4, 1),), ())
