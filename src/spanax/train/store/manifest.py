"""Provides the manifest of a step: its files with size and checksum, written last to mark the save as finished.

A step is a folder DIR/<step>. It is written as DIR/<step>.new<attempt>, counts as finished once its manifest exists,
and is then renamed to the plain number, replacing an older step of that number: at any time one of the two is complete.
A step that is being created or removed has a hidden name, so that readers see it complete or not at all. This module
does not need JAX.
"""

import json
import os
import re
import stat
import time
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from spanax.documents import parse_json
from spanax.entries.folder import TEMPORARY, Folder, Place
from spanax.entries.kind import Kind
from spanax.entries.names import CHECKPOINTS, MANIFEST, META, PLAN, UNBOUNDED, Name
from spanax.errors import EntryError, ObjectsError, WriteError, first_line
from spanax.schema import SchemaError, parsed

ARRAYS = "arrays"
_FORMAT = 1
_STEP = re.compile(r"(0|[1-9][0-9]{0,17})(\.new[0-9]*)?")
_HIDDEN = re.compile(r"\." + _STEP.pattern + r"\.[0-9a-f]{32}")
ORBAX_TEMPORARY = ".orbax-checkpoint-tmp"
_CHUNK_BYTES = 1 << 20
# Pending writes of a failed save may recreate files for this long after their folder was removed.
_SETTLE_SECONDS = 5.0
# They have ended when nothing was recreated for this long.
_QUIET_SECONDS = 0.5


@dataclass(frozen=True)
class Meta:
    """The content of meta.json: when a step was saved, its leaves, and the caller's values."""

    saved_at: str
    leaves: Mapping[str, str]
    meta: Mapping[str, Any]


def step_of(folder: str | os.PathLike[str]) -> int | None:
    """Returns the step number in the name of a folder, or None.

    Example:
      >>> step_of("runs/a/40"), step_of("runs/a/40.new3"), step_of("runs/a/040"), step_of("runs/a/logs")
      (40, 40, None, None)
    """
    match = _STEP.fullmatch(Path(folder).name)
    return int(match[1]) if match else None


def write(folder: str | os.PathLike[str]) -> None:
    """Marks a step as finished: flushes every file and folder to disk, then writes the manifest atomically.

    Args:
      folder: the step's folder, with all its other files complete.

    Raises:
      WriteError: the folder's name is not a step, or it contains a link or a special file.
      OSError: a file cannot be read, flushed or written.
    """
    place = step_folder(folder)
    step = step_of(place)
    files, refused = walk(place)
    if step is None or refused:
        raise WriteError(
            f"{folder} cannot become a finished step: {'; '.join(refused) or 'its name is not a step number'}."
        )
    if META not in files:
        raise WriteError(f"{folder} cannot become a finished step: its {META} was removed.")
    listed = {}
    for name in sorted(files):
        with place.reading(Name(name, UNBOUNDED)) as file:
            os.fsync(file.fileno())
        size, crc = _measure(place, name)
        listed[name] = {"size": size, "crc32": f"{crc:08x}"}
    for name, status in place.walk():
        if stat.S_ISDIR(status.st_mode):
            place.inner(name).flush()
    place.replace(MANIFEST, [_render({"format": _FORMAT, "step": step, "files": listed})])
    place.outer.flush()


def problems(folder: str | os.PathLike[str]) -> list[str]:
    """Returns the differences between a step's files and its manifest, one line a file; empty if every byte matches.

    Args:
      folder: the step's folder. Every byte of it is read once (about 1 s for 2 GB).

    Example:
      >>> problems("no/such/folder/40")
      ['40: not a folder']
    """
    place = step_folder(folder)
    if (kind := place.kind()) is not Kind.FOLDER:
        return [f"{place.name}: {'symbolic link, refused' if kind is Kind.LINK else 'not a folder'}"]
    try:
        listed = _read(place)
        files, lines = walk(place)
    except (OSError, ValueError) as error:
        return [f"{MANIFEST}: {first_line(error)}"]
    for name in sorted(listed.keys() | files.keys()):
        if name not in files:
            is_outside = name.startswith("/") or ".." in name.split("/")
            lines.append(f"{name}: {'leaves the folder, refused' if is_outside else 'missing'}")
        elif name not in listed:
            lines.append(f"{name}: extra, not in the manifest")
        else:
            lines += _differences(place, name, files[name], listed[name])
    return lines or _problems_of_meta(place)


def _problems_of_meta(place: Folder) -> list[str]:
    try:
        read_meta(place)
    except FileNotFoundError:
        return [f"{META}: missing, also in the manifest"]
    except (OSError, ValueError) as error:
        return [f"{META}: {first_line(error)}"]
    return []


def steps_of_run(directory: Place) -> Folder:
    """Returns the folder of steps: that of the given run folder, or the given folder itself.

    Example:
      >>> steps_of_run("no/such/run").name
      'run'
    """
    place = Folder.of(directory)
    return place if place.kind(CHECKPOINTS) is None else place.inner(CHECKPOINTS)


def steps(directory: Place) -> list[int]:
    """Returns the numbers of the finished steps, newest last.

    Example:
      >>> steps("no/such/folder")
      []
    """
    return sorted({step for step, _ in finished(directory)})


def finished(directory: Place) -> list[tuple[int, Folder]]:
    """Returns (step, folder) of every finished step, newest last, also among folders of the same step."""
    numbered = [(step_of(folder), folder) for folder in entries(directory)]
    return sorted([(step, folder) for step, folder in numbered if step is not None and has_manifest(folder)], key=_age)


def unfinished(directory: Place) -> list[Folder]:
    """Returns entries named like a step that are not finished steps: interrupted saves, links, files."""
    return [folder for folder in entries(directory) if step_of(folder) is not None and not has_manifest(folder)]


def meta_text(leaves: Mapping[str, str], meta: Mapping[str, Any]) -> bytes:
    """Returns the content of meta.json: the current time, the leaves, and the caller's values.

    Raises:
      SpanaxError: the values cannot be encoded as JSON.
    """
    document = Meta(utc(time.time()), dict(leaves), dict(meta))
    try:
        return (json.dumps(vars(document), indent=1, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise ObjectsError(f"meta cannot be saved: {error}.", fix="use JSON values only") from error


def read_meta(folder: Place) -> Meta:
    """Returns the content of the meta.json of a step.

    Raises:
      ValueError: the file is not a valid meta.json.
    """
    try:
        return parsed(Meta, parse_json(step_folder(folder).read(META)), is_strict=False)
    except SchemaError as error:
        raise ValueError(f"{META} is invalid: {error}") from error


def utc(seconds: float) -> str:
    """Returns seconds since 1970 as UTC in ISO 8601.

    Example:
      >>> utc(0)
      '1970-01-01T00:00:00+00:00'
    """
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def settle(directory: Place) -> None:
    """Renames every finished DIR/<step>.new<attempt> to its plain number, replacing an older step of that number."""
    place = Folder.of(directory)
    finished_steps = finished(place)
    for step, folder in finished_steps:
        number = place.inner(str(step))
        if folder == number:
            continue
        if (step, number) in finished_steps and problems(folder) and not problems(number):
            discard(folder)
            continue
        if _is_ours(number):
            discard(number)
        place.rename(folder.name, number.name)
        place.flush()


def clear(directory: Place) -> None:
    """Removes leftovers of interrupted saves: temporaries, and step folders that contain only files of this format."""
    settle(directory)
    for folder in entries(directory):
        if _HIDDEN.fullmatch(folder.name) and folder.kind() is Kind.FOLDER:
            _remove(folder)
    for folder in unfinished(directory):
        if _is_ours(folder):
            discard(folder)


def hidden(folder: Folder) -> Folder:
    """Returns a unique hidden name for a step that is being created or removed; readers skip it."""
    return folder.outer.inner(f".{folder.name}.{uuid.uuid4().hex}")


def discard(folder: Place) -> None:
    """Removes a step's folder; renames it to a hidden name first, so that a partial step is never read."""
    place = step_folder(folder)
    hidden_folder = hidden(place)
    try:
        place.outer.rename(place.name, hidden_folder.name)
    except FileNotFoundError:
        return
    _remove(hidden_folder)


def discard_written(folder: Place) -> None:
    """Removes the folder of a failed save until it stays away.

    TensorStore's own threads finish the writes of the other arrays, which nothing can await, and create the folders of
    their paths again. What they write after `_SETTLE_SECONDS` is removed before the next save (`clear`).
    """
    place = step_folder(folder)
    discard(place)
    start = quiet_since = time.monotonic()
    while (now := time.monotonic()) < min(quiet_since + _QUIET_SECONDS, start + _SETTLE_SECONDS):
        if place.kind() is not None:
            _remove(place)
            quiet_since = now
        time.sleep(0.02)


def _remove(place: Folder) -> None:
    deadline = time.monotonic() + _SETTLE_SECONDS
    while place.kind() is not None:
        try:
            place.outer.remove_folder(place.name)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def step_folder(folder: Place) -> Folder:
    """Returns the folder of a step as an entry of the folder of all steps."""
    path = Path(folder)
    return folder if isinstance(folder, Folder) else Folder(path.parent, (path.name,))


def _age(entry: tuple[int, Folder]) -> tuple[int, int, str]:
    """The sort key of steps."""
    step, folder = entry
    return step, len(folder.path.suffix), folder.path.suffix


def entries(directory: Place) -> list[Folder]:
    """Returns all entries of a folder, by name; none if it does not exist."""
    place = Folder.of(directory)
    return [place.inner(name) for name in place.names()]


def _is_ours(folder: Folder) -> bool:
    """Returns whether an entry is a real folder and a finished step, or the remains of one."""
    if folder.kind() is not Kind.FOLDER:
        return False
    names = {name.split(ORBAX_TEMPORARY)[0] for name in folder.names() if not TEMPORARY.fullmatch(name)}
    return MANIFEST in names or names <= {ARRAYS, PLAN, META}


def has_manifest(folder: Folder) -> bool:
    """Returns whether a folder is a finished step: a real folder with a manifest."""
    return folder.kind() is Kind.FOLDER and folder.kind(MANIFEST) is not None


def walk(folder: Folder) -> tuple[dict[str, int], list[str]]:
    """Returns the sizes of the regular files below a folder, without its manifest, and a line for any other entry."""
    files: dict[str, int] = {}
    refused: list[str] = []
    for name, status in folder.walk():
        kind = Kind.of(status.st_mode)
        if kind is Kind.FILE and name != MANIFEST:
            files[name] = status.st_size
        elif kind not in (Kind.FILE, Kind.FOLDER):
            refused.append(f"{name}: {'symbolic link' if kind is Kind.LINK else 'not a plain file'}, refused")
    return files, sorted(refused)


def _measure(folder: Folder, name: str) -> tuple[int, int]:
    """Returns size and crc32 of a file, read in chunks."""
    size = crc = 0
    with folder.reading(Name(name, UNBOUNDED)) as file:
        while chunk := file.read(_CHUNK_BYTES):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return size, crc


def _differences(folder: Folder, name: str, size: int, entry: Any) -> list[str]:
    """Returns at most one line on how a file differs from its manifest entry."""
    if not isinstance(entry, dict) or entry.keys() != {"size", "crc32"}:
        return [f"{name}: its manifest entry is invalid"]
    if size != entry["size"]:
        return [f"{name}: size differs, {entry['size']} B saved, {size} B now"]
    try:
        crc = f"{_measure(folder, name)[1]:08x}"
    except OSError as error:
        return [f"{name}: cannot be read, {error.strerror}"]
    return [] if crc == entry["crc32"] else [f"{name}: checksum differs, {entry['crc32']} saved, {crc} now"]


def _render(content: dict[str, Any]) -> bytes:
    """Returns the exact bytes of a manifest: its content, and a checksum over that content."""
    crc = zlib.crc32(json.dumps(content).encode())
    return (json.dumps({**content, "crc32": f"{crc:08x}"}, indent=1) + "\n").encode()


def _read(folder: Folder) -> dict[str, Any]:
    """Returns the files in a manifest.

    Raises:
      ValueError: its bytes differ from those that `write` would write.
    """
    if folder.kind(MANIFEST) is None:
        raise ValueError("missing, so the save was never finished")
    content: Any = None
    try:
        raw = folder.read(MANIFEST)
        content = parse_json(raw)
        # Comparing bytes, not values, also detects flips that JSON ignores (white space, the case of a hex digit).
        intact = isinstance(content, dict) and content.pop("crc32", None) is not None and _render(content) == raw
    except EntryError:
        raise
    except ValueError:
        intact = False
    if not intact:
        raise ValueError("damaged, it does not match its own checksum")
    if content.get("format") != _FORMAT:
        raise ValueError(f"format {content.get('format')!r} is not supported")
    if not isinstance(content.get("files"), dict):
        raise ValueError("its list of files is invalid")
    if content.get("step") != step_of(folder):
        raise ValueError(f"written for step {content.get('step')!r}, found in folder {folder.name}")
    return dict(content["files"])
