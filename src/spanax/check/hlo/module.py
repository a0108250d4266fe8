"""Parses a serialized HLO module into instructions, computations, shapes and source lines, without importing XLA."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from spanax.check.hlo.messages import parse_hlo
from spanax.frames import OURS, is_library, is_spanax

# PrimitiveType -> (name, bits of one element); tuples, tokens and opaque values have none.
TYPES = {
    1: ("pred", 8),
    **{code: (f"s{bits}", bits) for code, bits in ((30, 1), (26, 2), (21, 4), (2, 8), (3, 16), (4, 32), (5, 64))},
    **{code: (f"u{bits}", bits) for code, bits in ((31, 1), (27, 2), (22, 4), (6, 8), (7, 16), (8, 32), (9, 64))},
    **{10: ("f16", 16), 11: ("f32", 32), 12: ("f64", 64), 16: ("bf16", 16), 15: ("c64", 64), 18: ("c128", 128)},
    **{19: ("f8e5m2", 8), 28: ("f8e4m3", 8), 20: ("f8e4m3fn", 8), 23: ("f8e4m3b11fnuz", 8), 29: ("f8e3m4", 8)},
    **{24: ("f8e5m2fnuz", 8), 25: ("f8e4m3fnuz", 8), 32: ("f4e2m1fn", 4), 33: ("f8e8m0fnu", 8)},
}

HOST_MEMORY = 5
"""The memory space of arrays in host memory. Source: openxla/xla, xla/layout.h, `Layout::kHostMemorySpace`."""


@dataclass(frozen=True)
class Shape:
    """The dtype, dims and layout of an array, or the shapes of a tuple in `parts`.

    `order` lists the dims from minor to major; `tiles` are the tile sizes to which a TPU layout pads; `memory_space`
    is that of the layout, 0 for the main memory of the device and `HOST_MEMORY` for the memory of the host.

    Example:
      >>> Shape("f32", 32, (8, 4)).num_bytes, Shape("f32", 32, (2, 4), (1, 0), ((8, 128),)).padded_bytes
      (128, 4096)
    """

    dtype: str
    bits: int
    dims: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    tiles: tuple[tuple[int, ...], ...] = ()
    parts: tuple["Shape", ...] = ()
    memory_space: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements; of a tuple, the sum over its parts."""
        return -(-self.bits * math.prod(self.dims) // 8) + sum(part.num_bytes for part in self.parts)

    @property
    def padded_bytes(self) -> int:
        """Bytes including the padding to the first tile of the layout."""
        if self.parts:
            return sum(part.padded_bytes for part in self.parts)
        dims = [self.dims[dim] for dim in reversed(self.order)] if self.order else list(self.dims)
        if self.tiles:
            tile = self.tiles[0]
            dims = [1] * (len(tile) - len(dims)) + dims
            start = len(dims) - len(tile)
            dims[start:] = [
                -(-size // tile_size) * tile_size for size, tile_size in zip(dims[start:], tile, strict=True)
            ]
        return -(-self.bits * math.prod(dims) // 8)

    def __str__(self) -> str:
        if self.parts:
            return f"({', '.join(map(str, self.parts))})"
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True, eq=False)
class Instruction:
    """An HLO instruction; `operands` are instruction ids, `called` computation ids, `message` has all fields."""

    id: int
    name: str
    opcode: str
    shape: Shape
    operands: tuple[int, ...]
    called: tuple[int, ...]
    message: Any

    @property
    def channel(self) -> int:
        """The channel id that connects the parts of a collective, or 0."""
        return self.message.channel_id

    @property
    def op_name(self) -> str:
        """The JAX operation with its name stack."""
        return self.message.metadata.op_name

    @property
    def target(self) -> str:
        """The target of a custom call."""
        return self.message.custom_call_target


@dataclass(frozen=True, eq=False)
class Computation:
    """A computation, with its instructions by id in topological order."""

    id: int
    name: str
    root: int
    instructions: dict[int, Instruction]

    @cached_property
    def users(self) -> dict[int, list[Instruction]]:
        """The users of each instruction, by its id."""
        users: dict[int, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                users.setdefault(operand, []).append(instruction)
        return users

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The parameters, by their index."""
        parameters = (instruction for instruction in self.instructions.values() if instruction.opcode == "parameter")
        return {instruction.message.parameter_number: instruction for instruction in parameters}


@dataclass(frozen=True, eq=False)
class Module:
    """A compiled program; `stack_frames` is the table of stack frames that its instructions share."""

    entry: Computation
    computations: dict[int, Computation]
    stack_frames: Any

    def lines_of(self, instruction: Instruction) -> tuple[tuple[str, int], ...]:
        """Returns the (file, line) frames of an instruction's source, innermost first."""
        metadata = instruction.message.metadata
        return self.frame_lines(metadata.stack_frame_id) or (
            ((metadata.source_file, metadata.source_line),) if metadata.source_file else ()
        )

    def frame_lines(self, frame_id: int) -> tuple[tuple[str, int], ...]:
        """Returns the (file, line) of a stack frame and of its callers; empty for frame 0."""
        table = self.stack_frames
        lines = list[tuple[str, int]]()
        while 0 < frame_id <= len(table.stack_frames) and len(lines) < 64:
            frame = table.stack_frames[frame_id - 1]
            location = table.file_locations[frame.file_location_id - 1]
            lines.append((table.file_names[location.file_name_id - 1], location.line))
            frame_id = frame.parent_frame_id
        return tuple(lines)


def read_module(data: bytes) -> Module:
    """Parses a serialized HloModuleProto, or the module in an HloProto.

    Raises:
      DataError: the bytes are neither.
    """
    message = parse_hlo(data)
    computations = {computation.id: computation for computation in map(_computation, message.computations)}
    return Module(computations[message.entry_computation_id], computations, message.stack_frame_index)


def _shape(message: Any) -> Shape:
    parts = tuple(map(_shape, message.tuple_shapes))
    name, bits = TYPES.get(message.element_type, ("tuple" if parts else "none", 0))
    tiles = tuple(tuple(tile.dimensions) for tile in message.layout.tiles)
    layout = message.layout
    return Shape(name, bits, tuple(message.dimensions), tuple(layout.minor_to_major), tiles, parts, layout.memory_space)


def _computation(message: Any) -> Computation:
    instructions = {entry.id: _instruction(entry) for entry in message.instructions}
    return Computation(message.id, message.name, message.root_id, instructions)


def _instruction(message: Any) -> Instruction:
    return Instruction(
        id=message.id,
        name=message.name,
        opcode=message.opcode,
        shape=_shape(message.shape),
        operands=tuple(message.operand_ids),
        called=tuple(message.called_computation_ids),
        message=message,
    )


def integers(instruction: Instruction) -> tuple[int, ...] | None:
    """Returns the elements of an integer or boolean constant; None for other constants."""
    literal = instruction.message.literal
    for elements in (literal.preds, literal.s32s, literal.s64s, literal.u32s, literal.u64s, literal.s8s, literal.u8s):
        if elements:
            return tuple(map(int, elements))
    is_integer = instruction.shape.dtype[:1] in ("s", "u", "p")
    return (0,) * math.prod(instruction.shape.dims) if is_integer else None


def user_line(lines: Sequence[tuple[str, int]]) -> str:
    """Returns the innermost `file:line` of the user's code, or else of a library; empty if it is one of Spanax.

    Frames outside of the replayed step belong to its caller, not to the model, and are ignored.

    Example:
      >>> user_line([("/x/site-packages/flax/nnx/nn/linear.py", 3), ("/home/me/model.py", 12)])
      '/home/me/model.py:12'
      >>> user_line([(str(OURS / "step" / "replay.py"), 3), ("/home/me/train.py", 12)])
      ''
    """
    runners = [OURS / folder for folder in ("step", "train", "check")]
    traced = list(itertools.takewhile(lambda line: not any(map(Path(line[0]).is_relative_to, runners)), lines))
    user_lines = [line for line in traced if not is_library(line[0])]
    file, number = next(iter(user_lines or traced), ("", 0))
    return "" if not file or is_spanax(file) else f"{file}:{number}"
