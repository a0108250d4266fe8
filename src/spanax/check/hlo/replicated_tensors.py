"""Replicated: the tensors that XLA's partitioner made whole on every device, as it says itself in its log."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from spanax.check.hlo.module import Module
from spanax.check.lint.source_lines import user_line

WARNING = re.compile(
    r"\[SPMD\] Involuntary full rematerialization\. The compiler cannot go from sharding (?P<before>\{.*?\}) "
    r"to (?P<after>\{.*?\}) efficiently for HLO operation %?(?P<name>[\w.-]+) = (?P<dtype>\w+)\[(?P<dims>[\d,]*)\]"
    r"[^\n]*?(?=\. As the last resort|$)",
    re.MULTILINE | re.IGNORECASE,
)
"""Source: openxla/xla xla/service/spmd/spmd_partitioner.cc, as jaxlib 0.10.2 and 0.12.0.1 print it."""

_OP_NAME = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_FILE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_TILES = re.compile(r"devices=\[([\d,]+)\]")
_AXIS = re.compile(r"'(\w+)'=(\d+)")
_USED = re.compile(r"'(\w+)'(?::\(\d+\)(\d+))?")


@dataclass(frozen=True)
class ReplicatedTensor:
    """A tensor that every device got whole, for its sharding could not be changed otherwise.

    Attributes:
      name: the instruction's.
      shape: the whole tensor's, as XLA writes it.
      before: the sharding it had, as XLA writes it.
      after: the sharding that was wanted.
      num_bytes: of the whole tensor, once.
      op_name: the JAX operation that it belongs to, with its name stack.
      source: file and line of the user's code; empty where the program does not say.
    """

    name: str
    shape: str
    before: str
    after: str
    num_bytes: int
    op_name: str = ""
    source: str = ""


def replicated_tensors(log: str, module: Module | None = None) -> tuple[ReplicatedTensor, ...]:
    """What a compiler's log says of tensors made whole, each once, the largest first.

    Args:
      log: what it wrote.
      module: the program, which knows the source lines by their numbers.

    Example:
      >>> log = (
      ...     "W1 1 spmd_partitioner.cc:656] [SPMD] Involuntary full rematerialization. The compiler cannot go from "
      ...     "sharding {devices=[2,2,2]<=[8]} to {devices=[8,1,1]<=[8]} efficiently for HLO operation "
      ...     "%copy.1 = f32[16,8,4]{2,1,0} copy(%sin.0), sharding={devices=[2,2,2]<=[8]}, "
      ...     'metadata={op_name="jit(f)/sin" stack_frame_id=3}. As the last resort, SPMD will replicate the tensor.'
      ... )
      >>> [one] = replicated(log)
      >>> one.shape, one.num_bytes, one.op_name
      ('f32[32,16,8]', 16384, 'jit(f)/sin')
    """
    found = {_one(told, module): None for told in WARNING.finditer(log)}
    return tuple(sorted(found, key=lambda one: (-one.num_bytes, one.name)))


def _one(told: re.Match[str], module: Module | None) -> ReplicatedTensor:
    dims = [int(size) for size in told["dims"].split(",") if size]
    sizes = [dim * ways for dim, ways in zip(dims, _ways(told["before"], len(dims)), strict=True)]
    op_name = _OP_NAME.search(told[0])
    return ReplicatedTensor(
        name=told["name"],
        shape=f"{told['dtype']}[{','.join(map(str, sizes))}]",
        before=told["before"],
        after=told["after"],
        num_bytes=math.ceil(math.prod(sizes) * _bits(told["dtype"]) / 8),
        op_name=op_name[1] if op_name else "",
        source=user_line(list(_lines(told[0], module))),
    )


def _ways(sharding: str, num_dims: int) -> list[int]:
    """Into how many parts a sharding cuts each dim, in XLA's old words (`devices=[8,1]<=[8]`) or its new ones."""
    if tiles := _TILES.search(sharding):
        return ([int(size) for size in tiles[1].split(",")] + [1] * num_dims)[:num_dims]
    mesh, _, rest = sharding.partition("], [")
    sizes = {name: int(size) for name, size in _AXIS.findall(mesh)}
    groups = re.findall(r"\{([^{}]*)\}", rest)[:num_dims]
    ways = [math.prod(int(part) if part else sizes.get(name, 1) for name, part in _USED.findall(one)) for one in groups]
    return (ways + [1] * num_dims)[:num_dims]


def _bits(dtype: str) -> int:
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8


def _lines(said: str, module: Module | None) -> Iterator[tuple[str, int]]:
    frame, file = _FRAME.search(said), _FILE.search(said)
    if frame and module is not None:
        yield from module.frames.lines(int(frame[1]))
    elif file:
        yield file[1], int(file[2])
