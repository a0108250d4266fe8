"""Kept: reports by what went into them, so that nothing is compiled twice."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spanax.check.report import Report
from spanax.documents import read_bytes
from spanax.run.data.cache import cache_folder, keep


def key_of(**parts: Any) -> str:
    """What two checks share that must give the same report: the program's hash, devices, flags, versions.

    Example:
      >>> key_of(program="a", level=3) == key_of(level=3, program="a") != key_of(program="b", level=3)
      True
    """
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def find(key: str) -> Report | None:
    """The report kept under a key, if there is one that can be read."""
    try:
        return Report.from_json(read_bytes(_path(key)).decode()).as_cached()
    except (OSError, ValueError):  # not there, or damaged
        return None


def put(key: str, report: Report) -> None:
    """Keep a report under a key."""
    keep(_path(key), lambda file: file.write(report.to_json().encode()), None)


def versions(names: Mapping[str, str]) -> dict[str, str]:
    """The installed versions of packages, by the name to show; those that are not installed are left out."""
    from importlib import metadata

    found = {}
    for shown, package in names.items():
        try:
            found[shown] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _path(key: str) -> Path:
    return cache_folder(os.environ.get("SPANAX_CACHE_DIR")) / "checks" / f"{key}.json"
