"""Compares installed versions with supported ones, and reports settings that slow down or stop a run."""

import importlib.metadata
import platform
import re
from collections.abc import Mapping, Sequence

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from spanax.doctor.verdict import Verdict
from spanax.units import whole_number

THREADS = 16
"""Minimum NPROC for 8 simulated devices: with fewer threads XLA's CPU collectives deadlock (jax 0.10.2)."""

PLUGIN = re.compile(r"jax-.*-(plugin|pjrt)")

SLOW = {
    "JAX_DISABLE_JIT": "nothing is compiled",
    "JAX_DEBUG_NANS": "every step blocks, and is repeated if it has a NaN",
    "JAX_ENABLE_X64": "values take twice the memory",
}


Installed = Mapping[str, importlib.metadata.Distribution]
"""The installed packages by normalized name."""


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


def python(installed: Installed, version: str = platform.python_version()) -> Verdict:
    """Checks that this Python is supported."""
    declared = installed["spanax"].metadata.get_all("Requires-Python") if "spanax" in installed else None
    supported = declared[0] if declared else ""
    if SpecifierSet(supported).contains(version, prereleases=True):
        return Verdict("python", "ok", f"{version}, and {supported or 'any'} is supported")
    return Verdict(
        "python", "problem", f"{version} is not supported.", f"spanax needs Python {supported}", "another environment"
    )


def packages(installed: Installed) -> Verdict:
    """Checks that Spanax's requirements, and those of its direct requirements, have compatible versions."""
    if "spanax" not in installed:
        message = "spanax is not installed as a package, so versions cannot be checked."
        return Verdict("packages", "warning", message, fix="pip install spanax")
    direct = [canonicalize_name(requirement.name) for requirement in _requirements(installed, "spanax")]
    wrong, missing = [], set()
    for package in ("spanax", *direct):
        for requirement in _requirements(installed, package):
            version = _version(installed, requirement.name)
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                wrong.append(
                    f"{package} needs {requirement.name}{requirement.specifier}, but {version or 'none'} is installed"
                )
                missing.add(f"'{requirement.name}{requirement.specifier}'")
    summary = ", ".join(
        f"{name} {_version(installed, name)}"
        for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
    )
    if not wrong:
        return Verdict("packages", "ok", summary)
    return Verdict("packages", "problem", f"{wrong[0]}.", "; ".join([*wrong[1:], summary]), _install(sorted(missing)))


def plugins(installed: Installed) -> Verdict:
    """Checks that plugins for accelerators have the version of jaxlib, as they must."""
    jaxlib = _version(installed, "jaxlib")
    versions = {name: installed[name].version for name in sorted(installed) if PLUGIN.fullmatch(name)}
    wrong = [f"{name} {version}" for name, version in versions.items() if version != jaxlib]
    if wrong:
        message, fix = f"{wrong[0]} is incompatible with jaxlib {jaxlib}.", [f"{name}=={jaxlib}" for name in versions]
        return Verdict("plugins", "problem", message, "; ".join(wrong[1:]), _install(fix))
    summary = [f"{name} {version}" for name, version in versions.items()]
    if libtpu := _version(installed, "libtpu"):
        summary.append(f"libtpu {libtpu}")
    return Verdict("plugins", "ok", ", ".join(summary) or "none: JAX uses the CPU only")


def settings(environ: Mapping[str, str], *, is_group: bool) -> list[Verdict]:
    """Checks environment variables that make a run hang, abort or slow down."""
    verdicts = []
    threads = environ.get("NPROC", "")
    if threads and (whole_number(threads) or 0) < THREADS:
        message = f"NPROC={threads}: simulated devices may deadlock."
        verdicts.append(Verdict("settings", "warning", message, fix=f"NPROC={THREADS}, or unset it"))
    if flag := re.search(r"--xla_force_host_platform_device_count=\S+", environ.get("XLA_FLAGS", "")):
        message = (
            "XLA_FLAGS sets a number of devices, which JAX rejects together with its own setting; Spanax removes it."
        )
        verdicts.append(Verdict("settings", "warning", message, flag[0], "remove it, and use --devices"))
    for name, effect in SLOW.items():
        if environ.get(name, "").lower() in ("1", "true", "t", "yes", "y", "on"):
            verdicts.append(Verdict("settings", "warning", f"{name} is set: {effect}.", fix=f"unset {name}"))
    proxies = sorted(name for name in environ if name.lower() in ("http_proxy", "https_proxy", "grpc_proxy"))
    if proxies and is_group:
        message = "a proxy is set, and the hosts of a run may try to connect through it."
        verdicts.append(Verdict("settings", "warning", message, " ".join(proxies), f"unset {' '.join(proxies)}"))
    summary = [f"{name}={environ[name]}" for name in ("JAX_PLATFORMS", "XLA_FLAGS", "NPROC") if environ.get(name)]
    return verdicts or [Verdict("settings", "ok", ", ".join(summary) or "nothing is set")]


def _requirements(installed: Installed, package: str) -> list[Requirement]:
    """Returns the requirements of a package on this platform, without its extras; none if it is not installed."""
    declared = (installed[package].requires or ()) if package in installed else ()
    requirements = map(Requirement, declared)
    return [entry for entry in requirements if entry.marker is None or entry.marker.evaluate({"extra": ""})]


def _version(installed: Installed, name: str) -> str | None:
    return installed[canonicalize_name(name)].version if canonicalize_name(name) in installed else None


def _install(packages: Sequence[str]) -> str:
    return f"pip install {' '.join(packages)}"
