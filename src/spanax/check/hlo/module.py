"""Module: a compiled program as XLA serializes it, read field by field; nothing of XLA is imported for it.

Source: field numbers of openxla/xla xla/service/hlo.proto and xla/xla_data.proto, which XLA keeps readable.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from spanax.check.hlo.protobuf import Fields, fields, messages, number, numbers, raw, signed, text

# PrimitiveType -> (name, bits of one element); tuples, tokens and opaque values have none.
TYPES = {
    1: ("pred", 8),
    **{at: (f"s{bits}", bits) for at, bits in ((30, 1), (26, 2), (21, 4), (2, 8), (3, 16), (4, 32), (5, 64))},
    **{at: (f"u{bits}", bits) for at, bits in ((31, 1), (27, 2), (22, 4), (6, 8), (7, 16), (8, 32), (9, 64))},
    **{10: ("f16", 16), 11: ("f32", 32), 12: ("f64", 64), 16: ("bf16", 16), 15: ("c64", 64), 18: ("c128", 128)},
    **{19: ("f8e5m2", 8), 28: ("f8e4m3", 8), 20: ("f8e4m3fn", 8), 23: ("f8e4m3b11fnuz", 8), 29: ("f8e3m4", 8)},
    **{24: ("f8e5m2fnuz", 8), 25: ("f8e4m3fnuz", 8), 32: ("f4e2m1fn", 4), 33: ("f8e8m0fnu", 8)},
}


@dataclass(frozen=True)
class Shape:
    """An array's type and layout, or the parts of a tuple.

    `order` are the dims from the fastest varying on, `tiles` the blocks that the layout pads to (TPU).

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
        """Bytes of the elements, parts of a tuple together."""
        return -(-self.bits * math.prod(self.dims) // 8) + sum(part.num_bytes for part in self.parts)

    @property
    def padded_bytes(self) -> int:
        """Bytes with what the first tile of the layout pads to."""
        if self.parts:
            return sum(part.padded_bytes for part in self.parts)
        dims = [self.dims[at] for at in reversed(self.order)] if self.order else list(self.dims)
        if self.tiles:
            tile = self.tiles[0]
            dims = [1] * (len(tile) - len(dims)) + dims
            first = len(dims) - len(tile)
            dims[first:] = [-(-size // by) * by for size, by in zip(dims[first:], tile, strict=True)]
        return -(-self.bits * math.prod(dims) // 8)

    def __str__(self) -> str:
        if self.parts:
            return f"({', '.join(map(str, self.parts))})"
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction: what it is, what it reads by id, and its other fields by their numbers."""

    id: int
    name: str
    opcode: str
    shape: Shape
    operands: tuple[int, ...]
    called: tuple[int, ...]
    fields: Fields

    @property
    def channel(self) -> int:
        """What ties the parts of one collective together; 0 for none."""
        return number(self.fields, 26)

    @property
    def op_name(self) -> str:
        """The JAX operation it comes from, with its name stack."""
        return text(fields(raw(self.fields, 7)), 2)

    @property
    def target(self) -> str:
        """What a custom call calls."""
        return text(self.fields, 28)


@dataclass(frozen=True, eq=False)
class Computation:
    """Instructions in an order in which they can run."""

    id: int
    name: str
    root: int
    instructions: dict[int, Instruction]

    @cached_property
    def users(self) -> dict[int, list[Instruction]]:
        """Who reads each instruction's value."""
        found: dict[int, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                found.setdefault(operand, []).append(instruction)
        return found

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The parameters, by their number."""
        found = (one for one in self.instructions.values() if one.opcode == "parameter")
        return {number(one.fields, 9): one for one in found}


@dataclass(frozen=True, eq=False)
class Module:
    """A whole program."""

    name: str
    entry: Computation
    computations: dict[int, Computation]
    frames: "Frames"

    def instructions(self) -> Iterator[Instruction]:
        """Every instruction of every computation."""
        for computation in self.computations.values():
            yield from computation.instructions.values()

    def lines_of(self, instruction: Instruction) -> tuple[tuple[str, int], ...]:
        """The source lines that an instruction comes from, the innermost first."""
        metadata = fields(raw(instruction.fields, 7))
        found = self.frames.lines(number(metadata, 15))
        file = text(metadata, 3)
        return found or (((file, number(metadata, 4)),) if file else ())


@dataclass(frozen=True, eq=False)
class Frames:
    """The table of source lines that a program shares among its instructions."""

    files: tuple[str, ...]
    places: tuple[tuple[int, int], ...]
    frames: tuple[tuple[int, int], ...]

    def lines(self, frame: int) -> tuple[tuple[str, int], ...]:
        """(file, line) of a frame and of those around it; empty for frame 0."""
        found: list[tuple[str, int]] = []
        while 0 < frame <= len(self.frames) and len(found) < 64:
            place, frame = self.frames[frame - 1]
            file, line = self.places[place - 1]
            found.append((self.files[file - 1], line))
        return tuple(found)


def read_module(data: bytes) -> Module:
    """A program from XLA's serialized HloModuleProto, or from an HloProto around one.

    Raises:
      DataError: the bytes are neither.
    """
    message = program_of(data)
    computations = {one.id: one for one in map(_computation, messages(message, 3))}
    return Module(text(message, 1), computations[number(message, 6)], computations, _frames(raw(message, 17)))


def program_of(data: bytes) -> Fields:
    """The fields of an HloModuleProto, or of the one in an HloProto."""
    message = fields(data)
    if 2 not in message and 1 in message:  # its entry has no name: a program with its buffers around it
        return fields(raw(message, 1))
    return message


def read_text(program: str) -> Module:
    """A program from HLO text, by jaxlib's own parser.

    Raises:
      ValueError: as the parser says.
    """
    from jaxlib import _hlo

    return read_module(_hlo.hlo_module_from_text(program).as_serialized_hlo_module_proto())


def shape_of(data: bytes) -> Shape:
    """A shape from a serialized ShapeProto."""
    message = fields(data)
    parts = tuple(map(shape_of, messages(message, 4)))
    name, bits = TYPES.get(number(message, 2), ("tuple" if parts else "none", 0))
    layout = fields(raw(message, 5))
    tiles = tuple(numbers(fields(tile), 1) for tile in messages(layout, 6))
    return Shape(name, bits, numbers(message, 3), numbers(layout, 1), tiles, parts)


def _computation(data: bytes) -> Computation:
    message = fields(data)
    found = [_instruction(one) for one in messages(message, 2)]
    return Computation(number(message, 5), text(message, 1), number(message, 6), {one.id: one for one in found})


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
    files = tuple(one.decode("utf-8", "replace") for one in messages(message, 1))
    places = tuple((number(fields(one), 1), number(fields(one), 3)) for one in messages(message, 3))
    frames = tuple((number(fields(one), 1), number(fields(one), 2)) for one in messages(message, 4))
    return Frames(files, places, frames)


def integers(instruction: Instruction) -> tuple[int, ...] | None:
    """The numbers of an integer or boolean constant; None for other constants."""
    literal = fields(raw(instruction.fields, 8))
    for field in (2, 4, 5, 6, 7):
        if field in literal:
            return signed(numbers(literal, field))
    small = raw(literal, 15) or raw(literal, 3)
    if small:
        return tuple(small)
    is_integer = instruction.shape.dtype[:1] in ("s", "u", "p")
    return (0,) * math.prod(instruction.shape.dims) if is_integer else None
