"""The order in which a memory-minimizing compiler runs the operations of a body.

An operation runs just before its first consumer. Sums over the batch (gradients) run in trace order; otherwise each
would wait for the optimizer's update and keep its activations alive until then.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from spanax.trace.analysis.fusion import ALIASES
from spanax.trace.jaxpr.graph import Body, Op

if TYPE_CHECKING:
    from spanax.trace.traced import Traced

SUM = "add_any"
"""Autodiff's sum of the gradients that meet in one value."""

PASSING = ALIASES | {"convert_element_type", SUM}
"""Operations through which a gradient stays the gradient of the same value."""


def order(traced: "Traced") -> dict[Body, tuple[Op, ...]]:
    """The operations of every body in the order in which they run.

    Source: the schedules of steps compiled for TPUs and GPUs, docs/check.md.
    """
    return {body: _ordered(traced, body) for body in traced.kept}


def _ordered(traced: "Traced", body: Body) -> tuple[Op, ...]:
    makers = {value: op for op in body.ops for value in op.outputs}
    traced_at = {op: at for at, op in enumerate(body.ops)}
    firm = {makers[value] for value in (*_gradients(traced, body), *body.outputs) if value in makers}
    found: dict[Op, None] = {}
    for op in (*sorted(firm, key=lambda op: traced_at[op]), *body.ops):
        if op not in found:
            found |= dict.fromkeys(_needed(op, makers, found))
    return tuple(found)


def _needed(op: Op, makers: dict[int, Op], done: dict[Op, None]) -> Iterator[Op]:
    """What must run before an operation and has not, each part after what it needs; and the operation itself."""
    seen = {op}
    stack = [(op, iter(op.inputs))]
    while stack:
        last, left = stack[-1]
        for value in left:
            needed = makers.get(value)
            if needed is not None and needed not in seen and needed not in done:
                seen.add(needed)
                stack.append((needed, iter(needed.inputs)))
                break
        else:
            yield last
            stack.pop()


def _gradients(traced: "Traced", body: Body) -> Iterator[int]:
    """Sums over the batch; of those that are added up, the last sum."""
    is_batched = {
        value: not traced.batch_labels.isdisjoint(traced.sharding_keys[value].labels) for value in _values(body)
    }
    readers: dict[int, list[Op]] = defaultdict(list)
    summed: dict[int, Op] = {}
    for op in body.ops:
        for value in op.inputs:
            readers[value].append(op)
        if any(is_batched[value] for value in op.inputs) or (
            op.name in PASSING and any(value in summed for value in op.inputs)
        ):
            summed |= {value: op for value in op.outputs if not is_batched[value]}
    added = set[int]()
    for value, maker in reversed(summed.items()):
        after = [op for op in readers[value] if op.name in PASSING]
        if any(op.name == SUM or added.intersection(op.outputs) for op in after):
            added.add(value)
        elif maker.name == SUM or maker.name not in PASSING:
            yield value


def _values(body: Body) -> Iterator[int]:
    yield from body.inputs
    for op in body.ops:
        yield from (*op.inputs, *op.outputs)
