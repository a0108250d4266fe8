"""A minimal protocol buffer decoder: fields by number, without a schema."""

from collections.abc import Sequence

from spanax.errors import DataError

Fields = dict[int, list[int | bytes]]
"""The values of each field number in order: integers, or bytes for all other wire types."""


def fields(data: bytes) -> Fields:
    """Returns the fields of a message; nested messages stay bytes.

    Raises:
      DataError: the bytes are not a protocol buffer.

    Source: protocol buffer encoding: a key is `number << 3 | wire type`; a varint has 7 bits per byte, lowest first.

    Example:
      >>> fields(bytes([0x08, 0x96, 0x01, 0x12, 0x02, 0x68, 0x69]))
      {1: [150], 2: [b'hi']}
    """
    values: Fields = {}
    offset, end = 0, len(data)
    try:
        while offset < end:
            key, offset = _varint(data, offset)
            wire_type = key & 7
            value: int | bytes
            if wire_type == 0:
                value, offset = _varint(data, offset)
            elif wire_type in (1, 2, 5):
                if wire_type == 2:
                    size, offset = _varint(data, offset)
                else:
                    size = 8 if wire_type == 1 else 4
                if offset + size > end:
                    raise IndexError
                value, offset = data[offset : offset + size], offset + size
            else:
                raise IndexError
            values.setdefault(key >> 3, []).append(value)
    except IndexError:
        raise DataError("this is not a serialized program.", where=f"byte {offset} of {end}") from None
    return values


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    byte = data[offset]
    if byte < 128:
        return byte, offset + 1
    value, shift = byte & 127, 7
    while True:
        offset += 1
        byte = data[offset]
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, offset + 1


def number(message: Fields, field: int, default: int = 0) -> int:
    """Returns an integer field, or the default if it is missing."""
    value = message.get(field, (default,))[-1]
    assert isinstance(value, int)
    return value


def raw(message: Fields, field: int) -> bytes:
    """Returns the bytes of a field; empty if it is missing."""
    value = message.get(field, (b"",))[-1]
    assert isinstance(value, bytes)
    return value


def text(message: Fields, field: int) -> str:
    """Returns a string field; empty if it is missing."""
    return raw(message, field).decode("utf-8", "replace")


def messages(message: Fields, field: int) -> list[bytes]:
    """Returns the messages in a repeated field, as bytes."""
    return [value for value in message.get(field, ()) if isinstance(value, bytes)]


def numbers(message: Fields, field: int) -> tuple[int, ...]:
    """Returns a repeated integer field, packed or not.

    Example:
      >>> numbers(fields(bytes([0x0A, 0x03, 0x01, 0x80, 0x01])), 1), numbers(fields(bytes([0x08, 7, 0x08, 8])), 1)
      ((1, 128), (7, 8))
    """
    result: list[int] = []
    for value in message.get(field, ()):
        if isinstance(value, int):
            result.append(value)
            continue
        offset = 0
        while offset < len(value):
            element, offset = _varint(value, offset)
            result.append(element)
    return tuple(result)


def signed(values: Sequence[int]) -> tuple[int, ...]:
    """Returns integers decoded as signed 64-bit two's complement.

    Example:
      >>> signed((1, 2**64 - 1))
      (1, -1)
    """
    return tuple(value - (1 << 64) if value >> 63 else value for value in values)
