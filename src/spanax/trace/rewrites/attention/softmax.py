"""Finds a softmax in a jaxpr: from its weights to its logits, and to the logit of a sink in its sum."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from spanax.trace.jaxpr.dim_maps.relations import Family
from spanax.trace.jaxpr.dim_maps.table import names
from spanax.trace.jaxpr.graph import Graph, Op
from spanax.trace.rewrites.attention.scores import NONE

SAME = frozenset({"convert_element_type", "stop_gradient", "copy", "optimization_barrier"})
VIEWS = names(Family.VIEW)

Labels = tuple[int, ...]
"""For every dim of a value, the label of the dim that it corresponds to."""

Term = tuple[int, Labels]
"""A value, with its tags."""


@dataclass(frozen=True)
class Softmax:
    """A softmax over one dim.

    Attributes:
      logits: the value of its logits.
      tags: their tags.
      sink: the value, or the number, of the logit of a sink: a term of the sum without a weight; None without one.
      sink_tags: its tags.
    """

    logits: int
    tags: Labels
    sink: int | float | None = None
    sink_tags: Labels = ()


def softmax_of(graph: Graph, weights: int, tags: Labels, keys: int) -> Softmax | None:
    """Returns the softmax over the dim tagged `keys` that computes weights; None if there is none."""
    op, tags = _producer(graph, weights, tags)
    is_cut = op is not None and op.name == "slice" and _is_all_but_last(graph, op, tags, keys)
    if op is not None and is_cut:
        op, tags = _producer(graph, op.inputs[0], tags)
    if op is None or op.name != "div":
        return None
    numerator, denominator = op.inputs
    exp = graph.origin(numerator, SAME)
    exp_op = graph.producers.get(exp)
    of_operands = operand_labels(op, tags)
    if exp_op is None or exp_op.name != "exp" or of_operands is None:
        return None
    more = _sum_of(graph, (denominator, of_operands[1]), exp, tags, keys)
    if more is None:
        return None
    logits, shift = _unshifted(graph, exp_op.inputs[0], tags, keys)
    if is_cut:
        return _without_last(graph, logits, tags, keys) if not more else None
    if not more:
        return Softmax(logits, tags)
    (term,) = more
    return _with_sink(graph, Softmax(logits, tags), term, shift) if keys not in term[1] else None


def _sum_of(graph: Graph, value: Term, exp: int, exp_tags: Labels, keys: int) -> list[Term] | None:
    """Returns the terms beside the sum of exponentials over keys, none or one; None if a value is no such sum."""
    op, tags = _producer(graph, *value)
    if op is None:
        return None
    if op.name == "reduce_sum":
        axis, *more_axes = op.params["axes"]
        (summed,) = op.inputs
        is_sum = not more_axes and graph.origin(summed, SAME) == exp and exp_tags[axis] == keys
        return [] if is_sum and tags == exp_tags[:axis] + exp_tags[axis + 1 :] else None
    if op.name != "add":
        return None
    of_operands = operand_labels(op, tags)
    if of_operands is None:
        return None
    terms = list(zip(op.inputs, of_operands, strict=True))
    for index, term in enumerate(terms):
        if _sum_of(graph, term, exp, exp_tags, keys) == []:
            return [terms[1 - index]]
    return None


def _unshifted(graph: Graph, logits: int, tags: Labels, keys: int) -> tuple[int, list[Term]]:
    """Returns logits before shifts that are constant along keys, such as the largest logit, and the shifts."""
    shifts = []
    while (shift := graph.producers.get(graph.origin(logits, SAME))) is not None and shift.name == "sub":
        of_operands = operand_labels(shift, tags)
        if of_operands is None or not _is_of_row(graph, shift.inputs[1], of_operands[1], keys):
            break
        shifts.append(_underlying(graph, shift.inputs[1], of_operands[1]))
        logits = shift.inputs[0]
    return logits, shifts


def _is_all_but_last(graph: Graph, op: Op, tags: Labels, keys: int) -> bool:
    """Whether a slice removes the last of the dim tagged `keys` alone."""
    size = graph.shape(op.inputs[0])
    expected = tuple(dim - (tag == keys) for dim, tag in zip(size, tags, strict=True))
    return not any(op.params["start_indices"]) and not op.params["strides"] and graph.shape(op.outputs[0]) == expected


def _without_last(graph: Graph, logits: int, tags: Labels, keys: int) -> Softmax | None:
    """Returns the softmax of logits whose last is that of a sink."""
    op = graph.producers.get(graph.origin(logits, SAME))
    if op is None or op.name != "concatenate" or len(op.inputs) != 2 or tags[op.params["dimension"]] != keys:
        return None
    scores, sink = op.inputs
    if graph.shape(sink)[op.params["dimension"]] != 1:
        return None
    return Softmax(scores, tags, sink, tuple(NONE if tag == keys else tag for tag in tags))


def _with_sink(graph: Graph, soft: Softmax, term: Term, shifts: list[Term]) -> Softmax | None:
    """Returns a softmax with a further term in its sum: the exponential of a sink, shifted as the logits are."""
    value, tags = term
    if not shifts and value in graph.constants and np.ndim(graph.constants[value]) == 0:
        number = float(np.asarray(graph.constants[value]))
        return Softmax(soft.logits, soft.tags, float(np.log(number))) if number > 0 else None
    op, tags = _producer(graph, value, tags)
    if op is None or op.name != "exp" or len(shifts) > 1:
        return None
    (sink,) = op.inputs
    if not shifts:
        return Softmax(soft.logits, soft.tags, sink, tags)
    shift = graph.producers.get(graph.origin(sink, SAME))
    if shift is None or shift.name not in ("sub", "neg"):
        return None
    of_operands = operand_labels(shift, tags)
    if of_operands is None or _underlying(graph, shift.inputs[-1], of_operands[-1]) != shifts[0]:
        return None
    if shift.name == "neg":
        return Softmax(soft.logits, soft.tags, 0.0)
    return Softmax(soft.logits, soft.tags, shift.inputs[0], of_operands[0])


def _producer(graph: Graph, value: int, tags: Labels) -> tuple[Op | None, Labels]:
    """Returns the operation that produces the value below views, with its tags; None if these are not known."""
    value, tags = _underlying(graph, value, tags)
    op = graph.producers.get(value)
    return (None if op is not None and op.name in SAME | VIEWS else op), tags


def _underlying(graph: Graph, value: int, tags: Labels) -> Term:
    """Returns the value below views, as far as tags are known."""
    while (op := graph.producers.get(value)) is not None and op.name in SAME | VIEWS:
        operand_tags = operand_labels(op, tags)
        if operand_tags is None:
            break
        value = op.inputs[0]
        tags = operand_tags[0]
    return value, tags


def _is_of_row(graph: Graph, value: int, tags: Labels, keys: int) -> bool:
    """Whether a value is constant along keys."""
    while keys in tags:
        op = graph.producers.get(value)
        if op is None or op.name not in SAME | VIEWS:
            return False
        operand_tags = operand_labels(op, tags)
        if operand_tags is None:
            return False
        value = op.inputs[0]
        tags = operand_tags[0]
    return True


def op_after_softmax(graph: Graph, value: int) -> Op | None:
    """Returns the last `mul` or `select_n` between a softmax and a value computed elementwise from it, if any."""
    first: Op | None = None
    for op in _ancestors(graph, value):
        if op.name in ("mul", "select_n") and first is None:
            first = op
        if op.name == "div":
            exp, total = (graph.origin(operand, SAME | VIEWS) for operand in op.inputs)
            producers = [graph.producers.get(operand) for operand in (exp, total)]
            if [op.name if op else "" for op in producers] == ["exp", "reduce_sum"] and first is not None:
                return first
    return None


def _ancestors(graph: Graph, value: int) -> Iterator[Op]:
    """Yields the elementwise operations and views that produce a value, nearest first, at most 64."""
    queue = [value]
    seen = set[int]()
    while queue and len(seen) < 64:
        op = graph.producers.get(queue.pop(0))
        if op is not None and op.outputs[0] not in seen and is_followed(op):
            seen.add(op.outputs[0])
            queue += op.inputs
            yield op


def is_followed(op: Op) -> bool:
    """Returns whether an operation computes its result elementwise, or is a view of its operand."""
    return op.is_elementwise or op.family is Family.VIEW


def operand_labels(op: Op, labels: Labels) -> list[Labels] | None:
    """Returns the labels of an operation's operands, given those of its result; None if they cannot be propagated."""
    return op.dim_map.operand_labels(labels, NONE) if is_followed(op) else None
