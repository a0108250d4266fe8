"""A cache of reports on disk, keyed by the inputs of a check."""

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from spanax.check.report import Report
from spanax.documents import read_bytes
from spanax.train.data.cache import cache_folder, keep


def key_of(**parts: Any) -> str:
    """Returns the cache key of a check, a hash of its program, devices, flags and versions.

    Example:
      >>> key_of(program="a", level=3) == key_of(level=3, program="a") != key_of(program="b", level=3)
      True
    """
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def find(key: str) -> Report | None:
    """Returns the cached report, or None if it is missing or damaged."""
    try:
        return Report.from_json(read_bytes(_path(key)).decode()).as_cached()
    except (OSError, ValueError):  # missing or damaged
        return None


def put(key: str, report: Report) -> None:
    """Writes a report to the cache."""
    keep(_path(key), lambda file: file.write(report.to_json().encode()), None)


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Returns the versions of those packages that are installed."""
    installed = {}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    return installed


def _path(key: str) -> Path:
    return cache_folder(os.environ.get("SPANAX_CACHE_DIR")) / "checks" / f"{key}.json"
