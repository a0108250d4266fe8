"""Machine: room and speed of its disks, shared memory, clock, and the limits of a process."""

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

TRIED_BYTES = 16 << 20
FEW_BYTES = 5 << 30
SLOW_BYTES_PER_SECOND = 50e6
LEAST_SHARED_BYTES = 1 << 30
LEAST_FILES = 4096
LEAST_PROCESSES = 1024
JUMP_SECONDS = 0.1

PLENTY = {"run folder": FEW_BYTES, "compile cache": 1 << 30, "temporary": 1 << 30}
"""What is looked at for its room, and with how much of it nothing is said."""


@dataclass(frozen=True)
class Reading:
    """Two clocks at one moment, in seconds: one that people can set, and one that only goes on."""

    wall: float
    monotonic: float

    @staticmethod
    def now() -> "Reading":
        """Both clocks now."""
        return Reading(time.time(), time.monotonic())


def disk(name: str, folder: Path) -> Verdict:
    """Whether a folder can be written to, has room, keeps what it is given, and how fast; nothing is left there."""
    place = folder.absolute()
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    try:
        room = os.statvfs(place)
        free = room.f_bavail * room.f_frsize
        speed = _written(place)
    except OSError as error:
        what = f"{name}: '{folder}' cannot be written to: {error.strerror}."
        return Verdict("disk", "problem", what, f"tried in '{place}'", _fix(name))
    told = f"{bytes_text(free)} free, {bytes_text(speed)}/s with fsync"
    if free < PLENTY[name]:
        return Verdict(
            "disk", "warning", f"{name}: only {bytes_text(free)} are free.", f"'{place}', {told}", _fix(name)
        )
    if room.f_files and room.f_favail < 10_000:
        return Verdict("disk", "warning", f"{name}: only {room.f_favail} more files fit.", f"'{place}'", _fix(name))
    if name == "run folder" and speed < SLOW_BYTES_PER_SECOND:
        what = f"{name}: a checkpoint of 1 GiB takes {2**30 / speed:.0f} s to write."
        return Verdict("disk", "warning", what, f"'{place}', {told}", "a faster disk, or a longer --save-every")
    return Verdict("disk", "ok", f"{name}: {told}", f"'{place}'")


def shared_memory(path: Path = Path("/dev/shm")) -> Verdict:
    """Whether processes of one machine can hand each other arrays."""
    fix = "in a container --shm-size=8g, else mount -o remount,size=8G /dev/shm"
    try:
        room = os.statvfs(path)
    except OSError as error:
        what = f"there is no shared memory: {error.strerror}."
        return Verdict("shared memory", "warning", what, str(path), fix)
    size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    if free < LEAST_SHARED_BYTES:
        what = f"{bytes_text(free)} are free: workers of a data loader and GPUs of one host share arrays there."
        return Verdict("shared memory", "warning", what, f"{path}, {bytes_text(size)} in all", fix)
    return Verdict("shared memory", "ok", f"{bytes_text(free)} free", str(path))


def clock(before: Reading, after: Reading, is_synchronised: bool | None) -> Verdict:
    """Whether the clock of the machine was set in between, or is one that nobody sets."""
    jump = (after.wall - before.wall) - (after.monotonic - before.monotonic)
    fix = "timedatectl set-ntp true, or start chronyd"
    if abs(jump) > JUMP_SECONDS:
        seconds = after.monotonic - before.monotonic
        what = f"the clock was set by {jump:+.1f} s while it was watched: times in reports are wrong."
        return Verdict("clock", "warning", what, f"watched for {seconds:.1f} s", fix)
    if is_synchronised is False:
        what = "no time server sets the clock: hosts of one run drift apart."
        return Verdict("clock", "warning", what, "the kernel says so (adjtimex)", fix)
    told = {True: "set by a time server", None: "whether a time server sets it cannot be told"}[is_synchronised]
    return Verdict("clock", "ok", f"steady, {told}")


def synchronised() -> bool | None:
    """Whether the kernel's clock follows a time server, as it says itself; None where it says nothing."""
    try:
        # A zeroed `struct timex` asks and changes nothing; state 5 is TIME_ERROR: not synchronised (adjtimex(2)).
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != 5


def limits(limit: Callable[[int], tuple[int, int]] = resource.getrlimit) -> list[Verdict]:
    """Whether a process may open as many files, and start as many threads, as a run does."""
    found = []
    asked = (
        ("open files", resource.RLIMIT_NOFILE, LEAST_FILES, "ulimit -n 65536"),
        ("processes", resource.RLIMIT_NPROC, LEAST_PROCESSES, "ulimit -u 65536"),
    )
    for name, which, least, fix in asked:
        soft, hard = limit(which)
        if soft != resource.RLIM_INFINITY and soft < least:
            bound = "no limit" if hard == resource.RLIM_INFINITY else str(hard)
            what = f"{soft} {name} are allowed, and a run may take {least}."
            found.append(Verdict("limits", "warning", what, f"at most {bound}", fix))
    told = f"{_limit(limit(resource.RLIMIT_NOFILE)[0])} open files, {_limit(limit(resource.RLIMIT_NPROC)[0])} processes"
    return found or [Verdict("limits", "ok", told)]


def _limit(value: int) -> str:
    return "any number of" if value == resource.RLIM_INFINITY else str(value)


def _written(place: Path) -> float:
    """Bytes a second into a file of this folder, as a checkpoint and a lock are written."""
    block = os.urandom(1 << 20)
    with NamedTemporaryFile(dir=place, prefix=".spanax-doctor-") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        began = time.monotonic()
        for _ in range(TRIED_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return TRIED_BYTES / (time.monotonic() - began)


def _fix(name: str) -> str:
    places = {"run folder": "--out elsewhere", "compile cache": "another XDG_CACHE_HOME", "temporary": "another TMPDIR"}
    return f"make room or give yourself the right to write there, or {places[name]}"
