"""The arrays of a matched pair of groups, one for each layer."""

import math
from collections.abc import Iterator, Mapping, Sequence

from spanax.interop.mapping import ALONG, Array
from spanax.interop.own_class.groups import Pair
from spanax.interop.own_class.slots import Slot, without_ones


def arrays_of_pair(pair: Pair, fits: Mapping[str, str]) -> Iterator[Array]:
    """Yields the arrays of a pair, with layers unstacked; `fits` are the dims of each role."""
    num_each = len(pair.theirs.members) // len(pair.ours.members)
    for number, member in enumerate(pair.ours.members):
        tensors = pair.theirs.members[number * num_each : (number + 1) * num_each]
        for role, slot in member.items():
            names = tuple(tensor[role].name for tensor in tensors)
            dims = fits[role]
            num_dims = len(dims.partition(" -> ")[2].split())
            lead = slot.shape[: len(slot.shape) - num_dims]
            shape = slot.shape[len(lead) :]
            num_stacked = len(without_ones(lead))
            if not lead:
                yield Array(slot.path, slot.path, None, shape, names, dims)
            elif num_stacked > 1 or pair.ours.sizes:
                yield from _stacked(slot, lead, shape, names, dims)
            else:
                for layer, name in enumerate(names):
                    yield Array(_numbered(slot.path, layer), slot.path, layer, shape, (name,), dims)


def _stacked(
    slot: Slot, lead: tuple[int, ...], shape: tuple[int, ...], names: Sequence[str], dims: str
) -> Iterator[Array]:
    """Yields the arrays of a stack whose layers have several of a tensor, such as one for each expert."""
    dims = dims.replace(" -> ", f" -> {ALONG} ")
    *layers, along = lead
    if not layers:
        yield Array(slot.path, slot.path, None, (along, *shape), tuple(names), dims)
    else:
        for layer in range(math.prod(layers)):
            part = tuple(names[layer * along : (layer + 1) * along])
            yield Array(_numbered(slot.path, layer), slot.path, layer, (along, *shape), part, dims)


def _numbered(path: str, layer: int) -> str:
    """Returns the path of a layer of a stack, as in a list if it is in none."""
    first, *rest = path.split(".")
    is_listed = any(part.isdecimal() for part in rest)
    return ".".join([path, str(layer)] if is_listed else [first, str(layer), *rest])
