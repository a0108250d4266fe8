"""The list of a step's files with size and checksum, written last: what makes a save finished, and damage visible.

A step is a folder DIR/<step>. It is written as DIR/<step>.new<attempt>, counts as that step from the moment its
manifest is there, and then takes the plain number, from an older one of that number too: at any moment one of the two
is whole. All that can be known and done without JAX is here.
"""

import json
import os
import re
import shutil
import stat
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from spanax.documents import parse_json, read_bytes, read_json
from spanax.errors import SpanaxError, WriteError
from spanax.schema import SchemaError, parsed

NAME = "manifest.json"
ARRAYS, PLAN, META = "arrays", "plan.json", "meta.json"
_FORMAT = 1
_STEP = re.compile(r"(0|[1-9][0-9]{0,17})(\.new[0-9]*)?")
_ORBAX_TEMPORARY = ".orbax-checkpoint-tmp"
_CHUNK_BYTES = 1 << 20
# Writes under way when a save fails may bring files back for this long after their folder was removed.
_SETTLE_SECONDS = 5.0


@dataclass(frozen=True)
class Saved:
    """One step on disk: state is 'good', 'bad' or 'unfinished'; `when` is UTC in ISO 8601, bytes are on disk."""

    step: int
    state: str
    bytes: int
    num_leaves: int
    when: str
    problems: tuple[str, ...]
    meta: dict[str, Any]


@dataclass(frozen=True)
class Meta:
    """What meta.json says: when a step was saved, its leaves, and the caller's values."""

    saved_at: str
    leaves: Mapping[str, str]
    meta: Mapping[str, Any]


def step_of(folder: str | os.PathLike[str]) -> int | None:
    """The step number a folder's name stands for, or None.

    Example:
      >>> step_of("runs/a/40"), step_of("runs/a/40.new3"), step_of("runs/a/040"), step_of("runs/a/logs")
      (40, 40, None, None)
    """
    match = _STEP.fullmatch(Path(folder).name)
    return int(match[1]) if match else None


def write(folder: str | os.PathLike[str]) -> None:
    """Declares a step finished: flushes every file and folder to disk, then writes the manifest atomically.

    Args:
      folder: the step's folder, with all its other files complete.

    Raises:
      WriteError: the folder's name is not a step, or it holds a link or special file.
      OSError: a file cannot be read, flushed or written.
    """
    folder = Path(folder)
    step = step_of(folder)
    files, refused = _walk(folder)
    if step is None or refused:
        raise WriteError(f"{folder} cannot become a finished step: {'; '.join(refused) or 'its name is no step'}.")
    listed = {}
    for name in sorted(files):
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
        size, crc = _measure(folder / name)
        listed[name] = {"size": size, "crc32": f"{crc:08x}"}
    for inner in folder.rglob("*/"):
        flush_folder(inner)
    temporary = folder / f"{NAME}.tmp"
    with open(temporary, "wb") as file:
        file.write(_render({"format": _FORMAT, "step": step, "files": listed}))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / NAME)
    flush_folder(folder)
    flush_folder(folder.parent)


def problems(folder: str | os.PathLike[str]) -> list[str]:
    """What differs between a step's files and its manifest, one line a file; empty when all bytes are as saved.

    Args:
      folder: the step's folder. Every byte of it is read once (about 1 s a 2 GB).

    Example:
      >>> problems("no/such/folder/40")
      ['40: not a folder']
    """
    folder = Path(folder)
    if folder.is_symlink() or not folder.is_dir():
        return [f"{folder.name}: {'symbolic link, refused' if folder.is_symlink() else 'not a folder'}"]
    try:
        listed = _read(folder)
        files, found = _walk(folder)
    except (OSError, ValueError) as error:
        return [f"{NAME}: {error}"]
    for name in sorted(listed.keys() | files.keys()):
        if name not in files:
            leaves = name.startswith("/") or ".." in name.split("/")
            found.append(f"{name}: {'leaves the folder, refused' if leaves else 'missing'}")
        elif name not in listed:
            found.append(f"{name}: extra, not in the manifest")
        else:
            found += _differences(folder / name, name, files[name], listed[name])
    return found


def steps(directory: str | os.PathLike[str]) -> list[int]:
    """Numbers of the finished steps, newest last; `unfinished` has the rest.

    Example:
      >>> steps("no/such/folder")
      []
    """
    return sorted({step for step, _ in finished(directory)})


def finished(directory: str | os.PathLike[str]) -> list[tuple[int, Path]]:
    """(step, folder) of every finished step, newest last; of two folders of one step the newer is last."""
    here = [(step, path) for path in _entries(directory) if (step := step_of(path)) is not None and _has_manifest(path)]
    return sorted(here, key=lambda entry: (entry[0], len(entry[1].suffix), entry[1].suffix))


def unfinished(directory: str | os.PathLike[str]) -> list[Path]:
    """Entries with a step's or a temporary's name that are no finished step: saves cut short, links, plain files."""
    return [
        path
        for path in _entries(directory)
        if _ORBAX_TEMPORARY in path.name or (step_of(path) is not None and not _has_manifest(path))
    ]


def describe(directory: str | os.PathLike[str]) -> list[Saved]:
    """Every step on disk, newest last, each checked byte by byte.

    Example:
      >>> describe("no/such/folder")
      []
    """
    cut_short = [(step, path) for path in unfinished(directory) if (step := step_of(path)) is not None]
    return [_describe(step, folder) for step, folder in sorted(finished(directory) + cut_short)]


def verify(directory: str | os.PathLike[str]) -> list[str]:
    """Every difference between the steps on disk and what was saved, a line each.

    Example:
      >>> verify("no/such/folder")
      ['no/such/folder: no checkpoint here']
    """
    folders = [path for _, path in finished(directory)] + unfinished(directory)
    if not folders:
        return [f"{directory}: no checkpoint here"]
    return [f"step {folder.name}: {problem}" for folder in folders for problem in problems(folder)]


def meta_text(leaves: Mapping[str, str], meta: Mapping[str, Any]) -> bytes:
    """What `read_meta` reads: now, the leaves, and the caller's values.

    Raises:
      SpanaxError: the values are none of JSON.
    """
    document = Meta(utc(time.time()), dict(leaves), dict(meta))
    try:
        return (json.dumps(vars(document), indent=1, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise SpanaxError(f"meta cannot be saved: {error}.", fix="give JSON values only") from error


def read_meta(folder: Path) -> tuple[str, dict[str, str], dict[str, Any]]:
    """When a step was saved, its leaves, and the caller's values; ValueError when the file is not one of ours."""
    try:
        record = parsed(Meta, read_json(folder / META, follow_links=False), is_strict=False)
    except SchemaError as error:
        raise ValueError(f"{META} makes no sense: {error}") from error
    return record.saved_at, dict(record.leaves), dict(record.meta)


def utc(seconds: float) -> str:
    """Seconds since 1970 as UTC in ISO 8601.

    Example:
      >>> utc(0)
      '1970-01-01T00:00:00+00:00'
    """
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def settle(directory: Path) -> None:
    """Gives every finished DIR/<step>.new<attempt> its plain number, and removes what it replaces."""
    here = finished(directory)
    for step, folder in here:
        if not folder.suffix:
            continue
        number = directory / str(step)
        if (step, number) in here and problems(folder) and not problems(number):
            discard(folder)
            continue
        if _is_ours(number):
            discard(number)
        folder.rename(number)
        flush_folder(directory)


def clear(directory: Path) -> None:
    """Removes what dead saves left: temporaries, and step folders that hold nothing but files of ours."""
    settle(directory)
    for path in unfinished(directory):
        if _is_ours(path):
            discard(path)


def discard(folder: Path) -> None:
    """Removes a step's folder; its manifest goes first, so half of a step is never taken for one."""
    (folder / NAME).unlink(missing_ok=True)
    give_up = time.monotonic() + _SETTLE_SECONDS
    while folder.exists():
        try:
            shutil.rmtree(folder)
        except OSError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.05)


def _describe(step: int, folder: Path) -> Saved:
    found = problems(folder)
    try:
        when, leaves, meta = read_meta(folder)
    except (OSError, ValueError):
        when, leaves, meta = utc(folder.lstat().st_mtime), {}, {}
    plain = folder.is_dir() and not folder.is_symlink()
    size = sum(_walk(folder)[0].values()) if plain else 0
    state = "unfinished" if not _has_manifest(folder) else "bad" if found else "good"
    return Saved(step, state, size, len(leaves), when, tuple(found), meta)


def _entries(directory: str | os.PathLike[str]) -> list[Path]:
    directory = Path(directory)
    return sorted(directory.iterdir()) if directory.is_dir() else []


def _is_ours(folder: Path) -> bool:
    """Whether it is a real folder and a temporary, a finished step, or what is left of one."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    inside = {entry.name.split(_ORBAX_TEMPORARY)[0] for entry in folder.iterdir()}
    return _ORBAX_TEMPORARY in folder.name or NAME in inside or inside <= {ARRAYS, PLAN, META, f"{NAME}.tmp"}


def _has_manifest(folder: Path) -> bool:
    return folder.is_dir() and not folder.is_symlink() and os.path.lexists(folder / NAME)


def _walk(folder: Path) -> tuple[dict[str, int], list[str]]:
    """Sizes of the plain files under a folder but its manifest, by relative name, and a line for anything else."""
    files: dict[str, int] = {}
    refused: list[str] = []
    waiting = [folder]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                name = Path(entry.path).relative_to(folder).as_posix()
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode):
                    waiting.append(Path(entry.path))
                elif not stat.S_ISREG(mode):
                    refused.append(f"{name}: {'symbolic link' if stat.S_ISLNK(mode) else 'not a plain file'}, refused")
                elif name != NAME:
                    files[name] = entry.stat(follow_symlinks=False).st_size
    return files, sorted(refused)


def _measure(path: Path) -> tuple[int, int]:
    """Size and crc32 of a file, read in pieces."""
    size = crc = 0
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return size, crc


def _differences(path: Path, name: str, size: int, wanted: Any) -> list[str]:
    """At most one line on how a file differs from its manifest entry."""
    if not isinstance(wanted, dict) or wanted.keys() != {"size", "crc32"}:
        return [f"{name}: its manifest entry makes no sense"]
    if size != wanted["size"]:
        return [f"{name}: size differs, {wanted['size']} B saved, {size} B now"]
    try:
        crc = f"{_measure(path)[1]:08x}"
    except OSError as error:
        return [f"{name}: cannot be read, {error.strerror}"]
    return [] if crc == wanted["crc32"] else [f"{name}: checksum differs, {wanted['crc32']} saved, {crc} now"]


def _render(content: dict[str, Any]) -> bytes:
    """The manifest's exact bytes: its content, and a checksum over that content."""
    crc = zlib.crc32(json.dumps(content).encode())
    return (json.dumps({**content, "crc32": f"{crc:08x}"}, indent=1) + "\n").encode()


def _read(folder: Path) -> dict[str, Any]:
    """The files a manifest lists; ValueError when its bytes are not exactly what `write` would have written."""
    if not os.path.lexists(folder / NAME):
        raise ValueError("missing, so the save was never finished")
    content: Any = None
    try:
        raw = read_bytes(folder / NAME, follow_links=False)
        content = parse_json(raw)
        # Comparing bytes, not values, also finds a flip that JSON reads the same (white space, the case of a digit).
        intact = isinstance(content, dict) and content.pop("crc32", None) is not None and _render(content) == raw
    except ValueError:
        intact = False
    if not intact:
        raise ValueError("damaged, it does not match its own checksum")
    if content.get("format") != _FORMAT:
        raise ValueError(f"format {content.get('format')!r} is not known here")
    if not isinstance(content.get("files"), dict):
        raise ValueError("its list of files makes no sense")
    if content.get("step") != step_of(folder):
        raise ValueError(f"written for step {content.get('step')!r}, found in folder {folder.name}")
    return dict(content["files"])


def flush_folder(folder: Path) -> None:
    """Makes renames and new names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
