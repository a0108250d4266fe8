"""The run folder: one place a run, with its configuration, plan, environment, metrics and checkpoints.

config.toml  plan.json  env.json  metrics.jsonl  events.jsonl  heartbeats/  log/  checkpoints/<step>/  LOCK
"""

import fcntl
import json
import os
import platform
import shutil
import socket
import sys
import tomllib
from collections.abc import Mapping
from contextlib import contextmanager
from importlib.metadata import distributions, version
from pathlib import Path
from typing import IO, Any

from spanax.errors import ConfigError, DataError, WriteError
from spanax.run import heartbeat, manifest

CONFIG, PLAN, ENV, METRICS, CHECKPOINTS, LOCK = (
    "config.toml", "plan.json", "env.json", "metrics.jsonl", "checkpoints", "LOCK",
)  # fmt: skip


SAME_RUN = ("workload", "data", "tokenizer", "seed", "batch", "seq")
"""Settings that a run keeps for life: they make its model and the order of its data."""

VERSIONS = ("jax", "jaxlib", "flax", "optax")
"""Packages that the numbers of a run follow from."""


@contextmanager
def claimed(folder: Path, *, resume: bool):  # type: ignore[no-untyped-def]
    """Hold a run folder while the run lasts; the kernel lets go of it even when the process is killed.

    Raises:
      WriteError: another run holds it, it already has a run in it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / LOCK, "a+")  # noqa: SIM115
    except OSError as error:
        raise WriteError(f"cannot write to the run folder '{folder}'.", where=str(error)) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            raise WriteError(
                f"the run folder '{folder}' is in use.",
                where=lock.read().strip() or "held by another process",
                fix="another --out, or end that run first",
            ) from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        saved = manifest.steps(folder / CHECKPOINTS)
        if (saved or (folder / METRICS).exists()) and not resume:
            last = f"its newest checkpoint is step {saved[-1]}" if saved else "it has no checkpoint"
            raise WriteError(
                f"the run folder '{folder}' already holds a run.", where=last, fix="--resume, or another --out"
            )
        try:
            yield
        finally:
            # A request that was refused leaves nothing behind.
            if {path.name for path in folder.iterdir()} <= {LOCK, heartbeat.FOLDER}:
                shutil.rmtree(folder, ignore_errors=True)


def read_config(path: Path) -> dict[str, Any]:
    """The settings in a TOML file.

    Raises:
      DataError: there is no such file, or it is not TOML.
    """
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DataError(f"cannot read the configuration '{path}'.", where=str(error)) from None


def recorded(folder: Path) -> dict[str, Any]:
    """The settings that the run in a folder was last started with; none where there is no run."""
    return read_config(folder / CONFIG) if (folder / CONFIG).is_file() else {}


def check_same_run(folder: Path, config: Mapping[str, Any]) -> None:
    """Hold the settings that a run goes on with against those it has; others than its data and model may change.

    Raises:
      ConfigError: one of them would make it another run.
    """
    before = recorded(folder)
    for key in SAME_RUN:
        if key in before and before[key] != config.get(key):
            raise ConfigError(
                f"the run was begun with {key} {before[key]}, and is to go on with {config.get(key)}.",
                where=f"'{folder}'",
                fix=f"--{key} {before[key]}, or another --out",
            )


def changed_versions(folder: Path) -> list[str]:
    """What of the environment that a run was last in is another now; a run may go on, but not bit for bit."""
    try:
        before = json.loads((folder / ENV).read_text())
        then = {name: before["packages"].get(name) for name in VERSIONS} | {"python": before["python"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    now = {name: version(name) for name in VERSIONS} | {"python": sys.version.split()[0]}
    return [f"{name} {then[name]}, now {now[name]}" for name in now if then[name] not in (None, now[name])]


def write_records(folder: Path, config: Mapping[str, Any], plan_json: str, devices: list[Any]) -> None:
    """Write what the run is: its resolved configuration, its plan, and the environment it runs in."""
    lines = [f"{key} = {_toml(value)}" for key, value in config.items() if value is not None]
    environment = {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "devices": [str(device) for device in devices],
        "environment": {key: os.environ[key] for key in sorted(os.environ) if key.startswith(("JAX_", "XLA_"))},
        "packages": dict(sorted((d.metadata["Name"], d.version) for d in distributions() if d.metadata["Name"])),
    }
    _replace(folder / CONFIG, "\n".join(lines) + "\n")
    _replace(folder / PLAN, plan_json)
    _replace(folder / ENV, json.dumps(environment, indent=1) + "\n")


def open_metrics(folder: Path, last_step: int) -> IO[str]:
    """The metrics file, to append to; lines of steps after `last_step` go, because they will be taken again."""
    path = folder / METRICS
    kept = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            event = json.loads(line)
        except ValueError:
            continue  # half a line, from the moment the process was killed
        if event.get("step", 0) <= last_step and event.get("event") != "done":
            kept.append(line)
    _replace(path, "".join(line + "\n" for line in kept))
    return open(path, "a", buffering=1)


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else json.dumps(value)


def _replace(path: Path, text: str) -> None:
    try:
        temporary = path.with_name(path.name + ".new")
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError as error:
        raise WriteError(f"cannot write '{path}'.", where=str(error)) from None
