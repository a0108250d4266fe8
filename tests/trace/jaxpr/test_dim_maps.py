"""One rule a primitive, each on a program of its own: which dims it joins, written like einsum.

Sizes are equal wherever they can be: dims of different sizes never join, so only equal ones can show a wrong join.
"""

import string
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import spanax
from spanax.trace.axes.discover import Dims
from spanax.trace.axes.example_dims import scanned_dims
from spanax.trace.jaxpr.dim_maps.registry import TABLE
from spanax.trace.jaxpr.graph import LAYER_PARTS, from_jaxpr


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "int32")


def dims_of(function: Callable[..., Any], *args: Any) -> Dims:
    dims = Dims(from_jaxpr(jax.make_jaxpr(function)(*args)))
    for op in dims.graph.ops():
        dims.add(op)
    dims.join_pieces()
    return dims


def joined(dims: Dims) -> str:
    """`ab,bc->ac`: a letter a class, 1 for a dim of size 1."""
    letters: dict[int | None, str] = {None: "1"}
    free = iter(string.ascii_letters)

    def text(value: int) -> str:
        for label in dims.classes(value):
            if label not in letters:
                letters[label] = next(free)
        return "".join(letters[label] for label in dims.classes(value))

    body = dims.graph.body
    ins = ",".join(map(text, body.inputs))
    return ins + "->" + ",".join(map(text, body.outputs))


def ways(dims: Dims) -> list[list[int]]:
    """Into how many parts each dim of each output can be split."""
    return [[dims.ways(c) if c is not None else 1 for c in dims.classes(out)] for out in dims.graph.body.outputs]


def conv(x: Any, kernel: Any, stride: int = 1, **options: Any) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=numbers, **options)


def gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of the arguments and the cotangent: the result, times the cotangent, and the cotangents of the arguments."""

    def both(*args: Any) -> Any:
        result, backward = jax.vjp(function, *args[:-1])
        return result * args[-1], *backward(args[-1])

    return both


@jax.jit
def doubled(x: Any) -> Any:
    return x * 2


@jax.custom_vjp
def clipped(x: Any, y: Any) -> Any:
    return jnp.sin(x) * y


clipped.defvjp(lambda x, y: (clipped(x, y), (x, y)), lambda retained, g: (g * jnp.cos(retained[0]) * retained[1], g))

X, V, COUNT = f32(4, 4), f32(4), i32(4)
IMAGE, CUBE = f32(4, 8, 8, 4), f32(4, 4, 4)

RULES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "elementwise": (lambda x, y: jnp.exp(x) * y + 1.0, (X, X), "ab,ab->ab"),
    "broadcast over leading dims": (lambda x, y: x + y, (X, V), "ab,b->ab"),
    "dims of size 1 join nothing": (lambda x, y: x * y, (f32(4, 1), f32(1, 4)), "a1,1b->ab"),
    "select": (lambda x, y: jnp.where(x > 0, x, y), (X, X), "ab,ab->ab"),
    "clip by scalars": (lambda x: jnp.clip(x, 0.0, 1.0), (X,), "ab->ab"),
    "matmul": (lambda x, y: x @ y, (X, X), "ab,bc->ac"),
    "matmul with a batch": (lambda x, y: x @ y, (CUBE, CUBE), "abc,acd->abd"),
    "outer product": (jnp.outer, (V, V), "a,b->ab"),
    "attention scores": (
        lambda q, k: jnp.einsum("bthk,bshk->bhts", q, k),
        (f32(4, 4, 4, 4), f32(4, 4, 4, 4)),
        "abcd,aecd->acbe",
    ),
    "gradient of a matmul": (gradients(lambda x, y: x @ y), (X, X, X), "ab,bc,ac->ac,ab,bc"),
    "ragged matmul": (lax.ragged_dot, (X, CUBE, COUNT), "ab,cbd,c->ad"),
    "sum": (lambda x: x.sum(0), (X,), "ab->b"),
    "max with kept dims": (lambda x: x.max(1, keepdims=True), (X,), "ab->a1"),
    "argmax": (lambda x: x.argmax(1), (X,), "ab->a"),
    "softmax": (jax.nn.softmax, (X,), "ab->ab"),
    "transpose": (lambda x: x.transpose(2, 0, 1), (CUBE,), "abc->cab"),
    "squeeze and expand": (lambda x: x[:, 0][None], (f32(4, 1, 4),), "a1b->1ab"),
    "max pool": (
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME"),
        (IMAGE,),
        "abcd->aefd",
    ),
    "pooling with window 1": (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 1, 2), (1, 1, 1), "SAME"),
        (CUBE,),
        "abc->abd",
    ),
    "gradient of max pool": (
        gradients(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "SAME")),
        (CUBE, f32(4, 2, 4)),
        "abc,adc->adc,aec",
    ),
    "reshape splits": (lambda x: x.reshape(4, 4), (f32(16),), "a->ab"),
    "reshape merges": (lambda x: x.reshape(16), (X,), "ab->a"),
    "reshape regroups": (lambda x: x.reshape(8, 4), (f32(4, 8),), "ab->ac"),
    "reshape without a common factor": (lambda x: x.reshape(4, 6), (f32(6, 4),), "ab->cd"),
    "reshape of one part": (lambda x: x.reshape(4, 1, 4, 4), (f32(16, 4),), "ab->a1cb"),
    "reshape of nothing": (lambda x: x.reshape(2, 0), (f32(0, 4),), "1a->b1"),
    "concatenate what differs": (lambda x, y: jnp.concatenate([x, y], 1), (X, X), "ab,ac->ad"),
    "concatenate one class": (lambda x, y: jnp.concatenate([x, x * y], 1), (X, X), "ab,ab->ab"),
    "concatenate uneven parts": (lambda x: jnp.concatenate([x, x[:, :2]], 1), (X,), "ab->ac"),
    "split into what differs": (lambda x: jnp.split(x, 2, 1), (f32(4, 8),), "ab->ac,ad"),
    "split into one class": (lambda x: jnp.add(*jnp.split(x, 2, 1)), (f32(4, 8),), "ab->ab"),
    "split unevenly": (lambda x: jnp.split(x, (2,), 1), (f32(4, 6),), "ab->ac,ad"),
    "stack": (lambda x, y: jnp.stack([x, y], 1), (X, X), "ab,ab->acb"),
    "unstack": (lambda x: jnp.unstack(x, axis=1)[:2], (CUBE,), "abc->ac,ac"),
    "tile": (lambda x: jnp.tile(x, (1, 2)), (X,), "ab->ac"),
    "repeat": (lambda x: jnp.repeat(x, 2, axis=1), (X,), "ab->ab"),
    "reverse": (lambda x: x[::-1], (X,), "ab->ab"),
    "slice of a part that divides": (lambda x: x[:, :2], (X,), "ab->ab"),
    "slice of a part that does not": (lambda x: x[:, :3], (X,), "ab->ac"),
    "slice with a stride": (lambda x: x[:, ::2], (X,), "ab->ac"),
    "pad to a multiple": (lambda x: jnp.pad(x, ((0, 0), (4, 0))), (X,), "ab->ab"),
    "pad to no multiple": (lambda x: jnp.pad(x, ((0, 0), (1, 1))), (X,), "ab->ac"),
    "pad between": (lambda x: lax.pad(x, 0.0, ((0, 0, 0), (0, 1, 1))), (X,), "ab->ac"),
    "dynamic slice": (lambda x, i: lax.dynamic_index_in_dim(x, i, 0), (X, i32()), "ab,->1b"),
    "dynamic update": (lambda x, y, i: lax.dynamic_update_slice(x, y, (i, 0)), (X, f32(1, 4), i32()), "ab,1b,->ab"),
    "cumulative sum": (lambda x: jnp.cumsum(x, 1), (X,), "ab->ab"),
    "sort": (lambda x: jnp.sort(x, 0), (X,), "ab->ab"),
    "argsort": (lambda x: jnp.argsort(x, 1), (X,), "ab->ab"),
    "top k": (lambda x: lax.top_k(x, 2), (X,), "ab->ac,ad"),
    "cholesky": (lambda x: lax.linalg.cholesky(x, symmetrize_input=False), (CUBE,), "abc->ade"),
    "fft": (lambda x: jnp.fft.fft(x, axis=-1), (X,), "ab->ac"),
    "embedding lookup": (lambda table, ids: table[ids], (X, i32(4, 4)), "ab,cd->cdb"),
    "lookup of columns": (lambda x, ids: x[:, ids], (X, COUNT), "ab,c->ac"),
    "take along an axis": (lambda x, i: jnp.take_along_axis(x, i, 1), (X, i32(4, 4)), "ab,ac->ac"),
    "gradient of a lookup": (gradients(lambda table: table[np.zeros(4, int)]), (X, X), "ab,cb->cb,db"),
    "scatter of rows": (lambda x, i, y: x.at[i].add(y), (X, COUNT, X), "ab,c,cb->ab"),
    "one-hot": (lambda i: jax.nn.one_hot(i, 4), (COUNT,), "a->ab"),
    "convolution": (conv, (IMAGE, f32(3, 3, 4, 4)), "abcd,efdg->ahig"),
    "convolution 1 x 1": (conv, (IMAGE, f32(1, 1, 4, 4)), "abcd,11de->abce"),
    "convolution 1 x 1 with a stride": (lambda x, k: conv(x, k, 2), (IMAGE, f32(1, 1, 4, 4)), "abcd,11de->afge"),
    "grouped convolution": (
        lambda x, k: conv(x, k, feature_group_count=2),
        (IMAGE, f32(1, 1, 2, 4)),
        "abcd,11ed->abcd",
    ),
    "depthwise convolution": (
        lambda x, k: conv(x, k, feature_group_count=4),
        (IMAGE, f32(1, 1, 1, 4)),
        "abcd,111d->abcd",
    ),
    "gradient of a convolution": (
        gradients(conv),
        (IMAGE, f32(1, 1, 4, 4), IMAGE),
        "abcd,11de,abce->abce,abcd,11de",
    ),
    "gradient of a depthwise convolution": (
        gradients(lambda x, k: conv(x, k, feature_group_count=4)),
        (IMAGE, f32(3, 3, 1, 4), IMAGE),
        "abcd,ef1d,aghd->aghd,aijd,kl1d",
    ),
    "scan": (
        lambda c, xs: lax.scan(lambda c, x: (c + x, c * x), c, xs),
        (V, X),
        "a,ba->a,ba",
    ),
    "scan over weights": (lambda x, w: lax.scan(lambda x, w: (x @ w, None), x, w)[0], (X, CUBE), "ab,cbb->ab"),
    "while": (lambda x, y: lax.fori_loop(0, 3, lambda i, z: z + y, x), (X, V), "ab,b->ab"),
    "cond": (lambda x, y: lax.cond(x[0, 0] > 0, lambda: x + y, lambda: x - 1), (X, V), "ab,b->ab"),
    "remat": (lambda x, y: jax.checkpoint(jnp.matmul)(x, y), (X, X), "ab,bc->ac"),
    "gradient of remat": (gradients(jax.checkpoint(jnp.matmul)), (X, X, X), "ab,bc,ac->ac,ab,bc"),
    "custom jvp": (jax.nn.relu, (X,), "ab->ab"),
    "custom vjp": (clipped, (X, X), "ab,ab->ab"),
    "gradient of a custom vjp": (gradients(clipped), (X, X, X), "ab,ab,ab->ab,ab,ab"),
    "two calls of one function": (lambda x, y: (doubled(x), doubled(y)), (X, X), "ab,cd->ab,cd"),
    "random bits": (lambda x: x + jax.random.normal(jax.random.key(0), x.shape), (X,), "ab->ab"),
    "barrier": (lambda x, y: lax.optimization_barrier((x, y)), (X, X), "ab,cd->ab,cd"),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_joins(name: str) -> None:
    function, args, expected = RULES[name]
    dims = dims_of(function, *args)
    assert joined(dims) == expected
    assert not dims.unknown


@pytest.mark.parametrize(
    ("function", "arg", "expected"),
    [
        (lambda x: x.reshape(4, 6), f32(24), [[4, 6]]),
        (lambda x: x.reshape(24), f32(4, 6), [[4]]),
        (lambda x: (x.reshape(4, 6), x.reshape(6, 4)), f32(24), [[2, 6], [2, 4]]),  # the gcd of all it is cut into
        (lambda x: x.reshape(12, 2).reshape(4, 6), f32(24), [[4, 6]]),
        (lambda x: x[:, :2], f32(4, 8), [[4, 2]]),
        (lambda x: jnp.concatenate([x, x]), f32(6), [[6]]),
        (lambda x: jnp.add(*jnp.split(x, 2)), f32(12), [[6]]),
    ],
)
def test_the_number_of_shards_of_an_axis(function: Callable[..., Any], arg: Any, expected: list[list[int]]) -> None:
    assert ways(dims_of(function, arg)) == expected


@pytest.mark.parametrize(
    ("function", "args", "dim"),
    [
        (lambda x: jnp.cumsum(x, 1), (X,), 1),
        (lambda x: lax.cummax(x, 0), (X,), 0),
        (lambda x: lax.associative_scan(jnp.add, x[:1]) + jnp.sort(x, 0), (X,), 0),
        (lambda x: jnp.argsort(x, 1), (X,), 1),
        (lax.ragged_dot, (X, CUBE, COUNT), 0),
    ],
)
def test_an_operated_dim_is_replicated(function: Callable[..., Any], args: tuple[Any, ...], dim: int) -> None:
    assert {at for _, at in dims_of(function, *args).replicated} == {dim}


def mystery_primitive() -> Primitive:
    mystery = Primitive("mystery")
    mystery.def_abstract_eval(lambda x: x)
    ad.deflinear2(mystery, lambda g, x: [mystery.bind(g)])
    mlir.register_lowering(mystery, mlir.lower_fun(lambda x: x, multiple_results=False))
    return mystery


def test_an_unknown_primitive_is_counted_and_joins_nothing() -> None:
    mystery = mystery_primitive()
    dims = dims_of(lambda x: mystery.bind(mystery.bind(x)), X)
    assert joined(dims) == "ab->cd"
    assert dims.unknown == {"mystery": 2}


def test_a_users_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(TABLE, "mystery", raising=False)

    @spanax.rule("mystery")
    def mystery_rule(op: Any, dims: Any) -> None:
        dims.same(*op.inputs, *op.outputs)

    dims = dims_of(mystery_primitive().bind, X)
    assert joined(dims) == "ab->ab"
    assert not dims.unknown


def test_fft_is_opaque_along_what_it_transforms() -> None:
    dims = dims_of(lambda x: jnp.fft.fftn(x, axes=(1, 2)), CUBE)
    assert joined(dims) == "abc->ade"
    assert dims.opaque == {"fft": 1}


def test_a_callback_is_opaque() -> None:
    dims = dims_of(lambda x: jax.pure_callback(np.sin, x, x), X)
    assert joined(dims) == "ab->cd"
    assert dims.opaque == {"pure_callback": 1}


def test_a_shard_map_is_opaque() -> None:
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")
    mapped = jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=spec, out_specs=spec)
    dims = dims_of(mapped, X)
    assert joined(dims) == "ab->cd"
    assert dims.opaque == {"shard_map": 1} and not dims.unknown


def test_a_pallas_kernel_is_opaque() -> None:
    from jax.experimental import pallas

    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] * 2

    dims = dims_of(pallas.pallas_call(kernel, out_shape=X, interpret=True), X)
    assert joined(dims) == "ab->cd"
    assert dims.opaque == {"pallas_call": 1} and not dims.unknown


def test_a_loop_joins_carries_that_swap() -> None:
    """Carries that swap places each round are one class, though no single round joins them."""
    dims = dims_of(lambda x, y: lax.fori_loop(0, 3, lambda i, pair: (pair[1], pair[0]), (x, y)), V, V)
    assert joined(dims) == "a,a->a,a"


# What is only a wrapping, and what a loop goes along


def test_wrapped_functions_are_traversed() -> None:
    doubled = jax.custom_batching.custom_vmap(lambda x: 2 * x)
    doubled.def_vmap(lambda size, is_batched, x: (2 * x, is_batched[0]))
    named = lax.composite(lambda x: jnp.sin(x), "my.sine")
    result = dims_of(lambda x: named(doubled(x)), f32(8, 5))
    assert not result.unknown and joined(result) == "ab->ab"


def test_a_linear_solve_joins_only_batch_dims() -> None:
    result = dims_of(jnp.linalg.solve, f32(8, 5, 5), f32(8, 5, 2))
    assert not result.unknown and joined(result) == "abc,ade->afg"


def turned(function: Callable[..., Any], *args: Any) -> Dims:
    """As in a step whose first input is a batch."""
    graph = from_jaxpr(jax.make_jaxpr(function)(*args))
    dims = Dims(graph, scanned_dims(graph))
    for op in graph.ops():
        dims.add(op)
    dims.join_turns([(graph.body.inputs[0], 0)])
    return dims


def in_parts(x: Any) -> Any:
    return lax.map(jnp.sin, x.reshape(4, 12, 3))


def test_a_loop_over_parts_of_the_batch_shards_each_part() -> None:
    assert joined(turned(in_parts, f32(48, 3))) == "ab->cab"
    assert joined(turned(lambda x: in_parts(x).reshape(48, 3), f32(48, 3))) == "ab->ab"


def test_a_loop_over_parts_of_another_dim_shards_the_parts() -> None:
    assert joined(turned(lambda _, x: in_parts(x), f32(5), f32(48, 3))) == "a,bc->bdc"


@pytest.mark.parametrize(("size", "result"), [(48, "ab->ab"), (12, "ab->ab")])
def test_examples_drawn_from_the_batch_are_examples(size: int, result: str) -> None:
    def draw(x: Any) -> Any:
        if size == 12:
            return lax.dynamic_slice_in_dim(x, jnp.argmax(x[0]), 12)
        return x[jax.random.permutation(jax.random.key(0), 48)]

    assert joined(turned(draw, f32(48, 3))) == result


def test_a_lookup_by_indices_joins_the_indices() -> None:
    assert joined(turned(lambda x, at: x[at], f32(48, 3), i32(48))) == "ab,c->cb"


def test_parts_of_layers_are_one_class_of_any_sizes() -> None:
    def layers(a: Any, b: Any) -> Any:
        with jax.named_scope(LAYER_PARTS):
            return jax.lax.concatenate((a, b), 0)

    dims = dims_of(layers, f32(2, 4), f32(3, 4))
    assert joined(dims) == "ab,cb->db"
    dims.join_padded()
    assert joined(dims) == "ab,ab->ab" and ways(dims) == [[5, 4]]
