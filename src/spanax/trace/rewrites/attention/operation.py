"""Attention as one primitive, with a primitive of its own for the gradient.

It stays one operation through differentiation, so that a later stage decides how it runs: blockwise on one device,
around a ring of devices, or by a platform's kernel.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import mlir
from jax.interpreters import partial_eval as pe

from spanax.trace.axes.discover import Dims
from spanax.trace.jaxpr.dim_rules import rule
from spanax.trace.jaxpr.graph import Graph, Op
from spanax.trace.rewrites.attention.blockwise import Blocks, Keys, Part, finished, parted
from spanax.trace.rewrites.attention.kernels import Kernel
from spanax.trace.rewrites.attention.scores import NONE, Form
from spanax.trace.rewrites.attention.zigzag import shares

FORWARD, BACKWARD = "spanax_attention", "spanax_attention_grad"

RING = frozenset({FORWARD, BACKWARD})
"""The two operations by name."""

attention_p = core.Primitive(FORWARD)
"""(q, k, v, *extras) -> (result, largest logit of each row, sum of its weights).

Of a kernel: (q, k, v) -> (result, log of the sum)."""

attention_grad_p = core.Primitive(BACKWARD)
"""(q, k, v, gradient of the result, largest, weight, delta, *extras) -> gradients of q, k, v and wanted extras.

Of a kernel: (q, k, v, gradient of the result, result, log of the sum) -> gradients of q, k, v."""

for _primitive in (attention_p, attention_grad_p):
    _primitive.multiple_results = True

NUM_ROWS = 7
"""Operands of the backward operation before its extras."""


def attention(
    form: Form, dtype: Any, q: Any, k: Any, v: Any, extras: Sequence[Any], kernel: Kernel | None = None
) -> Any:
    """softmax(logits(q.k, extras)) v, as one operation with one operation as its gradient.

    Args:
      form: how the logits come of q.k.
      dtype: of the result.
      q: (batch, rows, queries, width).
      k: (batch, keys, width).
      v: (batch, keys, width of the result).
      extras: what else the logits are made of.
      kernel: the platform's, if one is to compute it where there is that platform.

    Source: the gradient, Dao et al., FlashAttention, arXiv 2205.14135, appendix B.2.

    Example:
      >>> import numpy as np
      >>> from spanax.trace.rewrites.attention.scores import Step
      >>> step = Step("score", None, (), (), (0, 1, 2), (2, 4, 4), np.dtype("float32"))
      >>> form = Form(1, 0, (2, 4, 4), (step,), (), (None, None), np.dtype("float32"))
      >>> q = k = v = jnp.ones((2, 4, 8))
      >>> attention(form, "float32", q, k, v, ()).shape
      (2, 4, 8)
    """
    if kernel is not None:
        return _by_kernel(form, dtype, kernel, q, k, v)

    @jax.custom_vjp
    def attend(q: Any, k: Any, v: Any, extras: tuple[Any, ...]) -> Any:
        return attention_p.bind(q, k, v, *extras, form=form, dtype=dtype, kernel=None)[0]

    def forward(q: Any, k: Any, v: Any, extras: tuple[Any, ...]) -> tuple[Any, Any]:
        out, largest, weight = attention_p.bind(q, k, v, *extras, form=form, dtype=dtype, kernel=None)
        return out, (q, k, v, extras, out, largest, weight)

    def backward(kept: Any, of_out: Any) -> tuple[Any, ...]:
        q, k, v, extras, out, largest, weight = kept
        delta = (out.astype(jnp.float32) * of_out.astype(jnp.float32)).sum(-1)
        grads = tuple(jnp.issubdtype(extra.dtype, jnp.floating) for extra in extras)
        of_q, of_k, of_v, *found = attention_grad_p.bind(
            q, k, v, of_out, largest, weight, delta, *extras, form=form, grads=grads, kernel=None
        )
        given = iter(found)
        return of_q, of_k, of_v, tuple(next(given) if is_wanted else None for is_wanted in grads)

    attend.defvjp(forward, backward)
    return attend(q, k, v, tuple(extras))


def _by_kernel(form: Form, dtype: Any, kernel: Kernel, q: Any, k: Any, v: Any) -> Any:
    @jax.custom_vjp
    def attend(q: Any, k: Any, v: Any) -> Any:
        return attention_p.bind(q, k, v, form=form, dtype=dtype, kernel=kernel)[0]

    def forward(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        out, log_sum = attention_p.bind(q, k, v, form=form, dtype=dtype, kernel=kernel)
        return out, (q, k, v, out, log_sum)

    def backward(kept: Any, of_out: Any) -> tuple[Any, ...]:
        q, k, v, out, log_sum = kept
        return tuple(attention_grad_p.bind(q, k, v, of_out, out, log_sum, form=form, grads=(), kernel=kernel))

    attend.defvjp(forward, backward)
    return attend(q, k, v)


def attend_here(form: Form, dtype: Any, q: Any, k: Any, v: Any, extras: Sequence[Any], starts: Any = None) -> list[Any]:
    """The operation where all its queries and keys are; `starts` as of `Blocks`."""
    blocks = Blocks(form, _masked_here(form, starts), starts or {})
    num = len(blocks.masked)
    states = []
    for part in parted(form, Part(q, tuple(extras), 0), num):
        state = blocks.fresh(part, v.shape[-1])
        for keys in _split_keys(form, k, v, num):
            state = blocks.attend(part, keys, state)
        states.append(finished(state, dtype))
    return [jnp.concatenate(parts, form.queries) for parts in zip(*states, strict=True)]


def turn_back_here(form: Form, grads: tuple[bool, ...], operands: Sequence[Any], starts: Any = None) -> list[Any]:
    """The gradients where all queries and keys are, of the operands of `attention_grad_p`, in 32 bits."""
    q, k, v, of_out, *rows = operands[:NUM_ROWS]
    blocks = Blocks(form, _masked_here(form, starts), starts or {}, grads)
    num = len(blocks.masked)
    part = Part(q, tuple(operands[NUM_ROWS:]), 0, of_out, tuple(rows))
    parts, keys = parted(form, part, num), _split_keys(form, k, v, num)
    of_keys = [[jnp.zeros(one.shape, jnp.float32) for one in (each.k, each.v)] for each in keys]
    of_q, of_extras = [], []
    for one in parts:
        more_q, more = jnp.zeros(one.q.shape, jnp.float32), zeros_of_extras(grads, one.extras)
        for at, each in enumerate(keys):
            more_q, more, *of_keys[at] = blocks.turn_back(one, each, (more_q, more, *of_keys[at]))
        of_q.append(more_q)
        of_extras.append(more)
    of_k, of_v = (jnp.concatenate(each, form.num_batch) for each in zip(*of_keys, strict=True))
    return [jnp.concatenate(of_q, form.queries), of_k, of_v, *joined_extras(form, grads, of_extras)]


def attention_flops(graph: Graph, op: Op) -> int:
    """FLOPs of the two products of the forward operation, with nothing masked."""
    form, (q, _, v) = op.params["form"], op.inputs[:3]
    return 2 * math.prod(form.sizes) * (graph.shape(q)[-1] + graph.shape(v)[-1])


def _masked_here(form: Form, starts: Any) -> np.ndarray:
    """What is masked of the parts on one device; not known of queries that are themselves a part."""
    return np.zeros((1, 1), bool) if form.queries in (starts or {}) else shares(form, 1).masked


def wanted_of(grads: Sequence[bool], operands: Sequence[Any]) -> list[Any]:
    """The operands of `attention_grad_p` that have a gradient, in the order of its results."""
    extras = [extra for extra, is_wanted in zip(operands[NUM_ROWS:], grads, strict=True) if is_wanted]
    return [*operands[:3], *extras]


def zeros_of_extras(grads: Sequence[bool], extras: Sequence[Any]) -> tuple[Any, ...]:
    """Where the gradients of extras are added up: in 32 bits."""
    return tuple(
        jnp.zeros(extra.shape, jnp.float32) for extra, is_wanted in zip(extras, grads, strict=True) if is_wanted
    )


def joined_extras(form: Form, grads: Sequence[bool], parts: Sequence[Sequence[Any]]) -> list[Any]:
    """The gradients of extras from those of each part of the queries."""
    labels = [labels for labels, is_wanted in zip(form.extras, grads, strict=True) if is_wanted]
    return [
        jnp.concatenate(found, of.index(form.queries)) if form.queries in of else sum(found[1:], found[0])
        for found, of in zip(zip(*parts, strict=True), labels, strict=True)
    ]


def _split_keys(form: Form, k: Any, v: Any, num: int) -> list[Keys]:
    pairs = zip(jnp.split(k, num, form.num_batch), jnp.split(v, num, form.num_batch), strict=True)
    return [Keys(*pair, at) for at, pair in enumerate(pairs)]


# ---- what JAX asks of an operation


@attention_p.def_abstract_eval
def _forward_shapes(q: Any, k: Any, v: Any, *extras: Any, form: Form, dtype: Any, kernel: Any) -> list[Any]:
    rows = jax.core.ShapedArray(q.shape[:-1], jnp.float32)
    return [jax.core.ShapedArray((*q.shape[:-1], v.shape[-1]), jnp.dtype(dtype)), *[rows] * (1 if kernel else 2)]


@attention_grad_p.def_abstract_eval
def _backward_shapes(*operands: Any, form: Form, grads: tuple[bool, ...], kernel: Any) -> list[Any]:
    return [jax.core.ShapedArray(one.shape, one.dtype) for one in wanted_of(grads, operands)]


def forward_here(q: Any, k: Any, v: Any, *extras: Any, form: Form, dtype: Any, kernel: Any) -> list[Any]:
    """The forward operation block by block, a kernel's too."""
    out, largest, weight = attend_here(form, dtype, q, k, v, extras)
    return [out, largest + jnp.log(weight)] if kernel else [out, largest, weight]


def backward_here(*operands: Any, form: Form, grads: tuple[bool, ...], kernel: Any) -> list[Any]:
    """The backward operation block by block, a kernel's too."""
    given = operands
    if kernel:
        q, k, v, of_out, out, log_sum = operands
        delta = (out.astype(jnp.float32) * of_out.astype(jnp.float32)).sum(-1)
        given = (q, k, v, of_out, log_sum, jnp.ones_like(log_sum), delta)
    found = turn_back_here(form, grads, given)
    return [one.astype(of.dtype) for one, of in zip(found, wanted_of(grads, operands), strict=True)]


attention_p.def_impl(jax.jit(forward_here, static_argnames=("form", "dtype", "kernel")))
attention_grad_p.def_impl(jax.jit(backward_here, static_argnames=("form", "grads", "kernel")))
mlir.register_lowering(attention_p, mlir.lower_fun(forward_here, multiple_results=True))
mlir.register_lowering(attention_grad_p, mlir.lower_fun(backward_here, multiple_results=True))


def _without_unread(used: list[bool], *given: Any) -> tuple[list[bool], Any]:
    """The gradient without those of extras that nobody reads, as of a bias that comes with the batch."""
    eqn = given[-1]  # newer versions of JAX say more before it
    wanted = list(eqn.params["grads"])
    places = [at for at, is_wanted in enumerate(wanted) if is_wanted]
    if not any(used):
        return [False] * len(eqn.invars), None
    for at, is_used in zip(places, used[3:], strict=True):
        wanted[at] = is_used
    kept = [True] * 3 + used[3:]
    outs = [var for var, is_kept in zip(eqn.outvars, kept, strict=True) if is_kept]
    new = eqn.replace(outvars=outs, params=dict(eqn.params, grads=tuple(wanted)))
    return [True] * len(eqn.invars), new


pe.dce_rules[attention_grad_p] = _without_unread


# ---- which of its dims are split together


@rule(FORWARD)
def _forward_dims(op: Op, dims: Dims) -> None:
    _join(dims, op.params["form"], op.inputs[:3], op.inputs[3:])
    form, (q, _, v) = op.params["form"], op.inputs[:3]
    out, *rows = op.outputs
    _join_rows(dims, form, q, (out, *rows))
    dims.join(v, form.num_batch + 1, out, form.keys)


@rule(BACKWARD)
def _backward_dims(op: Op, dims: Dims) -> None:
    form, (q, _, v, of_out, *rows) = op.params["form"], op.inputs[:NUM_ROWS]
    _join(dims, form, op.inputs[:3], op.inputs[NUM_ROWS:])
    _join_rows(dims, form, q, (of_out, *rows))
    dims.join(v, form.num_batch + 1, of_out, form.keys)
    for of, found in zip(wanted_of(op.params["grads"], op.inputs), op.outputs, strict=True):
        dims.same(of, found)


def _join(dims: Dims, form: Form, operands: Sequence[int], extras: Sequence[int]) -> None:
    q, k, v = operands
    for dim in range(form.num_batch):
        dims.join(q, dim, k, dim)
        dims.join(k, dim, v, dim)
    dims.join(k, form.num_batch, v, form.num_batch)
    dims.join(q, form.keys, k, form.num_batch + 1)
    for extra, labels in zip(extras, form.extras, strict=True):
        for dim, label in enumerate(labels):
            if label == form.keys:
                dims.join(k, form.num_batch, extra, dim)
            elif label != NONE:
                dims.join(q, label, extra, dim)


def _join_rows(dims: Dims, form: Form, q: int, others: Sequence[int]) -> None:
    for other in others:
        for dim in range(form.keys):
            dims.join(q, dim, other, dim)
