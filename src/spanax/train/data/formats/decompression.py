"""Limits on the size of decompressed data and on the disk space that it fills."""

import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from spanax.errors import FileError
from spanax.units import bytes_text

MAX_RATIO = 200
"""The maximum compression ratio. Text compresses 3 to 20 times; gzip at most 1,032 times."""

ALWAYS_BYTES = 1 << 28
"""The decompressed size allowed for any file."""

FREE_BYTES = 1 << 26
"""The disk space that must remain free."""

EVERY_BYTES = 1 << 24
"""The number of bytes written between checks of the disk."""


@dataclass(eq=False)
class DecompressionLimit:
    """Limits the decompressed size of a compressed file.

    Attributes:
      path: the file.

    Example:
      >>> import tempfile
      >>> path = Path(tempfile.mkdtemp()) / "a.gz"
      >>> _ = path.write_bytes(bytes(1000))
      >>> DecompressionLimit(path).add(ALWAYS_BYTES + 1)
      Traceback (most recent call last):
      spanax.errors.FileError: ... decompresses to more than 256 MiB, over 200 times its size. [SPX504]
        fix: decompress it yourself, if you trust it
    """

    path: Path
    _num_bytes: int = 0

    def add(self, num_bytes: int) -> None:
        """Counts decompressed bytes.

        Raises:
          DataError: the decompressed size exceeds the limit.
        """
        self._num_bytes += num_bytes
        if self._num_bytes > ALWAYS_BYTES and self._num_bytes > (limit := MAX_RATIO * os.stat(self.path).st_size):
            raise FileError(
                f"'{self.path}' decompresses to more than {bytes_text(max(limit, ALWAYS_BYTES))}, over {MAX_RATIO} "
                "times its size.",
                fix="decompress it yourself, if you trust it",
            )


@dataclass(eq=False)
class DiskSpace:
    """Limits the disk space that writes to a folder use."""

    folder: Path
    _num_unchecked: int = EVERY_BYTES

    def reserve(self, num_bytes: int) -> None:
        """Counts bytes to write.

        Raises:
          OSError: less than `FREE_BYTES` of the disk would remain free.
        """
        self._num_unchecked += num_bytes
        if self._num_unchecked >= EVERY_BYTES:
            self._num_unchecked = 0
            if shutil.disk_usage(self.folder).free < FREE_BYTES + num_bytes:
                raise OSError(errno.ENOSPC, f"less than {bytes_text(FREE_BYTES)} would remain free")
