"""Software: the versions that are installed, held against those that are supported, and settings that are traps."""

import importlib.metadata
import platform
import re
from collections.abc import Callable, Mapping, Sequence

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from spanax.doctor.verdict import Verdict

THREADS = 16
"""What NPROC must be at least for 8 simulated devices: with fewer threads XLA's CPU collectives wait for each other for
ever (jax 0.10.2)."""

SLOW = {
    "JAX_DISABLE_JIT": "nothing is compiled",
    "JAX_DEBUG_NANS": "every step is waited for, and taken again where it has a NaN",
    "JAX_ENABLE_X64": "numbers take twice the bytes",
}


class Installed:
    """What importlib.metadata knows of the packages that are installed.

    Example:
      >>> Installed().version("jax") == importlib.metadata.version("jax"), Installed().version("no-such")
      (True, None)
    """

    def version(self, name: str) -> str | None:
        """The version of a package; None where it is not installed."""
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    def requires(self, name: str) -> Sequence[str]:
        """What a package needs, as it says itself; nothing where it is not installed."""
        try:
            return importlib.metadata.requires(name) or ()
        except importlib.metadata.PackageNotFoundError:
            return ()

    def python(self, name: str) -> str:
        """The Pythons that a package supports; empty where it does not say."""
        try:
            return str((importlib.metadata.metadata(name).get_all("Requires-Python") or [""])[0])
        except importlib.metadata.PackageNotFoundError:
            return ""

    def names(self) -> Sequence[str]:
        """All packages."""
        return sorted({one.metadata["Name"] for one in importlib.metadata.distributions() if one.metadata["Name"]})


def python(installed: Installed, version: str = platform.python_version()) -> Verdict:
    """Whether this Python is supported."""
    supported = installed.python("spanax")
    if SpecifierSet(supported).contains(version, prereleases=True):
        return Verdict("python", "ok", f"{version}, and {supported or 'any'} is supported")
    return Verdict(
        "python", "problem", f"{version} is not supported.", f"spanax needs Python {supported}", "another environment"
    )


def packages(installed: Installed) -> Verdict:
    """Whether what Spanax needs, and what that needs in turn, is installed in versions that go together."""
    if installed.version("spanax") is None:
        what = "spanax is not installed as a package: versions have nothing to be held against."
        return Verdict("packages", "warning", what, fix="pip install spanax")
    needed = [requirement.name for requirement in _requirements(installed, "spanax")]
    wrong, wanted = [], set()
    for package in ("spanax", *needed):
        for requirement in _requirements(installed, package):
            found = installed.version(requirement.name)
            if found is None or not requirement.specifier.contains(found, prereleases=True):
                wrong.append(
                    f"{package} needs {requirement.name}{requirement.specifier}, and {found or 'none'} is here"
                )
                wanted.add(f"'{requirement.name}{requirement.specifier}'")
    told = ", ".join(
        f"{name} {installed.version(name)}" for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
    )
    if not wrong:
        return Verdict("packages", "ok", told)
    return Verdict("packages", "problem", f"{wrong[0]}.", "; ".join([*wrong[1:], told]), _install(sorted(wanted)))


def plugins(installed: Installed) -> Verdict:
    """Whether the plugins of accelerators are of the version of jaxlib, which is the only one that works."""
    jaxlib = installed.version("jaxlib")
    found = {name: installed.version(name) for name in installed.names() if re.fullmatch(r"jax-.*-(plugin|pjrt)", name)}
    wrong = [f"{name} {version}" for name, version in found.items() if version != jaxlib]
    if wrong:
        what, fix = f"{wrong[0]} does not go with jaxlib {jaxlib}.", [f"{name}=={jaxlib}" for name in found]
        return Verdict("plugins", "problem", what, "; ".join(wrong[1:]), _install(fix))
    told = [f"{name} {version}" for name, version in found.items()]
    if libtpu := installed.version("libtpu"):
        told.append(f"libtpu {libtpu}")
    return Verdict("plugins", "ok", ", ".join(told) or "none: JAX is for the CPU only")


def settings(environ: Mapping[str, str], *, is_group: bool) -> list[Verdict]:
    """Environment variables that make a run hang, abort or crawl; one verdict that all is well where there are none."""
    found = []
    threads = environ.get("NPROC", "")
    if threads and not (threads.isdigit() and int(threads) >= THREADS):
        what = f"NPROC={threads}: simulated devices may wait for each other for ever."
        found.append(Verdict("settings", "warning", what, fix=f"NPROC={THREADS}, or unset it"))
    if flag := re.search(r"--xla_force_host_platform_device_count=\S+", environ.get("XLA_FLAGS", "")):
        what = "XLA_FLAGS sets a number of devices, which JAX refuses beside its own setting; Spanax takes it out."
        found.append(Verdict("settings", "warning", what, flag[0], "take it out, and say --devices"))
    for name, effect in SLOW.items():
        if environ.get(name, "").lower() in ("1", "true", "t", "yes", "y", "on"):
            found.append(Verdict("settings", "warning", f"{name} is set: {effect}.", fix=f"unset {name}"))
    proxies = sorted(name for name in environ if name.lower() in ("http_proxy", "https_proxy", "grpc_proxy"))
    if proxies and is_group:
        what = "a proxy is set, and the hosts of a run may look for each other behind it."
        found.append(Verdict("settings", "warning", what, " ".join(proxies), f"unset {' '.join(proxies)}"))
    told = [f"{name}={environ[name]}" for name in ("JAX_PLATFORMS", "XLA_FLAGS", "NPROC") if environ.get(name)]
    return found or [Verdict("settings", "ok", ", ".join(told) or "nothing is set")]


def _requirements(installed: Installed, package: str) -> list[Requirement]:
    """What a package needs here, without its extras."""
    parsed = [Requirement(text) for text in installed.requires(package)]
    return [one for one in parsed if one.marker is None or one.marker.evaluate({"extra": ""})]


_install: Callable[[Sequence[str]], str] = lambda wanted: f"pip install {' '.join(wanted)}"  # noqa: E731
