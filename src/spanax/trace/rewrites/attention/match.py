"""Matches softmax attention in a jaxpr by its structure.

Attention is two products with a softmax between them. The operations between the first product and the softmax become
the steps of a `Form`. Where an operation does not match, the jaxpr is left unchanged.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from spanax.trace.jaxpr.graph import CALLS, Graph, Op, from_jaxpr
from spanax.trace.jaxpr.loops import LOOPS, const_pairs
from spanax.trace.rewrites.attention.kernels import Kernel
from spanax.trace.rewrites.attention.scores import NONE, Form, Step
from spanax.trace.rewrites.attention.softmax import (
    Labels,
    Softmax,
    is_followed,
    op_after_softmax,
    operand_labels,
    softmax_of,
)
from spanax.trace.rewrites.attention.stored_masks import of_positions


@dataclass(frozen=True, eq=False)
class AttentionMatch:
    """An attention matched in a jaxpr.

    Attributes:
      form: the steps from q.k to its logits.
      operands: of q, k, v: the value and the permutation of its dims into the form.
      extras: the values of the form's extras.
      out: labels of the original result's dims; the label of the width is one more than that of the keys.
      kernel: the platform kernel that computes it, if any.
      op: its second product, where it is computed in blocks instead.
      why: why it is, as the end of a sentence.
    """

    form: Form
    operands: tuple[tuple[int, Labels], ...]
    extras: tuple[int, ...]
    out: Labels
    kernel: Kernel | None = None
    op: Op | None = None
    why: str = ""

    @property
    def needs(self) -> tuple[int, ...]:
        """The values of its operands."""
        return (*(value for value, _ in self.operands), *self.extras)


@dataclass(frozen=True)
class Mismatch:
    """A softmax between two products that is not supported, and why."""

    why: str
    op: Op


Outside = Mapping[int, Op]
"""The producers of values outside of a body that are computed from smaller arrays, such as a mask of documents.

Those that the body reads are under their numbers inside of it as well.
"""


def outside_of(graph: Graph, op: Op, outside: Outside) -> Outside:
    """Returns what the bodies of an operation can compute again; `outside` is what its own body can."""
    pairs = const_pairs(graph, op) if op.name in LOOPS else graph.wires(op).inputs
    result = dict(outside)
    for outer, inner in pairs:
        producers = _producers(graph, outer, outside)
        if outer in producers:
            result |= producers
            result[inner] = producers[outer]
    return result


def _producers(graph: Graph, value: int, outside: Outside) -> dict[int, Op]:
    """Returns the producers of a value, from arrays of at most half of its size; none if it needs a larger one."""
    result: dict[int, Op] = {}
    most = graph.avals[value].size // 2
    stack = [value]
    while stack:
        operand = stack.pop()
        positions = _positions(graph, operand, outside)
        if operand in result or positions is None and graph.avals[operand].size <= most:
            continue
        op = graph.producers.get(operand) or outside.get(operand)
        if positions is not None:
            result |= positions
        elif op is not None and (is_followed(op) or op.name == "gather"):
            result[operand] = op
            stack += op.inputs
        else:
            return {}
    return result


def _positions(graph: Graph, value: int, outside: Outside) -> dict[int, Op] | None:
    """Returns the producers of a value and of all that it is computed from; None unless these are positions alone."""
    result: dict[int, Op] = {}
    stack = [value]
    while stack:
        operand = stack.pop()
        op = graph.producers.get(operand) or outside.get(operand)
        if op is None and not _is_literal(graph, operand):
            return None
        if op is not None and operand not in result:
            if op.name != "iota" and not is_followed(op):
                return None
            result[operand] = op
            stack += op.inputs
    return result


def attentions(graph: Graph, outside: Outside) -> dict[Op, AttentionMatch | Mismatch]:
    """Returns matches and mismatches by the operation of the second product."""
    matches: dict[Op, AttentionMatch | Mismatch] = {}
    for op in graph.body.ops:
        if op.name != "dot_general":
            continue
        for side in (0, 1):
            match = _attention(graph, op, side, outside)
            if match is not None:
                matches[op] = match
                break
    return matches


def _attention(graph: Graph, op: Op, side: int, outside: Outside) -> AttentionMatch | Mismatch | None:
    """Matches the attention whose weights are operand `side` of its second product."""
    weights = op.inputs[side]
    values = op.inputs[1 - side]
    shape = graph.shape(weights)
    tags = tuple(dim if size > 1 else NONE for dim, size in enumerate(shape))
    contract, batch = op.params["dimension_numbers"]
    if len(contract[side]) != 1 or not jnp.issubdtype(graph.avals[weights].dtype, jnp.floating):
        return None
    keys = contract[side][0]
    if shape[keys] <= 1:
        return None
    soft = softmax_of(graph, weights, tags, keys)
    if soft is None:
        weight_op = op_after_softmax(graph, weights)
        why = "dropout on its weights" if weight_op and weight_op.name in ("mul", "select_n", "div") else None
        return Mismatch(f"{why} ('{weight_op.name}' between softmax and values)", op) if why and weight_op else None
    steps = Steps(graph, keys, {tag for tag in tags if tag != NONE}, outside)
    if steps.sink(soft) is None or steps.grow(soft.logits, soft.tags) is None or steps.score is None:
        return None
    return steps.matched(op, side, values, dict(zip(batch[1 - side], batch[side], strict=True)))


class Steps:
    """The steps between the first product and the logits, collected backward from the logits.

    A value with several labelings (positions of queries and of keys are often one array) becomes several steps. Inputs
    and results of other operations are extras.
    """

    def __init__(self, graph: Graph, keys: int, tags: set[int], outside: Outside):
        self._graph = graph
        self._outside = outside
        self._keys = keys
        self._tags = tags
        self.steps: list[Step] = []
        self._known: dict[tuple[int, Labels], int] = {}
        self.extras: list[tuple[int, Labels]] = []
        self.score: Op | None = None
        self.num_sink = 0
        self._score_tags: Labels = ()

    def grow(self, value: int, tags: Labels) -> int | None:
        """Returns the step that produces a value under some tags, after adding its operands; None if unsupported."""
        key = (value, tags)
        if key not in self._known:
            step = self._new_step(value, tags)
            if step is None:
                return None
            self.steps.append(step)
            self._known[key] = len(self.steps) - 1
        return self._known[key]

    def sink(self, soft: Softmax) -> int | None:
        """Returns the number of its further steps after adding those of the sink; None if unsupported."""
        if isinstance(soft.sink, float):
            dtype = np.dtype("float32")
            self.steps.append(Step("literal", None, (("value", soft.sink),), (), (), (), dtype))
        elif soft.sink is not None and self.grow(soft.sink, soft.sink_tags) is None:
            return None
        self.num_sink = len(self.steps)
        return self.num_sink

    def _new_step(self, value: int, tags: Labels) -> Step | None:
        graph = self._graph
        shape = graph.shape(value)
        dtype = np.dtype(graph.avals[value].dtype)
        op = graph.producers.get(value) or self._outside.get(value)
        rest = (tags, shape, dtype)
        if _is_literal(graph, value):
            literal = np.asarray(graph.constants[value]).item()
            return Step("literal", None, (("value", literal),), (), *rest)
        if (dim := _counts(graph, value)) is not None:
            return Step("iota", None, (("dimension", dim),), (), *rest)
        if value in graph.constants and (stored := self._stored(value, tags)) is not None:
            return stored
        if op is not None and self._is_score(op, tags):
            self.score = op
            self._score_tags = tags
            return Step("score", None, (), (), *rest)
        if op is not None and op.name == "iota":
            return Step("iota", None, (("dimension", int(op.params["dimension"])),), (), *rest)
        if op is not None and op.name == "gather" and (step := self._lookup(op, tags)) is not None:
            return step
        if op is not None and is_followed(op) and op.name != "sharding_constraint":
            operand_tags = operand_labels(op, tags)
            args = (
                [self.grow(*pair) for pair in zip(op.inputs, operand_tags, strict=True)]
                if operand_tags is not None
                else [None]
            )
            if all(arg is not None for arg in args):
                params = {name: _plain(param) for name, param in op.params.items()}
                return Step(
                    op.name,
                    op.eqn.primitive,
                    tuple(sorted(params.items())),
                    tuple(step for step in args if step is not None),
                    *rest,
                )
        if self._comes_of_score(value):
            return None
        self.extras.append((value, tags))
        return Step("extra", None, (("at", len(self.extras) - 1),), (), *rest)

    def _stored(self, value: int, tags: Labels) -> Step | None:
        """Returns the step of a mask that is a constant array, after adding its operands; None if it is none."""
        graph = self._graph
        dims = [dim for dim, size in enumerate(graph.shape(value)) if size > 1]
        if value in graph.captured or len(dims) != 2 or self._keys not in (tags[dim] for dim in dims):
            return None
        queries, keys = sorted(dims, key=lambda dim: tags[dim] == self._keys)
        jaxpr = of_positions(np.asarray(graph.constants[value]), queries, keys)
        if jaxpr is None:
            return None
        inner = from_jaxpr(jaxpr, CALLS)
        steps = Steps(inner, self._keys, self._tags, {})
        steps.grow(inner.body.outputs[0], tags)
        added = [replace(step, args=tuple(arg + len(self.steps) for arg in step.args)) for step in steps.steps]
        self.steps += added[:-1]
        return added[-1]

    def _lookup(self, op: Op, tags: Labels) -> Step | None:
        """Returns the step that looks up numbers of a table, such as biases of distances; None for other gathers."""
        graph = self._graph
        table, indices = op.inputs
        dims = op.params["dimension_numbers"]
        (*looked_up,) = dims.collapsed_slice_dims
        sizes = tuple(1 if dim in looked_up else size for dim, size in enumerate(graph.shape(table)))
        is_plain = len(looked_up) == 1 and dims.start_index_map == dims.collapsed_slice_dims
        is_lookup = is_plain and not dims.operand_batching_dims and sizes == op.params["slice_sizes"]
        if not is_lookup or self._keys not in tags or self._comes_of_score(table):
            return None
        of_slices = iter(dims.offset_dims)
        of_table = tuple(NONE if dim in looked_up else tags[next(of_slices)] for dim in range(len(sizes)))
        of_indices = [tag for dim, tag in enumerate(tags) if dim not in dims.offset_dims]
        index = self.grow(indices, (*of_indices, NONE))
        if index is None or self._keys in of_table:
            return None
        self.extras.append((table, of_table))
        aval = graph.avals[table]
        at = (("at", len(self.extras) - 1),)
        self.steps.append(Step("extra", None, at, (), of_table, graph.shape(table), np.dtype(aval.dtype)))
        # A missing index is NaN with and without saying so, and NaN is not equal to itself.
        params = tuple((name, op.params[name]) for name in ("dimension_numbers", "mode"))
        result = graph.avals[op.outputs[0]]
        args = (len(self.steps) - 1, index)
        return Step("gather", op.eqn.primitive, params, args, tags, result.shape, np.dtype(result.dtype))

    def _is_score(self, op: Op, tags: Labels) -> bool:
        """Whether an operation is q.k: a single product whose result has all dims of the logits."""
        is_known = self.score is None or self.score is op
        labeled = [tag for tag in tags if tag != NONE]
        return (
            op.name == "dot_general" and is_known and len(labeled) == len(set(labeled)) and set(labeled) == self._tags
        )

    def _comes_of_score(self, value: int) -> bool:
        """Whether a value depends on q.k."""
        return self.score in self._graph.slice([value])

    def matched(self, second: Op, side: int, values: int, batch: dict[int, int]) -> AttentionMatch | None:
        """Returns the attention if the dims of both products match."""
        graph = self._graph
        first = self.score
        assert first is not None
        contract, batched = first.params["dimension_numbers"]
        free_dims = first.dim_map.free_dims
        keys_at = self._score_tags.index(self._keys)
        q_side = next((operand for operand in (0, 1) if keys_at not in free_dims[operand].values()), None)
        num_batch = len(batched[0])
        if q_side is None or keys_at < num_batch or len(free_dims[1 - q_side]) != 1:
            return None
        q_free = free_dims[q_side]
        shape = graph.shape(first.outputs[0])
        if not q_free:
            return None
        queries = max(q_free, key=lambda dim: (shape[q_free[dim]] == shape[keys_at], shape[q_free[dim]], -dim))
        rows = [dim for dim in q_free if dim != queries]
        order = [*range(num_batch), *(q_free[dim] for dim in (*rows, queries)), keys_at]  # dims of q.k, by label
        label_of_tag = {self._score_tags[dim]: label for label, dim in enumerate(order) if shape[dim] > 1}
        label_of_tag[NONE] = NONE
        relabelled = lambda tags: tuple(label_of_tag[tag] for tag in tags)  # noqa: E731
        q_order = (*batched[q_side], *rows, queries, *contract[q_side])
        k_order = (*batched[1 - q_side], *free_dims[1 - q_side], *contract[1 - q_side])
        v = self._values(second, side, batch, label_of_tag, num_batch)
        if v is None or len(contract[0]) != 1:
            return None
        values_of = [value for value, _ in self.extras]
        form = Form(
            num_batch=num_batch,
            num_rows=len(rows),
            sizes=tuple(shape[dim] for dim in order),
            steps=tuple(replace(step, labels=relabelled(step.labels)) for step in self.steps),
            extras=tuple(relabelled(tags) for _, tags in self.extras),
            precision=(_plain(first.params["precision"]), _plain(second.params["precision"])),
            dtype=np.dtype(graph.avals[first.outputs[0]].dtype),
            sink=self.num_sink - 1 if self.num_sink else None,
            same=tuple(values_of.index(value) for value in values_of),
        )
        operands = ((first.inputs[q_side], q_order), (first.inputs[1 - q_side], k_order), (values, v))
        out = self._result(second, side, v[-1], label_of_tag, len(order))
        return AttentionMatch(form, operands, tuple(value for value, _ in self.extras), out)

    def _values(
        self, second: Op, side: int, batch: dict[int, int], label_of: dict[int, int], num_batch: int
    ) -> Labels | None:
        """Returns the values' dims in the order (batch, keys, width); -1 for a missing dim of size 1."""
        tag = lambda dim: dim if self._graph.shape(second.inputs[side])[dim] > 1 else NONE  # noqa: E731
        labels = {label_of[tag(weight_dim)]: dim for dim, weight_dim in batch.items() if tag(weight_dim) != NONE}
        contract, _ = second.params["dimension_numbers"]
        free = list(second.dim_map.free_dims[1 - side])
        batch_labels = {label for label in label_of.values() if NONE < label < num_batch}
        if set(labels) != batch_labels or len(free) != 1:
            return None
        return (*(labels.get(label, -1) for label in range(num_batch)), contract[1 - side][0], free[0])

    def _result(self, second: Op, side: int, width: int, label_of: dict[int, int], width_label: int) -> Labels:
        """Returns the label of each dim of the second product's result."""
        graph = self._graph
        _, batched = second.params["dimension_numbers"]
        weight_shape = graph.shape(second.inputs[side])
        label = lambda dim: label_of[dim] if weight_shape[dim] > 1 else NONE  # noqa: E731
        free = [label(dim) for dim in second.dim_map.free_dims[side]]
        dims = [free, [width_label]] if side == 0 else [[width_label], free]
        return tuple([label(dim) for dim in batched[side]] + dims[0] + dims[1])


def _is_literal(graph: Graph, value: int) -> bool:
    """Returns whether a value is a number that is known while tracing."""
    return value in graph.constants and value not in graph.captured and np.ndim(graph.constants[value]) == 0


def _counts(graph: Graph, value: int) -> int | None:
    """Returns the dim along which a constant array counts from 0, as `np.arange` does; None if it is no such array."""
    if value not in graph.constants or value in graph.captured or not np.ndim(graph.constants[value]):
        return None
    shape = np.shape(graph.constants[value])
    dims = [dim for dim, size in enumerate(shape) if size > 1]
    if len(dims) != 1 or graph.avals[value].dtype.kind not in "iu":
        return None
    array = np.asarray(graph.constants[value])
    return dims[0] if (array.ravel() == np.arange(array.size)).all() else None


def _plain(value: Any) -> Any:
    """Converts lists in a parameter to tuples, so that it is hashable."""
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


def canonical(array: Any, order: Labels) -> Any:
    """Returns an operand transposed to the layout of the form."""
    present = [dim for dim in order if dim >= 0]
    dropped = [dim for dim in range(array.ndim) if dim not in present]
    remaining = [dim for dim in range(array.ndim) if dim not in dropped]
    array = lax.transpose(lax.squeeze(array, dropped), [remaining.index(dim) for dim in present])
    return lax.expand_dims(array, [i for i, dim in enumerate(order) if dim < 0])


def as_written(array: Any, labels: Labels, shape: tuple[int, ...]) -> Any:
    """Returns a result of shape (batch, rows, queries, width) in its original layout."""
    present = [label for label in labels if label != NONE]
    width = array.ndim  # labels include the keys, which are not a dim of the result
    dims = [width - 1 if label == width else label for label in present]
    dropped = [dim for dim in range(array.ndim) if dim not in dims]
    remaining = [dim for dim in range(array.ndim) if dim in dims]
    array = lax.transpose(lax.squeeze(array, dropped), [remaining.index(dim) for dim in dims])
    return lax.reshape(array, shape)
