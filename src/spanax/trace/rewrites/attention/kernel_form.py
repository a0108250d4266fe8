"""The attention that a kernel computes, as a form of its own: its operands are ids of queries and keys, and sinks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spanax.trace.jaxpr.graph import from_jaxpr
from spanax.trace.rewrites.attention.kernels import Kernel
from spanax.trace.rewrites.attention.masks import Condition, Ids, plain, reads_of, steps_of
from spanax.trace.rewrites.attention.match import Steps
from spanax.trace.rewrites.attention.scores import NONE, Form, Step, evaluated

NO_QUERY = np.iinfo(np.int32).min
NO_KEY = NO_QUERY + 1
"""The ids of queries that see no key, and of keys that no query sees."""


def kernel_form(form: Form, kernel: Kernel, batch: Sequence[int] = (), heads: Sequence[int] = ()) -> Form:
    """Returns the attention of the same dims that a kernel computes.

    Its extras, if the kernel has ids, are those of queries, then those of keys; the last one is a sink, if it has one.

    Args:
      form: the attention.
      kernel: the kernel.
      batch: the batch dims of the ids.
      heads: the dims of the sink.
    """
    sizes = form.sizes
    of_score = tuple(label if size > 1 else NONE for label, size in enumerate(sizes))
    alike = [*batch, form.queries] if kernel.has_ids else []
    shapes = [tuple(sizes[label] for label in alike), tuple(sizes[label] for label in (*batch, form.keys))]

    def logits(q: Any, k: Any, *ids: Any) -> Any:
        dims = (((q.ndim - 1,), (k.ndim - 1,)), (tuple(range(form.num_batch)),) * 2)
        scores = lax.dot_general(q, k, dims) * jnp.float32(kernel.scale)
        if kernel.cap is not None:
            scores = jnp.tanh(scores / kernel.cap) * kernel.cap
        seen = None
        if not kernel.pattern.is_full:
            at = lambda label: lax.broadcasted_iota(jnp.int32, _one(form, {label}), label)  # noqa: E731
            seen = kernel.pattern.sees(at(form.queries), at(form.keys))
        for q_ids, k_ids in zip(ids[:1], ids[1:], strict=True):
            present = [{*batch, label} for label in (form.queries, form.keys)]
            q_ids, k_ids = (each.reshape(_one(form, dims)) for each, dims in zip((q_ids, k_ids), present, strict=True))
            seen = q_ids == k_ids if seen is None else seen & (q_ids == k_ids)
        hidden = -jnp.inf if kernel.masked is None else kernel.masked
        return scores if seen is None else jnp.where(seen, scores, hidden)

    operands = [
        jax.ShapeDtypeStruct((*sizes[: form.keys], 1), jnp.float32),
        jax.ShapeDtypeStruct((*sizes[: form.num_batch], sizes[form.keys], 1), jnp.float32),
        *[jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes if kernel.has_ids],
    ]
    graph = from_jaxpr(jax.make_jaxpr(logits)(*operands))
    steps = Steps(graph, form.keys, set(of_score) - {NONE}, {})
    steps.grow(graph.body.outputs[0], of_score)
    order = [graph.body.inputs[2:].index(value) for value, _ in steps.extras]
    labels = [*alike], [*batch, form.keys]
    # Ids that are the same array see themselves, whichever names they have.
    same = (0, 0) if kernel.masked is None else (0, 1)
    plain_form = replace(
        form,
        steps=tuple(_with_extra(step, order) for step in steps.steps),
        extras=tuple(map(tuple, labels)) if kernel.has_ids else (),
        dtype=np.dtype("float32"),
        same=same if kernel.has_ids else (),
        sink=None,
    )
    return _with_sink(plain_form, heads) if kernel.has_sink else plain_form


def _with_sink(form: Form, heads: Sequence[int]) -> Form:
    """Returns a form with a sink of each head as its last extra."""
    at = len(form.extras)
    dims = tuple(form.sizes[label] for label in heads)
    sink = Step("extra", None, (("at", at),), (), tuple(heads), dims, np.dtype("float32"))
    steps = [replace(step, args=tuple(arg + 1 for arg in step.args)) for step in form.steps]
    return replace(form, steps=(sink, *steps), extras=(*form.extras, tuple(heads)), same=(*form.same, at), sink=0)


def _with_extra(step: Any, order: Sequence[int]) -> Any:
    return replace(step, params=(("at", order[step.param("at")]),)) if step.name == "extra" else step


def _one(form: Form, labels: set[int]) -> tuple[int, ...]:
    """Returns the shape of the scores with size 1 along all other labels."""
    return tuple(size if label in labels else 1 for label, size in enumerate(form.sizes))


def with_operands(form: Form, kernel: Kernel, extras: Sequence[Any]) -> tuple[Form, list[Any]]:
    """Returns the form that a kernel computes, and its operands after q, k and v."""
    found = plain(form)
    batch: list[int] = []
    operands: list[Any] = []
    if not isinstance(found, str) and found.ids is not None:
        batch, *operands = _ids_of(form, found.ids, extras)
    if form.sink is None:
        return kernel_form(form, kernel, batch), operands
    sizes = _sizes_of(form, [form.sink])
    heads = [label for label in range(form.queries) if sizes[label] > 1]
    sink = evaluated(form, [form.sink], extras, sizes)[form.sink].astype(jnp.float32)
    sink = jnp.broadcast_to(sink, sizes).reshape([sizes[label] for label in heads])
    return kernel_form(form, kernel, batch, heads), [*operands, sink]


def _ids_of(form: Form, ids: Ids, extras: Sequence[Any]) -> tuple[list[int], Any, Any]:
    """Returns the batch dims of ids, and the int32 ids of queries and keys, (those dims, queries or keys)."""
    of_queries = [step for step in (ids.queries, *steps_of(ids.if_query)) if step is not None]
    of_keys = [step for step in (ids.keys, *steps_of(ids.if_key)) if step is not None]
    sizes = _sizes_of(form, [*of_queries, *of_keys])
    batch = [label for label in range(form.num_batch) if sizes[label] > 1]
    result = []
    sides = ((form.queries, ids.queries, ids.if_query, NO_QUERY), (form.keys, ids.keys, ids.if_key, NO_KEY))
    for label, step, condition, nothing in sides:
        reads = [*([] if step is None else [step]), *steps_of(condition)]
        own = {each: size if each in (*batch, label) else 1 for each, size in enumerate(form.sizes)}
        values = evaluated(form, reads, extras, [own[each] for each in range(len(form.sizes))])
        shape = tuple(own[each] for each in range(len(form.sizes)))
        numbers = jnp.zeros(shape, jnp.int32) if step is None else values[step].astype(jnp.int32)
        if condition is not True:
            numbers = jnp.where(_holds(condition, values), numbers, nothing)
        dims = tuple(form.sizes[each] for each in (*batch, label))
        result.append(jnp.broadcast_to(numbers, shape).reshape(dims))
    return batch, result[0], result[1]


def _sizes_of(form: Form, steps: Sequence[int]) -> list[int]:
    """Returns the sizes of the labels along which some steps vary; 1 for others."""
    reads = reads_of(form)
    labels = set().union(*(reads[step][0] for step in steps))
    return [size if label in labels else 1 for label, size in enumerate(form.sizes)]


def _holds(condition: Condition, values: Mapping[int, Any]) -> Any:
    if isinstance(condition, bool):
        return condition
    kind, *rest = condition
    if kind == "step":
        return values[rest[0]]
    parts = [_holds(part, values) for part in rest]
    if kind == "not":
        return ~parts[0]
    result = parts[0]
    for part in parts[1:]:
        result = result & part if kind == "and" else result | part
    return result
