"""TensorBoard's event files, read back as TensorBoard reads them."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def events(folder: Path) -> Iterator[Any]:
    """The records of all event files, in the order in which TensorBoard reads them, with their checksums verified."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    for path in sorted((folder / "tensorboard").iterdir()):
        content, start = path.read_bytes(), 0
        while start < len(content):
            (size,) = struct.unpack_from("<Q", content, start)
            record = content[start + 12 : start + 12 + size]
            assert struct.unpack_from("<I", content, start + 8)[0] == masked_crc32c(content[start : start + 8])
            assert struct.unpack_from("<I", content, start + 12 + size)[0] == masked_crc32c(record)
            yield Event.FromString(record)
            start += 16 + size


def shown(folder: Path, tag: str) -> list[tuple[int, float]]:
    """What TensorBoard draws: a start of a session hides what was there from its step on."""
    points: list[tuple[int, float]] = []
    for event in events(folder):
        if event.session_log.status == 1:
            points = [point for point in points if point[0] < event.step]
        points += [(event.step, value.simple_value) for value in event.summary.value if value.tag == tag]
    return points
