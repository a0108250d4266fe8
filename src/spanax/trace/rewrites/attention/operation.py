"""Attention as one primitive, with a primitive of its own for the gradient.

It stays one operation through differentiation, so that a later stage decides how it runs: blockwise on one device,
around a ring of devices, or by a platform's kernel.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jax.interpreters import mlir
from jax.interpreters import partial_eval as pe

from spanax.trace.jaxpr.dim_maps.registry import Padding
from spanax.trace.jaxpr.dim_maps.relations import Dim, Equation, Shape
from spanax.trace.jaxpr.dim_maps.rule import Recorder, rule
from spanax.trace.jaxpr.graph import Graph, Op
from spanax.trace.jaxpr.remat_policies import ROWS
from spanax.trace.rewrites.attention.blockwise import Blocks, Keys, Part, finished, fresh, of_sinks, parted
from spanax.trace.rewrites.attention.kernels import Kernel
from spanax.trace.rewrites.attention.scores import MASKED, NONE, Form, shares

FORWARD = "spanax_attention"
BACKWARD = "spanax_attention_grad"

RING = frozenset({FORWARD, BACKWARD})
"""Names of the forward and the backward operation."""

attention_p = core.Primitive(FORWARD)
"""(q, k, v, *extras) -> (result, largest logit of each row, sum of its weights).

With a kernel: (q, k, v, *extras) -> (result, log of the sum)."""

attention_grad_p = core.Primitive(BACKWARD)
"""(q, k, v, gradient of the result, largest, weight, delta, *extras) -> gradients of q, k, v and extras with `grads`.

With a kernel: (q, k, v, gradient of the result, result, log of the sum, *extras) -> gradients, as without."""

for _primitive in (attention_p, attention_grad_p):
    _primitive.multiple_results = True

NUM_ROWS = 7
"""Operands of the backward operation before its extras; with a kernel one less."""


def attention(
    form: Form,
    dtype: Any,
    q: Any,
    k: Any,
    v: Any,
    extras: Sequence[Any],
    kernel: Kernel | None = None,
    name: str | None = None,
) -> Any:
    """Computes softmax(logits(q.k, extras)) v as one operation whose gradient is one operation.

    Args:
      form: the steps from q.k to the logits.
      dtype: dtype of the result.
      q: (batch, rows, queries, width).
      k: (batch, keys, width).
      v: (batch, keys, width of the result).
      extras: other operands of the logits.
      kernel: the kernel to use on its platform, if any.
      name: the name under which a remat policy saves what the gradient reads of the results, if any.

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

    @jax.custom_vjp
    def attend(q: Any, k: Any, v: Any, extras: tuple[Any, ...]) -> Any:
        return attention_p.bind(q, k, v, *extras, form=form, dtype=dtype, kernel=kernel)[0]

    def forward(q: Any, k: Any, v: Any, extras: tuple[Any, ...]) -> tuple[Any, Any]:
        results = attention_p.bind(q, k, v, *extras, form=form, dtype=dtype, kernel=kernel)
        if name is not None:
            results = [checkpoint_name(x, name + ROWS * (index > 0)) for index, x in enumerate(results)]
        out, *rows = results
        return out, (q, k, v, extras, out, rows)

    def backward(residuals: Any, of_out: Any) -> tuple[Any, ...]:
        q, k, v, extras, out, rows = residuals
        operands = [out, *rows] if kernel else [*rows, row_products(out, of_out)]
        grads = tuple(jnp.issubdtype(extra.dtype, jnp.floating) for extra in extras)
        of_q, of_k, of_v, *of_floats = attention_grad_p.bind(
            q, k, v, of_out, *operands, *extras, form=form, grads=grads, kernel=kernel
        )
        remaining = iter(of_floats)
        return of_q, of_k, of_v, tuple(next(remaining) if is_smooth else None for is_smooth in grads)

    attend.defvjp(forward, backward)
    return attend(q, k, v, tuple(extras))


def named(op: Op, ins: Sequence[Any], name: str) -> list[Any]:
    """Runs a call of `attention` under a name, and any other operation with its results named."""
    inner = attention_of(op)
    if inner is None:
        return [checkpoint_name(out, name) for out in op.bind(ins)]
    q, k, v, *extras = ins
    params = inner.params
    return [attention(params["form"], params["dtype"], q, k, v, extras, params["kernel"], name)]


def attention_of(op: Op) -> Op | None:
    """Returns the forward operation of an operation that is a call of `attention`; None for any other."""
    if len(op.bodies) != 1 or [inner.name for inner in op.bodies[0].ops] != [FORWARD]:
        return None
    return op.bodies[0].ops[0] if op.bodies[0].ops[0].inputs == op.bodies[0].inputs else None


def row_products(out: Any, of_out: Any) -> Any:
    """Returns, for each row, the product of the result and its gradient."""
    return (out.astype(jnp.float32) * of_out.astype(jnp.float32)).sum(-1)


def attend_here(form: Form, dtype: Any, q: Any, k: Any, v: Any, extras: Sequence[Any], starts: Any = None) -> list[Any]:
    """Evaluates the forward operation on one device; `starts` as in `Blocks`."""
    blocks = Blocks(form, _masked_here(form, starts), starts or {})
    num = len(blocks.masked)
    states = []
    for part in parted(form, Part(q, tuple(extras), 0), num):
        state = fresh(form, part, v.shape[-1], blocks.starts)
        for keys in _split_keys(form, k, v, num):
            state = blocks.attend(part, keys, state)
        states.append(finished(state, dtype))
    return [jnp.concatenate(parts, form.queries) for parts in zip(*states, strict=True)]


def turn_back_here(form: Form, grads: tuple[bool, ...], operands: Sequence[Any], starts: Any = None) -> list[Any]:
    """Evaluates the backward operation on one device; the gradients are float32."""
    q, k, v, of_out, *rows = operands[:NUM_ROWS]
    blocks = Blocks(form, _masked_here(form, starts), starts or {}, grads)
    num = len(blocks.masked)
    part = Part(q, tuple(operands[NUM_ROWS:]), 0, of_out, tuple(rows))
    parts = parted(form, part, num)
    keys = _split_keys(form, k, v, num)
    of_keys = [[jnp.zeros(query_part.shape, jnp.float32) for query_part in (block.k, block.v)] for block in keys]
    of_q = []
    of_extras = []
    for query_part in parts:
        part_q = jnp.zeros(query_part.q.shape, jnp.float32)
        part_extras = zeros_of_extras(grads, query_part.extras)
        for index, block in enumerate(keys):
            part_q, part_extras, *of_keys[index] = blocks.turn_back(
                query_part, block, (part_q, part_extras, *of_keys[index])
            )
        of_q.append(part_q)
        of_extras.append(of_sinks(form, query_part, blocks.starts, grads, part_extras))
    of_k, of_v = (jnp.concatenate(block, form.num_batch) for block in zip(*of_keys, strict=True))
    return [jnp.concatenate(of_q, form.queries), of_k, of_v, *joined_extras(form, grads, of_extras)]


def attention_flops(graph: Graph, op: Op) -> int:
    """Returns the FLOPs of the two products of the forward operation, without a mask."""
    form = op.params["form"]
    q, _, v = op.inputs[:3]
    return 2 * math.prod(form.sizes) * (graph.shape(q)[-1] + graph.shape(v)[-1])


def _masked_here(form: Form, starts: Any) -> np.ndarray:
    """Returns the masked blocks on one device; none if the queries are sharded."""
    return np.zeros((1, 1), bool) if form.queries in (starts or {}) else shares(form, 1).masked


def wanted_of(grads: Sequence[bool], operands: Sequence[Any]) -> list[Any]:
    """Returns the operands of `attention_grad_p` that have a gradient, in the order of its results."""
    last = operands[len(operands) - len(grads) :]
    extras = [extra for extra, is_smooth in zip(last, grads, strict=True) if is_smooth]
    return [*operands[:3], *extras]


def zeros_of_extras(grads: Sequence[bool], extras: Sequence[Any]) -> tuple[Any, ...]:
    """Returns float32 accumulators for the gradients of extras."""
    return tuple(
        jnp.zeros(extra.shape, jnp.float32) for extra, is_smooth in zip(extras, grads, strict=True) if is_smooth
    )


def joined_extras(form: Form, grads: Sequence[bool], parts: Sequence[Sequence[Any]]) -> list[Any]:
    """Combines the gradients of extras over parts of the queries."""
    labels = [labels for labels, is_smooth in zip(form.extras, grads, strict=True) if is_smooth]
    return [
        jnp.concatenate(terms, dims.index(form.queries)) if form.queries in dims else sum(terms[1:], terms[0])
        for terms, dims in zip(zip(*parts, strict=True), labels, strict=True)
    ]


def _split_keys(form: Form, k: Any, v: Any, num: int) -> list[Keys]:
    pairs = zip(jnp.split(k, num, form.num_batch), jnp.split(v, num, form.num_batch), strict=True)
    return [Keys(*pair, index) for index, pair in enumerate(pairs)]


# ---- abstract evaluation, lowering and dead code elimination


@attention_p.def_abstract_eval
def _forward_shapes(q: Any, k: Any, v: Any, *extras: Any, form: Form, dtype: Any, kernel: Any) -> list[Any]:
    rows = jax.core.ShapedArray(q.shape[:-1], jnp.float32)
    return [jax.core.ShapedArray((*q.shape[:-1], v.shape[-1]), jnp.dtype(dtype)), *[rows] * (1 if kernel else 2)]


@attention_grad_p.def_abstract_eval
def _backward_shapes(*operands: Any, form: Form, grads: tuple[bool, ...], kernel: Any) -> list[Any]:
    return [jax.core.ShapedArray(operand.shape, operand.dtype) for operand in wanted_of(grads, operands)]


def forward_here(q: Any, k: Any, v: Any, *extras: Any, form: Form, dtype: Any, kernel: Any) -> list[Any]:
    """Evaluates the forward operation blockwise, also for a kernel."""
    out, largest, weight = attend_here(form, dtype, q, k, v, extras)
    return [out, largest + jnp.log(weight)] if kernel else [out, largest, weight]


def backward_here(*operands: Any, form: Form, grads: tuple[bool, ...], kernel: Any) -> list[Any]:
    """Evaluates the backward operation blockwise, also for a kernel."""
    arguments = operands
    if kernel:
        q, k, v, of_out, out, log_sum, *extras = operands
        weight = jnp.ones_like(log_sum)
        if (
            kernel.masked is not None
        ):  # a query that sees no key has equal weights, which the log of their sum rounds off
            weight = jnp.where(log_sum <= MASKED, float(form.sizes[form.keys]), weight)
        arguments = (q, k, v, of_out, log_sum, weight, row_products(out, of_out), *extras)
    gradients = turn_back_here(form, grads, arguments)
    return [
        gradient.astype(operand.dtype) for gradient, operand in zip(gradients, wanted_of(grads, operands), strict=True)
    ]


attention_p.def_impl(jax.jit(forward_here, static_argnames=("form", "dtype", "kernel")))
attention_grad_p.def_impl(jax.jit(backward_here, static_argnames=("form", "grads", "kernel")))
mlir.register_lowering(attention_p, mlir.lower_fun(forward_here, multiple_results=True))
mlir.register_lowering(attention_grad_p, mlir.lower_fun(backward_here, multiple_results=True))


def _without_unread(used: list[bool], *args: Any) -> tuple[list[bool], Any]:
    """Removes unused gradients of extras, such as that of a bias from the batch."""
    eqn = args[-1]  # newer versions of JAX pass more arguments before it
    grads = list(eqn.params["grads"])
    positions = [position for position, has_gradient in enumerate(grads) if has_gradient]
    if not any(used):
        return [False] * len(eqn.invars), None
    for position, is_used in zip(positions, used[3:], strict=True):
        grads[position] = is_used
    live = [True] * 3 + used[3:]
    outs = [var for var, is_live in zip(eqn.outvars, live, strict=True) if is_live]
    new = eqn.replace(outvars=outs, params=dict(eqn.params, grads=tuple(grads)))
    return [True] * len(eqn.invars), new


pe.dce_rules[attention_grad_p] = _without_unread


# ---- which dims are sharded together


def _resized(op: Equation, shapes: Sequence[Shape]) -> Mapping[str, Any]:
    """Returns the form for operands with padded batch dims, such as heads."""
    form = op.params["form"]
    sizes = (*shapes[0][: form.num_batch], *form.sizes[form.num_batch :])
    steps = tuple(
        replace(
            step,
            shape=tuple(
                sizes[label] if 0 <= label < form.num_batch else size
                for label, size in zip(step.labels, step.shape, strict=True)
            ),
        )
        for step in form.steps
    )
    return {"form": replace(form, sizes=sizes, steps=steps)}


def _batch_dims(op: Equation) -> set[Dim]:
    """Returns the dims whose rows are separate attentions; none where an extra that they share has a gradient."""
    form = op.params["form"]
    batch = range(op.params["form"].num_batch)
    grads = op.params.get("grads", ())
    num_rows = len(op.inputs) - len(form.extras)
    of_extras = [{dim: label for dim, label in enumerate(labels) if label in batch} for labels in form.extras]
    if any(is_smooth and len(dims) < len(batch) for dims, is_smooth in zip(of_extras, grads, strict=False)):
        return set()
    with_grads = [dims for dims, is_smooth in zip(of_extras, grads, strict=False) if is_smooth]
    values = [*[batch] * num_rows, *of_extras, *[batch] * (len(op.outputs) - len(with_grads)), *with_grads]
    return {(value, dim) for value, dims in enumerate(values) for dim in dims}


@rule(FORWARD, padding=Padding(_resized, dims=_batch_dims))
def _forward_dims(op: Equation, dims: Recorder) -> None:
    _join(dims, op.params["form"], op.inputs[:3], op.inputs[3:])
    form = op.params["form"]
    q, _, v = op.inputs[:3]
    out, *rows = op.outputs
    _join_rows(dims, form, q, (out, *rows))
    dims.join(v, form.num_batch + 1, out, form.keys)


@rule(BACKWARD, padding=Padding(_resized, dims=_batch_dims))
def _backward_dims(op: Equation, dims: Recorder) -> None:
    form = op.params["form"]
    num_rows = len(op.inputs) - len(form.extras)
    q, _, v, of_out, *rows = op.inputs[:num_rows]
    _join(dims, form, op.inputs[:3], op.inputs[num_rows:])
    _join_rows(dims, form, q, (of_out, *rows))
    dims.join(v, form.num_batch + 1, of_out, form.keys)
    for operand, gradient in zip(wanted_of(op.params["grads"], op.inputs), op.outputs, strict=True):
        dims.same(operand, gradient)


def _join(dims: Recorder, form: Form, operands: Sequence[int], extras: Sequence[int]) -> None:
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


def _join_rows(dims: Recorder, form: Form, q: int, values: Sequence[int]) -> None:
    for value in values:
        for dim in range(form.keys):
            dims.join(q, dim, value, dim)
