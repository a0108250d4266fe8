"""Compares installed versions with supported ones, and reports settings that slow down or stop a run."""

import importlib.metadata
import platform
import re
from collections.abc import Callable, Mapping, Sequence

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from spanax.doctor.verdict import Verdict

THREADS = 16
"""Minimum NPROC for 8 simulated devices: with fewer threads XLA's CPU collectives deadlock (jax 0.10.2)."""

SLOW = {
    "JAX_DISABLE_JIT": "nothing is compiled",
    "JAX_DEBUG_NANS": "every step blocks, and is repeated if it has a NaN",
    "JAX_ENABLE_X64": "values take twice the memory",
}


class Installed:
    """Metadata of the installed packages.

    Example:
      >>> Installed().version("jax") == importlib.metadata.version("jax"), Installed().version("no-such")
      (True, None)
    """

    def version(self, name: str) -> str | None:
        """Returns the version of a package; None if it is not installed."""
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    def requires(self, name: str) -> Sequence[str]:
        """Returns the declared requirements of a package; empty if it is not installed."""
        try:
            return importlib.metadata.requires(name) or ()
        except importlib.metadata.PackageNotFoundError:
            return ()

    def python(self, name: str) -> str:
        """Returns the Python versions that a package supports; empty if it does not declare them."""
        try:
            return str((importlib.metadata.metadata(name).get_all("Requires-Python") or [""])[0])
        except importlib.metadata.PackageNotFoundError:
            return ""

    def names(self) -> Sequence[str]:
        """Returns the names of all packages."""
        return sorted(
            {
                distribution.metadata["Name"]
                for distribution in importlib.metadata.distributions()
                if distribution.metadata["Name"]
            }
        )


def python(installed: Installed, version: str = platform.python_version()) -> Verdict:
    """Checks that this Python is supported."""
    supported = installed.python("spanax")
    if SpecifierSet(supported).contains(version, prereleases=True):
        return Verdict("python", "ok", f"{version}, and {supported or 'any'} is supported")
    return Verdict(
        "python", "problem", f"{version} is not supported.", f"spanax needs Python {supported}", "another environment"
    )


def packages(installed: Installed) -> Verdict:
    """Checks that Spanax's requirements, and those of its direct requirements, have compatible versions."""
    if installed.version("spanax") is None:
        message = "spanax is not installed as a package, so versions cannot be checked."
        return Verdict("packages", "warning", message, fix="pip install spanax")
    direct = [requirement.name for requirement in _requirements(installed, "spanax")]
    wrong, missing = [], set()
    for package in ("spanax", *direct):
        for requirement in _requirements(installed, package):
            version = installed.version(requirement.name)
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                wrong.append(
                    f"{package} needs {requirement.name}{requirement.specifier}, but {version or 'none'} is installed"
                )
                missing.add(f"'{requirement.name}{requirement.specifier}'")
    summary = ", ".join(
        f"{name} {installed.version(name)}" for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
    )
    if not wrong:
        return Verdict("packages", "ok", summary)
    return Verdict("packages", "problem", f"{wrong[0]}.", "; ".join([*wrong[1:], summary]), _install(sorted(missing)))


def plugins(installed: Installed) -> Verdict:
    """Checks that plugins for accelerators have the version of jaxlib, as they must."""
    jaxlib = installed.version("jaxlib")
    versions = {
        name: installed.version(name) for name in installed.names() if re.fullmatch(r"jax-.*-(plugin|pjrt)", name)
    }
    wrong = [f"{name} {version}" for name, version in versions.items() if version != jaxlib]
    if wrong:
        message, fix = f"{wrong[0]} is incompatible with jaxlib {jaxlib}.", [f"{name}=={jaxlib}" for name in versions]
        return Verdict("plugins", "problem", message, "; ".join(wrong[1:]), _install(fix))
    summary = [f"{name} {version}" for name, version in versions.items()]
    if libtpu := installed.version("libtpu"):
        summary.append(f"libtpu {libtpu}")
    return Verdict("plugins", "ok", ", ".join(summary) or "none: JAX uses the CPU only")


def settings(environ: Mapping[str, str], *, is_group: bool) -> list[Verdict]:
    """Checks environment variables that make a run hang, abort or slow down."""
    verdicts = []
    threads = environ.get("NPROC", "")
    if threads and not (threads.isdigit() and int(threads) >= THREADS):
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
    """Returns the requirements of a package on this platform, without its extras."""
    parsed = [Requirement(text) for text in installed.requires(package)]
    return [
        requirement
        for requirement in parsed
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    ]


_install: Callable[[Sequence[str]], str] = lambda packages: f"pip install {' '.join(packages)}"  # noqa: E731
