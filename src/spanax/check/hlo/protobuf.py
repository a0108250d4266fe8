"""Wire: the fields of a serialized protocol buffer, by their numbers; all that is needed to read XLA's programs."""

from collections.abc import Sequence

from spanax.errors import DataError

Fields = dict[int, list[int | bytes]]
"""Values by field number, in the order in which they were written: numbers, or the bytes of all else."""


def fields(data: bytes) -> Fields:
    """The fields of one message; the messages inside it stay bytes.

    Raises:
      DataError: the bytes are no protocol buffer.

    Source: the encoding of protocol buffers: a key is `number << 3 | type`, a number seven bits a byte, lowest first.

    Example:
      >>> fields(bytes([0x08, 0x96, 0x01, 0x12, 0x02, 0x68, 0x69]))
      {1: [150], 2: [b'hi']}
    """
    found: Fields = {}
    at, end = 0, len(data)
    try:
        while at < end:
            key, at = _varint(data, at)
            kind = key & 7
            value: int | bytes
            if kind == 0:
                value, at = _varint(data, at)
            elif kind in (1, 2, 5):
                if kind == 2:
                    size, at = _varint(data, at)
                else:
                    size = 8 if kind == 1 else 4
                if at + size > end:
                    raise IndexError
                value, at = data[at : at + size], at + size
            else:
                raise IndexError
            found.setdefault(key >> 3, []).append(value)
    except IndexError:
        raise DataError("this is not a serialized program.", where=f"byte {at} of {end}") from None
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    if byte < 128:
        return byte, at + 1
    value, shift = byte & 127, 7
    while True:
        at += 1
        byte = data[at]
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at + 1


def number(message: Fields, field: int, default: int = 0) -> int:
    """One number of a message."""
    value = message.get(field, (default,))[-1]
    assert isinstance(value, int)
    return value


def raw(message: Fields, field: int) -> bytes:
    """One field's bytes; empty where the message has it not."""
    value = message.get(field, (b"",))[-1]
    assert isinstance(value, bytes)
    return value


def text(message: Fields, field: int) -> str:
    """One text of a message."""
    return raw(message, field).decode("utf-8", "replace")


def messages(message: Fields, field: int) -> list[bytes]:
    """Every message in a repeated field."""
    return [value for value in message.get(field, ()) if isinstance(value, bytes)]


def numbers(message: Fields, field: int) -> tuple[int, ...]:
    """A repeated number, packed or not.

    Example:
      >>> numbers(fields(bytes([0x0A, 0x03, 0x01, 0x80, 0x01])), 1), numbers(fields(bytes([0x08, 7, 0x08, 8])), 1)
      ((1, 128), (7, 8))
    """
    found: list[int] = []
    for value in message.get(field, ()):
        if isinstance(value, int):
            found.append(value)
            continue
        at = 0
        while at < len(value):
            one, at = _varint(value, at)
            found.append(one)
    return tuple(found)


def signed(values: Sequence[int]) -> tuple[int, ...]:
    """Numbers that may be negative, which are written as 64 bits of two's complement.

    Example:
      >>> signed((1, 2**64 - 1))
      (1, -1)
    """
    return tuple(value - (1 << 64) if value >> 63 else value for value in values)
