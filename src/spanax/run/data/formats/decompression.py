"""Unpacking: how far packed data may grow, and how much room it leaves on the disk that it is kept on."""

import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from spanax.errors import DataError
from spanax.units import bytes_text

MOST_RATIO = 200
"""Bytes unpacked a byte packed. Text packs 3 to 20 times; gzip's most is 1,032."""

ALWAYS_BYTES = 1 << 28
"""So much may come of any file."""

FREE_BYTES = 1 << 26
"""So much of a disk stays free."""

EVERY_BYTES = 1 << 24
"""How often the disk is looked at."""


@dataclass(eq=False)
class Unpacking:
    """The bytes that come out of one packed file.

    Attributes:
      path: the file.

    Example:
      >>> import tempfile
      >>> path = Path(tempfile.mkdtemp()) / "a.gz"
      >>> _ = path.write_bytes(bytes(1000))
      >>> Unpacking(path).add(ALWAYS_BYTES + 1)
      Traceback (most recent call last):
      spanax.errors.DataError: ... unpacks to more than 256 MiB, over 200 times its size.
        fix: unpack it by hand, if it is what it should be
    """

    path: Path
    _num_bytes: int = 0

    def add(self, num_bytes: int) -> None:
        """Counts bytes that were unpacked.

        Raises:
          DataError: they are more than such a file holds.
        """
        self._num_bytes += num_bytes
        if self._num_bytes > ALWAYS_BYTES and self._num_bytes > (most := MOST_RATIO * os.stat(self.path).st_size):
            raise DataError(
                f"'{self.path}' unpacks to more than {bytes_text(max(most, ALWAYS_BYTES))}, over {MOST_RATIO} times "
                "its size.",
                fix="unpack it by hand, if it is what it should be",
            )


@dataclass(eq=False)
class Room:
    """A folder that is written to, and the room that stays free on its disk."""

    folder: Path
    _since: int = EVERY_BYTES

    def take(self, num_bytes: int) -> None:
        """Counts bytes that are written.

        Raises:
          OSError: the disk would get full.
        """
        self._since += num_bytes
        if self._since >= EVERY_BYTES:
            self._since = 0
            if shutil.disk_usage(self.folder).free < FREE_BYTES + num_bytes:
                raise OSError(errno.ENOSPC, f"less than {bytes_text(FREE_BYTES)} would stay free")
