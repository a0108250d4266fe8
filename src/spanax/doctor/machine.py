"""Checks disks, shared memory, the clock, and process limits."""

import ctypes
import fcntl
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

from spanax.doctor.verdict import Verdict
from spanax.units import bytes_text

WRITTEN_BYTES = 16 << 20
MIN_FREE_BYTES = 5 << 30
MIN_BYTES_PER_SECOND = 50e6
MIN_SHARED_BYTES = 1 << 30
MIN_FILES = 4096
MIN_PROCESSES = 1024
JUMP_SECONDS = 0.1

MIN_FREE = {"run folder": MIN_FREE_BYTES, "compile cache": 1 << 30, "temporary": 1 << 30}
"""Free space below which each folder gets a warning."""


@dataclass(frozen=True)
class Reading:
    """Two clocks at one time, in seconds: the wall clock, which can be set, and a monotonic clock."""

    wall: float
    monotonic: float

    @staticmethod
    def now() -> "Reading":
        """Reads both clocks."""
        return Reading(time.time(), time.monotonic())


def disk(name: str, folder: Path) -> Verdict:
    """Checks that a folder is writable, has free space and is fast enough with locks and fsync; leaves no files."""
    place = folder.absolute()
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    try:
        filesystem = os.statvfs(place)
        free = filesystem.f_bavail * filesystem.f_frsize
        speed = _written(place)
    except OSError as error:
        message = f"{name}: '{folder}' cannot be written to: {error.strerror}."
        return Verdict("disk", "problem", message, f"tried in '{place}'", _fix(name))
    summary = f"{bytes_text(free)} free, {bytes_text(speed)}/s with fsync"
    if free < MIN_FREE[name]:
        return Verdict(
            "disk", "warning", f"{name}: only {bytes_text(free)} are free.", f"'{place}', {summary}", _fix(name)
        )
    if filesystem.f_files and filesystem.f_favail < 10_000:
        return Verdict(
            "disk", "warning", f"{name}: only {filesystem.f_favail} more files fit.", f"'{place}'", _fix(name)
        )
    if name == "run folder" and speed < MIN_BYTES_PER_SECOND:
        message = f"{name}: writing a checkpoint of 1 GiB takes {2**30 / speed:.0f} s."
        return Verdict("disk", "warning", message, f"'{place}', {summary}", "a faster disk, or a longer --save-every")
    return Verdict("disk", "ok", f"{name}: {summary}", f"'{place}'")


def shared_memory(path: Path = Path("/dev/shm")) -> Verdict:
    """Checks that processes of one machine can exchange arrays in shared memory."""
    fix = "--shm-size=8g for a container, otherwise mount -o remount,size=8G /dev/shm"
    try:
        filesystem = os.statvfs(path)
    except OSError as error:
        message = f"there is no shared memory: {error.strerror}."
        return Verdict("shared memory", "warning", message, str(path), fix)
    size, free = filesystem.f_blocks * filesystem.f_frsize, filesystem.f_bavail * filesystem.f_frsize
    if free < MIN_SHARED_BYTES:
        message = f"{bytes_text(free)} are free: workers of a data loader and GPUs of one host share arrays there."
        return Verdict("shared memory", "warning", message, f"{path}, {bytes_text(size)} in all", fix)
    return Verdict("shared memory", "ok", f"{bytes_text(free)} free", str(path))


def clock(before: Reading, after: Reading, is_synchronized: bool | None) -> Verdict:
    """Checks that the wall clock was not set between two readings, and is synchronized."""
    jump = (after.wall - before.wall) - (after.monotonic - before.monotonic)
    fix = "timedatectl set-ntp true, or start chronyd"
    if abs(jump) > JUMP_SECONDS:
        seconds = after.monotonic - before.monotonic
        message = f"the clock was set by {jump:+.1f} s during the check: times in reports are wrong."
        return Verdict("clock", "warning", message, f"checked for {seconds:.1f} s", fix)
    if is_synchronized is False:
        message = "the clock is not synchronized: the clocks of hosts drift apart."
        return Verdict("clock", "warning", message, "as reported by the kernel (adjtimex)", fix)
    source = {True: "synchronized", None: "synchronization unknown"}[is_synchronized]
    return Verdict("clock", "ok", f"steady, {source}")


def is_clock_synchronized() -> bool | None:
    """Returns whether the kernel reports a synchronized clock; None if it does not report."""
    try:
        # A zeroed `struct timex` only queries; state 5 is TIME_ERROR: not synchronized (adjtimex(2)).
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != 5


def limits(limit: Callable[[int], tuple[int, int]] = resource.getrlimit) -> list[Verdict]:
    """Checks that a process may open as many files, and start as many threads, as a run needs."""
    verdicts = []
    checks = (
        ("open files", resource.RLIMIT_NOFILE, MIN_FILES, "ulimit -n 65536"),
        ("processes", resource.RLIMIT_NPROC, MIN_PROCESSES, "ulimit -u 65536"),
    )
    for name, which, minimum, fix in checks:
        soft, hard = limit(which)
        if soft != resource.RLIM_INFINITY and soft < minimum:
            bound = "no limit" if hard == resource.RLIM_INFINITY else str(hard)
            message = f"{soft} {name} are allowed, but a run may need {minimum}."
            verdicts.append(Verdict("limits", "warning", message, f"at most {bound}", fix))
    summary = (
        f"{_limit(limit(resource.RLIMIT_NOFILE)[0])} open files, {_limit(limit(resource.RLIMIT_NPROC)[0])} processes"
    )
    return verdicts or [Verdict("limits", "ok", summary)]


def _limit(value: int) -> str:
    return "any number of" if value == resource.RLIM_INFINITY else str(value)


def _written(place: Path) -> float:
    """Returns the write speed of a file in this folder in bytes per second, with a lock and fsync."""
    block = os.urandom(1 << 20)
    with NamedTemporaryFile(dir=place, prefix=".spanax-doctor-") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        began = time.monotonic()
        for _ in range(WRITTEN_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return WRITTEN_BYTES / (time.monotonic() - began)


def _fix(name: str) -> str:
    alternatives = {
        "run folder": "--output-dir elsewhere",
        "compile cache": "another XDG_CACHE_HOME",
        "temporary": "another TMPDIR",
    }
    return f"free disk space, or get write permission, or {alternatives[name]}"
