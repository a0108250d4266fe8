"""Checks the installed versions, the environment, and the folders that a run writes to."""

import fcntl
import importlib.metadata
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from spanax.units import bytes_text, whole_number

THREADS = 16
"""Minimum NPROC for 8 simulated devices: with fewer threads XLA's CPU collectives deadlock (jax 0.10.2)."""

PLUGIN = re.compile(r"jax-.*-(plugin|pjrt)")

FOLDERS = {
    "run folder": (5 << 30, "--output-dir elsewhere"),
    "temporary": (1 << 30, "another TMPDIR"),
    "compile cache": (1 << 30, "another XDG_CACHE_HOME"),
}
"""By folder: the free space below which it gets a warning, and what to set for another one."""

MIN_SHARED_BYTES = 1 << 30

Installed = Mapping[str, importlib.metadata.Distribution]
"""The installed packages by normalized name."""


@dataclass(frozen=True)
class Verdict:
    """The result of one check.

    Attributes:
      name: the subject, such as `disk` or `devices`.
      state: `problem` stops a run or loses work, `warning` slows it down or may do so later.
      what: one line, with values.
      where: additional values.
      fix: the change that resolves a problem or warning; empty otherwise.
    """

    name: str
    state: Literal["ok", "warning", "problem"]
    what: str
    where: str = ""
    fix: str = ""


def installed_packages() -> Installed:
    """Returns all packages that this Python can import.

    Example:
      >>> installed_packages()["jax"].version == importlib.metadata.version("jax")
      True
    """
    packages: dict[str, importlib.metadata.Distribution] = {}
    for distribution in importlib.metadata.distributions():
        if name := distribution.metadata["Name"]:
            packages.setdefault(canonicalize_name(name), distribution)  # the first one on the path is imported
    return packages


def packages(installed: Installed) -> Verdict:
    """Checks that Spanax's requirements, and those of its direct requirements, have compatible versions."""
    if "spanax" not in installed:
        message = "spanax is not installed as a package, so versions cannot be checked."
        return Verdict("packages", "warning", message, fix="pip install spanax")
    direct = [canonicalize_name(requirement.name) for requirement in _requirements(installed, "spanax")]
    wrong = {}
    for package in ("spanax", *direct):
        for requirement in _requirements(installed, package):
            version = _version(installed, requirement.name)
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                needed = f"{requirement.name}{requirement.specifier}"
                wrong[f"{package} needs {needed}, but {version or 'none'} is installed"] = f"'{needed}'"
    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
    summary = ", ".join(f"{name} {_version(installed, name)}" for name in names)
    if not wrong:
        return Verdict("packages", "ok", summary)
    first, *others = wrong
    fix = f"pip install {' '.join(sorted({*wrong.values()}))}"
    return Verdict("packages", "problem", f"{first}.", "; ".join([*others, summary]), fix)


def plugins(installed: Installed) -> Verdict:
    """Checks that plugins for accelerators have the version of jaxlib, as they must."""
    jaxlib = _version(installed, "jaxlib")
    versions = {name: installed[name].version for name in sorted(installed) if PLUGIN.fullmatch(name)}
    wrong = [f"{name} {version}" for name, version in versions.items() if version != jaxlib]
    if wrong:
        message = f"{wrong[0]} is incompatible with jaxlib {jaxlib}."
        fix = f"pip install {' '.join(f'{name}=={jaxlib}' for name in versions)}"
        return Verdict("plugins", "problem", message, "; ".join(wrong[1:]), fix)
    summary = [f"{name} {version}" for name, version in versions.items()]
    if libtpu := _version(installed, "libtpu"):
        summary.append(f"libtpu {libtpu}")
    return Verdict("plugins", "ok", ", ".join(summary) or "none: JAX uses the CPU only")


def settings(environ: Mapping[str, str], *, is_group: bool) -> list[Verdict]:
    """Checks environment variables that make a run hang."""
    warnings = []
    threads = environ.get("NPROC", "")
    if threads and (whole_number(threads) or 0) < THREADS:
        message = f"NPROC={threads}: simulated devices may deadlock."
        warnings.append(Verdict("settings", "warning", message, fix=f"NPROC={THREADS}, or unset it"))
    proxies = " ".join(sorted(name for name in environ if re.fullmatch("(https?|grpc)_proxy", name.lower())))
    if proxies and is_group:
        message = "a proxy is set, and the hosts of a run may try to connect through it."
        warnings.append(Verdict("settings", "warning", message, proxies, f"unset {proxies}"))
    set_ = ", ".join(f"{name}={environ[name]}" for name in ("JAX_PLATFORMS", "XLA_FLAGS", "NPROC") if environ.get(name))
    return warnings or [Verdict("settings", "ok", set_ or "nothing is set")]


def disks(out: Path, environ: Mapping[str, str]) -> list[Verdict]:
    """Checks the folders that a run with this folder writes to."""
    cache = environ.get("JAX_COMPILATION_CACHE_DIR") or environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folders = {"run folder": out, "temporary": Path(tempfile.gettempdir())}
    if "://" not in cache:  # a bucket, which only JAX can access
        folders["compile cache"] = Path(cache)
    return [disk(name, folder) for name, folder in folders.items()]


def disk(name: str, folder: Path) -> Verdict:
    """Checks that a folder of `FOLDERS` is writable, can be locked and has free space; leaves no files."""
    min_free_bytes, alternative = FOLDERS[name]
    fix = f"free disk space, or get write permission, or {alternative}"
    place = folder.absolute()
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    try:
        filesystem = os.statvfs(place)
        with tempfile.NamedTemporaryFile(dir=place, prefix=".spanax-doctor-") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(bytes(16 << 20))
            os.fsync(file.fileno())
    except OSError as error:
        message = f"{name}: '{folder}' cannot be written to: {error.strerror}."
        return Verdict("disk", "problem", message, f"tried in '{place}'", fix)
    free = filesystem.f_bavail * filesystem.f_frsize
    if free < min_free_bytes:
        return Verdict("disk", "warning", f"{name}: only {bytes_text(free)} are free.", f"'{place}'", fix)
    return Verdict("disk", "ok", f"{name}: {bytes_text(free)} free", f"'{place}'")


def shared_memory(path: Path = Path("/dev/shm")) -> Verdict:
    """Checks that processes of one machine can exchange arrays in shared memory."""
    fix = "--shm-size=8g for a container, otherwise mount -o remount,size=8G /dev/shm"
    try:
        filesystem = os.statvfs(path)
    except OSError as error:
        message = f"there is no shared memory: {error.strerror}."
        return Verdict("shared memory", "warning", message, str(path), fix)
    free = filesystem.f_bavail * filesystem.f_frsize
    if free < MIN_SHARED_BYTES:
        message = f"{bytes_text(free)} are free: workers of a data loader and GPUs of one host share arrays there."
        return Verdict("shared memory", "warning", message, str(path), fix)
    return Verdict("shared memory", "ok", f"{bytes_text(free)} free", str(path))


def _requirements(installed: Installed, package: str) -> list[Requirement]:
    """Returns the requirements of a package on this platform, without its extras; none if it is not installed."""
    declared = (installed[package].requires or ()) if package in installed else ()
    requirements = map(Requirement, declared)
    return [entry for entry in requirements if entry.marker is None or entry.marker.evaluate({"extra": ""})]


def _version(installed: Installed, name: str) -> str | None:
    return installed[canonicalize_name(name)].version if canonicalize_name(name) in installed else None
