"""Parses the log of XLA's partitioner for tensors that it replicates because it cannot reshard them."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from spanax.check.hlo.module import TYPES, Module, user_line

WARNING = re.compile(
    r"\[SPMD\] Involuntary full rematerialization\. The compiler cannot go from sharding (?P<before>\{.*?\}) "
    r"to (?P<after>\{.*?\}) efficiently for HLO operation %?(?P<name>[\w.-]+) = (?P<dtype>\w+)\[(?P<dims>[\d,]*)\]"
    r"[^\n]*?(?=\. As the last resort|$)",
    re.MULTILINE | re.IGNORECASE,
)
"""Source: openxla/xla xla/service/spmd/spmd_partitioner.cc, as jaxlib 0.10.2 and 0.12.0.1 print it."""

BITS = dict(TYPES.values())
"""The bits of an element, by dtype."""

_OP_NAME = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_FILE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_TILES = re.compile(r"devices=\[([\d,]+)\]")
_AXIS = re.compile(r"'(\w+)'=(\d+)")
_USED = re.compile(r"'(\w+)'(?::\(\d+\)(\d+))?")


@dataclass(frozen=True)
class ReplicatedTensor:
    """A tensor that the partitioner replicates on every device to change its sharding.

    Attributes:
      name: the name of the instruction.
      shape: the global shape, as XLA prints it.
      before: the sharding before, as XLA prints it.
      after: the requested sharding.
      num_bytes: bytes of the global tensor.
      op_name: the JAX operation with its name stack.
      source: file and line of the user's code; empty if unknown.
    """

    name: str
    shape: str
    before: str
    after: str
    num_bytes: int
    op_name: str = ""
    source: str = ""


def replicated_tensors(log: str, module: Module | None = None) -> tuple[ReplicatedTensor, ...]:
    """Returns the replicated tensors in a compiler's log, without duplicates and largest first.

    Args:
      log: the log of the compiler.
      module: the program, which resolves the stack frame ids in the log to source lines.

    Example:
      >>> log = (
      ...     "W1 1 spmd_partitioner.cc:656] [SPMD] Involuntary full rematerialization. The compiler cannot go from "
      ...     "sharding {devices=[2,2,2]<=[8]} to {devices=[8,1,1]<=[8]} efficiently for HLO operation "
      ...     "%copy.1 = f32[16,8,4]{2,1,0} copy(%sin.0), sharding={devices=[2,2,2]<=[8]}, "
      ...     'metadata={op_name="jit(f)/sin" stack_frame_id=3}. As the last resort, SPMD will replicate the tensor.'
      ... )
      >>> [tensor] = replicated_tensors(log)
      >>> tensor.shape, tensor.num_bytes, tensor.op_name
      ('f32[32,16,8]', 16384, 'jit(f)/sin')
    """
    tensors = {_tensor(match, module): None for match in WARNING.finditer(log)}
    return tuple(sorted(tensors, key=lambda tensor: (-tensor.num_bytes, tensor.name)))


def _tensor(match: re.Match[str], module: Module | None) -> ReplicatedTensor:
    dims = [int(size) for size in match["dims"].split(",") if size]
    sizes = [dim * num_shards for dim, num_shards in zip(dims, _num_shards(match["before"], len(dims)), strict=True)]
    op_name = _OP_NAME.search(match[0])
    return ReplicatedTensor(
        name=match["name"],
        shape=f"{match['dtype']}[{','.join(map(str, sizes))}]",
        before=match["before"],
        after=match["after"],
        num_bytes=math.ceil(math.prod(sizes) * BITS[match["dtype"]] / 8),
        op_name=op_name[1] if op_name else "",
        source=user_line(list(_lines(match[0], module))),
    )


def _num_shards(sharding: str, num_dims: int) -> list[int]:
    """Returns the number of shards of each dim, for XLA's tile (`devices=[8,1]<=[8]`) and named sharding formats."""
    if tiles := _TILES.search(sharding):
        return ([int(size) for size in tiles[1].split(",")] + [1] * num_dims)[:num_dims]
    mesh, _, spec = sharding.partition("], [")
    sizes = {name: int(size) for name, size in _AXIS.findall(mesh)}
    groups = re.findall(r"\{([^{}]*)\}", spec)[:num_dims]
    counts = [
        math.prod(int(part) if part else sizes.get(name, 1) for name, part in _USED.findall(group)) for group in groups
    ]
    return (counts + [1] * num_dims)[:num_dims]


def _lines(message: str, module: Module | None) -> Iterator[tuple[str, int]]:
    frame = _FRAME.search(message)
    file = _FILE.search(message)
    if frame and module is not None:
        yield from module.frame_lines(int(frame[1]))
    elif file:
        yield file[1], int(file[2])
