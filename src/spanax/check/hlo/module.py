"""Parses a serialized HLO module into instructions, computations, shapes and source lines, without importing XLA.

Source: field numbers of openxla/xla xla/service/hlo.proto and xla/xla_data.proto, which XLA keeps backward compatible.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from spanax.check.hlo.protobuf import Fields, fields, messages, number, numbers, raw, signed, text

# PrimitiveType -> (name, bits of one element); tuples, tokens and opaque values have none.
TYPES = {
    1: ("pred", 8),
    **{code: (f"s{bits}", bits) for code, bits in ((30, 1), (26, 2), (21, 4), (2, 8), (3, 16), (4, 32), (5, 64))},
    **{code: (f"u{bits}", bits) for code, bits in ((31, 1), (27, 2), (22, 4), (6, 8), (7, 16), (8, 32), (9, 64))},
    **{10: ("f16", 16), 11: ("f32", 32), 12: ("f64", 64), 16: ("bf16", 16), 15: ("c64", 64), 18: ("c128", 128)},
    **{19: ("f8e5m2", 8), 28: ("f8e4m3", 8), 20: ("f8e4m3fn", 8), 23: ("f8e4m3b11fnuz", 8), 29: ("f8e3m4", 8)},
    **{24: ("f8e5m2fnuz", 8), 25: ("f8e4m3fnuz", 8), 32: ("f4e2m1fn", 4), 33: ("f8e8m0fnu", 8)},
}


@dataclass(frozen=True)
class Shape:
    """The dtype, dims and layout of an array, or the shapes of a tuple in `parts`.

    `order` lists the dims from minor to major; `tiles` are the tile sizes to which a TPU layout pads.

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
    """An HLO instruction; `operands` are instruction ids, `called` computation ids, `fields` the protobuf fields."""

    id: int
    name: str
    opcode: str
    shape: Shape
    operands: tuple[int, ...]
    called: tuple[int, ...]
    fields: Fields

    @property
    def channel(self) -> int:
        """The channel id that connects the parts of a collective, or 0."""
        return number(self.fields, 26)

    @property
    def op_name(self) -> str:
        """The JAX operation with its name stack."""
        return text(fields(raw(self.fields, 7)), 2)

    @property
    def target(self) -> str:
        """The target of a custom call."""
        return text(self.fields, 28)


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
        return {number(instruction.fields, 9): instruction for instruction in parameters}


@dataclass(frozen=True, eq=False)
class Module:
    """A compiled program."""

    name: str
    entry: Computation
    computations: dict[int, Computation]
    frames: "Frames"

    def instructions(self) -> Iterator[Instruction]:
        """Yields the instructions of all computations."""
        for computation in self.computations.values():
            yield from computation.instructions.values()

    def lines_of(self, instruction: Instruction) -> tuple[tuple[str, int], ...]:
        """Returns the (file, line) frames of an instruction's source, innermost first."""
        metadata = fields(raw(instruction.fields, 7))
        frames = self.frames.lines(number(metadata, 15))
        file = text(metadata, 3)
        return frames or (((file, number(metadata, 4)),) if file else ())


@dataclass(frozen=True, eq=False)
class Frames:
    """The table of stack frames that the instructions of a program share."""

    files: tuple[str, ...]
    locations: tuple[tuple[int, int], ...]
    frames: tuple[tuple[int, int], ...]

    def lines(self, frame: int) -> tuple[tuple[str, int], ...]:
        """Returns the (file, line) of a frame and of its callers; empty for frame 0."""
        lines: list[tuple[str, int]] = []
        while 0 < frame <= len(self.frames) and len(lines) < 64:
            location, frame = self.frames[frame - 1]
            file, line = self.locations[location - 1]
            lines.append((self.files[file - 1], line))
        return tuple(lines)


def read_module(data: bytes) -> Module:
    """Parses a serialized HloModuleProto, or the module in an HloProto.

    Raises:
      DataError: the bytes are neither.
    """
    message = program_of(data)
    computations = {computation.id: computation for computation in map(_computation, messages(message, 3))}
    return Module(text(message, 1), computations[number(message, 6)], computations, _frames(raw(message, 17)))


def program_of(data: bytes) -> Fields:
    """Returns the fields of an HloModuleProto, or of the module in an HloProto."""
    message = fields(data)
    if 2 not in message and 1 in message:  # no entry name, so this is an HloProto with module and buffer assignment
        return fields(raw(message, 1))
    return message


def read_text(program: str) -> Module:
    """Parses HLO text with jaxlib's parser.

    Raises:
      ValueError: the text is invalid.
    """
    from jaxlib import _hlo

    return read_module(_hlo.hlo_module_from_text(program).as_serialized_hlo_module_proto())


def shape_of(data: bytes) -> Shape:
    """Parses a serialized ShapeProto."""
    message = fields(data)
    parts = tuple(map(shape_of, messages(message, 4)))
    name, bits = TYPES.get(number(message, 2), ("tuple" if parts else "none", 0))
    layout = fields(raw(message, 5))
    tiles = tuple(numbers(fields(tile), 1) for tile in messages(layout, 6))
    return Shape(name, bits, numbers(message, 3), numbers(layout, 1), tiles, parts)


def _computation(data: bytes) -> Computation:
    message = fields(data)
    instructions = [_instruction(entry) for entry in messages(message, 2)]
    return Computation(
        number(message, 5), text(message, 1), number(message, 6), {entry.id: entry for entry in instructions}
    )


def _instruction(data: bytes) -> Instruction:
    message = fields(data)
    return Instruction(
        id=number(message, 35),
        name=text(message, 1),
        opcode=text(message, 2),
        shape=shape_of(raw(message, 3)),
        operands=numbers(message, 36),
        called=numbers(message, 38),
        fields=message,
    )


def _frames(data: bytes) -> Frames:
    message = fields(data)
    files = tuple(entry.decode("utf-8", "replace") for entry in messages(message, 1))
    locations = tuple((number(fields(entry), 1), number(fields(entry), 3)) for entry in messages(message, 3))
    frames = tuple((number(fields(entry), 1), number(fields(entry), 2)) for entry in messages(message, 4))
    return Frames(files, locations, frames)


def integers(instruction: Instruction) -> tuple[int, ...] | None:
    """Returns the elements of an integer or boolean constant; None for other constants."""
    literal = fields(raw(instruction.fields, 8))
    for field in (2, 4, 5, 6, 7):
        if field in literal:
            return signed(numbers(literal, field))
    packed = raw(literal, 15) or raw(literal, 3)
    if packed:
        return tuple(packed)
    is_integer = instruction.shape.dtype[:1] in ("s", "u", "p")
    return (0,) * math.prod(instruction.shape.dims) if is_integer else None
