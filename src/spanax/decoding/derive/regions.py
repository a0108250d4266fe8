"""Regions of a forward pass that compute each token alone, though no operation of them does, as experts by sorting.

A region begins at rows and ends at rows. Its operations are taken from the forward pass of one token, in which sizes,
also those of slots, are what one token needs. With a scan over blocks of positions, as of chunked state spaces, it
computes each block from the carry, and its operations are those of the forward pass of one block. Whether other tokens
have no effect is for `proof` to find out.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping

from spanax.decoding.derive.forward import Forward
from spanax.decoding.derive.incremental import How, Part, Region, Steps, Want, all_steps, mixes
from spanax.trace.jaxpr.graph import Body, Op


def regions(forward: Forward, steps: Steps, resized: Callable[[int], Forward | None]) -> dict[int, Region]:
    """Returns the regions around the operations that steps compute for all positions, by the value that each computes.

    Args:
      forward: the forward pass.
      steps: its steps.
      resized: returns the forward pass of another number of tokens.
    """
    ends = [(body.body, *end) for body in all_steps(steps) for end in _ends(forward, body)]
    blocks = {size: resized(size) for size in {size for *_, sizes in ends for size in sizes}}
    twins = {
        size: dict(_twins(forward.graph.body, block.graph.body)) for size, block in blocks.items() if block is not None
    }
    found: dict[int, Region] = {}
    for body, result, inside, sizes in ends:
        for size in sizes:
            block = blocks[size]
            region = block and _region(forward, block, twins[size], result, {*body.inputs}, inside)
            if region and (region.scans or size == 1):
                found[result.value] = region
                break
    return found


def _twins(body: Body, short: Body) -> Iterator[tuple[int, int]]:
    """Yields the values of two traces that correspond: those of a line, where it has as many operations of a kind."""
    if len(body.inputs) == len(short.inputs):
        yield from zip(body.inputs, short.inputs, strict=True)
    groups: tuple[defaultdict[tuple[str, str], list[Op]], ...] = defaultdict(list), defaultdict(list)
    for group, ops in zip(groups, (body.ops, short.ops), strict=True):
        for op in ops:
            group[op.name, op.where].append(op)
    for key, several in groups[0].items():
        others = groups[1][key]
        for op, other in zip(several, others, strict=True) if len(several) == len(others) else ():
            yield from zip(op.outputs, other.outputs, strict=True)
            for pair in zip(op.bodies, other.bodies, strict=True):
                yield from _twins(*pair)


def _ends(forward: Forward, steps: Steps) -> Iterator[tuple[Want, frozenset[int], list[int]]]:
    """Yields rows through which all goes that follows from operations without rows.

    With each are the values inside, and the sizes of blocks, from the largest. Of several such rows, it is the last one
    before a row is computed from those of earlier positions.
    """
    last_reader = {want.value: index for index, part in enumerate(steps.parts) for want in part.operands}
    last_reader |= dict.fromkeys(steps.body.outputs, len(steps.parts))
    inside: set[int] = set()
    sizes = {1}
    end: Want | None = None
    for index, part in enumerate(steps.parts):
        results = {want.value for want in part.results}
        is_inside = not inside.isdisjoint(want.value for want in part.operands)
        if is_inside and end is not None and _reads_others(part):
            yield end, frozenset(inside), sorted(sizes, reverse=True)
            inside.clear()
            sizes = {1}
            end = None
        elif is_inside or (_is_whole(part) and part.op is not None and mixes(forward, part.op)):
            inside |= results
            if part.how is How.LOOP and forward.length % part.op.params["length"] == 0:
                sizes.add(forward.length // part.op.params["length"])
            value = part.results[0].value
            rows = forward.positions(value)
            if len(rows) == 1 and {each for each in inside if last_reader.get(each, -1) > index} == {value}:
                end = Want(value, rows)
    if end is not None:
        yield end, frozenset(inside), sorted(sizes, reverse=True)


def _is_whole(part: Part) -> bool:
    return not any(want.rows for want in part.results)


def _reads_others(part: Part) -> bool:
    """Whether a part computes a row from earlier positions."""
    if part.how in (How.LOOP, How.CALL):
        return not _is_whole(part)
    return part.how in (How.CACHE, How.STATE, How.TOTAL, How.WINDOW)


def _region(
    forward: Forward,
    block: Forward,
    twins: Mapping[int, int],
    result: Want,
    inputs: Container[int],
    inside: Container[int],
) -> Region | None:
    """Returns the region that computes a row; None if the forward pass of one block has no such region.

    Args:
      forward: the forward pass.
      block: that of one token, or of one block.
      twins: the corresponding values of it.
      result: the row.
      inputs: those of the body.
      inside: values that are not read as rows.
    """
    graph = forward.graph

    def operand(value: int) -> Want | None:
        """Returns what the region reads of a value, or None if it computes it."""
        is_of_tokens = forward.follows_tokens(value)
        rows = forward.positions(value) if is_of_tokens else ()
        is_known = value in inputs or forward.follows_context(value) or (is_of_tokens and len(rows) == 1)
        shape = tuple(block.length if dim in rows else size for dim, size in enumerate(graph.shape(value)))
        is_read = is_known and value not in inside and value in twins and block.graph.shape(twins[value]) == shape
        return Want(value, rows) if is_read else None

    if result.value not in twins:
        return None
    ops = graph.slice([result.value], lambda value: operand(value) is not None)
    values = dict.fromkeys(value for op in ops for value in op.inputs)
    operands = [want for want in map(operand, values) if want is not None]
    starts = [twins[want.value] for want in operands]
    end = twins[result.value]
    alone = block.graph.slice([end], starts)
    computed = {value: op for op in alone for value in op.outputs}
    if not all(value in {*starts, *block.graph.constants, *computed} for op in alone for value in op.inputs):
        return None
    over_blocks = (op for op in ops if op.name == "scan" and op.params["length"] * block.length == forward.length)
    pairs = ((computed.get(twins.get(op.outputs[0], -1)), op) for op in over_blocks)
    scans = {twin: op for twin, op in pairs if twin is not None}
    return Region(
        result, tuple(operands), tuple(ops), block.length, block.graph, tuple(alone), tuple(starts), end, scans
    )
