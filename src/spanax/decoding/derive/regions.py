"""Regions of a forward pass that compute each token alone, though no operation of them does, as experts by sorting.

A region begins at rows and ends at rows. Its operations are taken from the forward pass of one token, in which sizes,
also those of slots, are what one token needs. Whether the other tokens have no effect is for `proof` to find out.
"""

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping

from spanax.decoding.derive.forward import Forward
from spanax.decoding.derive.incremental import How, Part, Region, Steps, Want, all_steps, mixes
from spanax.trace.jaxpr.graph import Body, Op


def regions(forward: Forward, steps: Steps, single: Forward) -> dict[int, Region]:
    """Returns the regions around the operations that steps compute for all positions, by the value that each computes.

    Args:
      forward: the forward pass.
      steps: its steps.
      single: the forward pass of one token.
    """
    twins = dict(_twins(forward.graph.body, single.graph.body))
    found: dict[int, Region] = {}
    for body in all_steps(steps):
        for result, inside in _ends(forward, body):
            region = _region(forward, single, result, {*body.body.inputs}, inside, twins)
            if region is not None:
                found[result.value] = region
    return found


def _twins(body: Body, single: Body) -> Iterator[tuple[int, int]]:
    """Yields the values of two traces that correspond: those of a line, where it has as many operations of a kind."""
    if len(body.inputs) == len(single.inputs):
        yield from zip(body.inputs, single.inputs, strict=True)
    groups: tuple[defaultdict[tuple[str, str], list[Op]], ...] = defaultdict(list), defaultdict(list)
    for group, ops in zip(groups, (body.ops, single.ops), strict=True):
        for op in ops:
            group[op.name, op.where].append(op)
    for key, several in groups[0].items():
        others = groups[1][key]
        for op, other in zip(several, others, strict=True) if len(several) == len(others) else ():
            yield from zip(op.outputs, other.outputs, strict=True)
            for pair in zip(op.bodies, other.bodies, strict=True):
                yield from _twins(*pair)


def _ends(forward: Forward, steps: Steps) -> Iterator[tuple[Want, frozenset[int]]]:
    """Yields rows through which all goes that follows from operations without rows, with the values of these.

    Of several such rows, it is the last one before a row is computed from those of earlier positions.
    """
    last_reader = {want.value: index for index, part in enumerate(steps.parts) for want in part.operands}
    last_reader |= dict.fromkeys(steps.body.outputs, len(steps.parts))
    inside: set[int] = set()
    end: Want | None = None
    for index, part in enumerate(steps.parts):
        results = {want.value for want in part.results}
        is_inside = not inside.isdisjoint(want.value for want in part.operands)
        if is_inside and end is not None and _reads_others(part):
            yield end, frozenset(inside)
            inside.clear()
            end = None
        elif is_inside or (_is_whole(part) and part.op is not None and mixes(forward, part.op)):
            inside |= results
            value = part.results[0].value
            rows = forward.positions(value)
            if len(rows) == 1 and {each for each in inside if last_reader.get(each, -1) > index} == {value}:
                end = Want(value, rows)
    if end is not None:
        yield end, frozenset(inside)


def _is_whole(part: Part) -> bool:
    return not any(want.rows for want in part.results)


def _reads_others(part: Part) -> bool:
    """Whether a part computes a row from earlier positions."""
    if part.how in (How.LOOP, How.CALL):
        return not _is_whole(part)
    return part.how in (How.CACHE, How.STATE, How.TOTAL, How.WINDOW)


def _region(
    forward: Forward,
    single: Forward,
    result: Want,
    inputs: Container[int],
    inside: Container[int],
    twins: Mapping[int, int],
) -> Region | None:
    """Returns the region that computes a row; None if the forward pass of one token has no such region.

    Args:
      forward: the forward pass.
      single: that of one token.
      result: the row.
      inputs: those of the body.
      inside: values that are not read as rows.
      twins: the corresponding values of the pass of one token.
    """
    graph = forward.graph

    def operand(value: int) -> Want | None:
        """Returns what the region reads of a value, or None if it computes it."""
        is_of_tokens = forward.follows_tokens(value)
        rows = forward.positions(value) if is_of_tokens else ()
        is_known = value in inputs or forward.follows_context(value) or (is_of_tokens and len(rows) == 1)
        row = tuple(1 if dim in rows else size for dim, size in enumerate(graph.shape(value)))
        is_read = is_known and value not in inside and value in twins and single.graph.shape(twins[value]) == row
        return Want(value, rows) if is_read else None

    if result.value not in twins:
        return None
    ops = graph.slice([result.value], lambda value: operand(value) is not None)
    values = dict.fromkeys(value for op in ops for value in op.inputs)
    operands = [want for want in map(operand, values) if want is not None]
    starts = [twins[want.value] for want in operands]
    alone = single.graph.slice([twins[result.value]], starts)
    known = {*starts, *single.graph.constants, *(value for op in alone for value in op.outputs)}
    if not all(value in known for op in alone for value in op.inputs):
        return None
    return Region(result, tuple(operands), tuple(ops), single.graph, tuple(alone), tuple(starts), twins[result.value])
