"""A cache of reports on disk, keyed by the inputs of a check."""

import functools
import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from spanax.check.report import Report
from spanax.documents import read_bytes
from spanax.frames import OURS
from spanax.train.data.cache import cache_folder, keep


def key_of(**parts: Any) -> str:
    """Returns the cache key of a check, a hash of what it depends on and of the source of Spanax.

    Example:
      >>> key_of(program="a", level=3) == key_of(level=3, program="a") != key_of(program="b", level=3)
      True
    """
    text = json.dumps(parts, sort_keys=True, default=str) + _source_digest(OURS)
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _source_digest(folder: Path) -> str:
    """Returns a hash of the code and tables in a folder: between two releases they change, and the version does not."""
    digest = hashlib.sha256()
    for path in sorted((*folder.rglob("*.py"), *folder.rglob("*.toml"))):
        digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def find(key: str) -> Report | None:
    """Returns the cached report, or None if it is missing or damaged."""
    try:
        return replace(Report.from_json(read_bytes(_path(key)).decode()), is_kept=True)
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
