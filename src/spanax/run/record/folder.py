"""The run folder: one place a run, with its configuration, plan, environment, metrics and checkpoints.

config.toml  plan.json  env.json  metrics.jsonl  events.jsonl  heartbeats/  log/  checkpoints/<step>/  LOCK
"""

import fcntl
import json
import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import distributions, version
from pathlib import Path
from typing import IO, Any

from spanax.documents import json_line, json_lines, parse_json, parse_toml, read_bytes, read_opened
from spanax.errors import ConfigError, DataError, SpanaxError, WriteError
from spanax.run.record import events, heartbeat
from spanax.run.record.lines import Lines
from spanax.run.record.trackers import TENSORBOARD, WANDB
from spanax.run.store import manifest
from spanax.schema import parsed
from spanax.sealed import DamagedError, Opened, sealed

CONFIG, PLAN, ENV, METRICS, CHECKPOINTS, LOGS, LOCK = (
    "config.toml", "plan.json", "env.json", "metrics.jsonl", "checkpoints", "log", "LOCK",
)  # fmt: skip


SAME_RUN = ("workload", "data", "field", "tokenizer", "seed", "batch", "seq", "optimizer_state")
"""Settings that a run keeps for life: they make its model and the order of its data."""

UNSEALED = (
    "workload", "steps_per_call", "seed", "optimizer_state", "init_partial", "save_every", "keep", "eval_every",
    "eval_batches", "log_every", "on_bad_step", "patience",
)  # fmt: skip
"""Settings in every config.toml that was written before records were sealed; one without them was cut."""

EDITED = "a copy of it from elsewhere; where you edited it yourself, remove its lines `format` and `crc32`"

VERSIONS = ("jax", "jaxlib", "flax", "optax")
"""Packages that the numbers of a run follow from."""


@dataclass(frozen=True)
class Environment:
    """What a run was last in: versions of Python and of every package, devices, and JAX's variables."""

    python: str
    platform: str = ""
    devices: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class Claim:
    """A run folder that is held: the lock is the kernel's, so it goes with the process, however that ends."""

    folder: Path
    lock: IO[str]

    def renew(self) -> bool:
        """Hold the folder again where somebody removed it; whether that was so.

        Raises:
          WriteError: another run has it now, or it cannot be made again.
        """
        try:
            if os.path.samestat(os.stat(self.folder / LOCK), os.fstat(self.lock.fileno())):
                return False
        except FileNotFoundError:
            pass
        lock = _locked(self.folder)
        try:
            _check_empty(self.folder)
        except WriteError:
            lock.close()
            raise
        self.lock.close()
        self.lock = lock
        return True


@contextmanager
def claimed(folder: Path, *, resume: bool) -> Iterator[Claim]:
    """Hold a run folder while the run lasts.

    Raises:
      DataError: something in it lies elsewhere.
      WriteError: another run holds it, it already has a run in it, or it cannot be written.
    """
    claim = Claim(folder, _locked(folder))
    try:
        if not resume:
            _check_empty(folder)
        yield claim
    finally:
        claim.lock.close()
        with suppress(OSError):
            # A request that was refused leaves nothing behind.
            if {path.name for path in folder.iterdir()} <= {LOCK, heartbeat.FOLDER}:
                shutil.rmtree(folder, ignore_errors=True)


def _locked(folder: Path) -> IO[str]:
    """The lock of a run folder, held by this process."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_inside(folder)
        lock = open(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666), "a+")
    except OSError as error:
        raise WriteError(f"cannot write to the run folder '{folder}'.", where=str(error)) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.truncate(lock.fileno(), 0)
        os.write(lock.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    except BlockingIOError:
        lock.close()
        raise WriteError(
            f"the run folder '{folder}' is in use.",
            where=_holder(folder),
            fix="another --out, or end that run first",
        ) from None
    except OSError as error:
        lock.close()
        raise WriteError(f"cannot lock the run folder '{folder}'.", where=str(error)) from None
    return lock


def _holder(folder: Path) -> str:
    """Who wrote itself into the lock of a folder, and whether that process is still there."""
    with suppress(OSError, ValueError):
        told = read_bytes(folder / LOCK, max_bytes=1024).decode().strip()
        match = re.fullmatch(r"process (\d+) on (.+)", told)
        is_here = match is not None and match[2] == socket.gethostname()
        if match is not None and is_here and not Path("/proc", match[1]).exists() and Path("/proc/self").exists():
            return f"{told}, which has ended: a process that it started holds it"
        return told or "held by another process"
    return "held by another process"


def _check_inside(folder: Path) -> None:
    """A run writes into these; in a folder from elsewhere they may be links to what is not its own."""
    kept = (CONFIG, PLAN, ENV, METRICS, LOCK, events.FILE)
    for name in (*kept, CHECKPOINTS, heartbeat.FOLDER, LOGS, "profile", TENSORBOARD, WANDB):
        path = folder / name
        if os.path.lexists(path) and (path.is_symlink() or not (path.is_file() if name in kept else path.is_dir())):
            kind = "link" if path.is_symlink() else "thing"
            raise DataError(
                f"the run folder '{folder}' holds a {kind} named '{name}' that is not its own.",
                where=f"it leads to {os.path.realpath(path)}" if path.is_symlink() else "",
                fix="move the whole run folder to where it is to be, and name that with --out",
            )


def _check_empty(folder: Path) -> None:
    saved = manifest.steps(folder / CHECKPOINTS)
    if _holds_run(folder):
        last = f"its newest checkpoint is step {saved[-1]}" if saved else "it has no checkpoint"
        raise WriteError(
            f"the run folder '{folder}' already holds a run.", where=last, fix="--resume, or another --out"
        )


def _holds_run(folder: Path) -> bool:
    return bool(manifest.steps(folder / CHECKPOINTS)) or os.path.lexists(folder / METRICS)


def read_config(path: Path) -> dict[str, Any]:
    """The settings in a TOML file, which may be the record of a run.

    Raises:
      DataError: there is no such file, it is not TOML, or it is a record that was cut or changed.
    """
    return _read(path, "configuration", parse_toml)[0]


def recorded(folder: Path) -> dict[str, Any]:
    """The settings that the run in a folder was last started with; none where there is no run.

    Raises:
      DataError: the folder holds a run without its settings, or they were cut or changed.
    """
    if not _is_recorded(folder, CONFIG):
        return {}
    settings, record = _read(folder / CONFIG, "configuration", parse_toml)
    missing = [] if record.is_sealed else [f"'{name}'" for name in UNSEALED if name not in settings]
    if missing or not record.text.endswith("\n"):
        where = f"it has no checksum and no {(missing or ['end of a line'])[0]}: it was cut, or no run wrote it"
        raise DataError(f"cannot read the configuration '{folder / CONFIG}'.", where=where, fix=EDITED)
    return settings


def check_records(folder: Path) -> list[str]:
    """Checks that the plan and the environment of a run were not cut or changed, if there is a run in the folder.

    Returns:
      The records that have no checksum, because they were written before there were any.

    Raises:
      DataError: one of them was, or is missing.
    """
    parts = ((CONFIG, "configuration", parse_toml), (PLAN, "plan", parse_json), (ENV, "environment", parse_json))
    here = [part for part in parts if _is_recorded(folder, part[0])]
    return [name for name, what, parse in here if not _read(folder / name, what, parse)[1].is_sealed]


def _is_recorded(folder: Path, name: str) -> bool:
    """Whether a folder has a record; raises where it holds a run that cannot go on without."""
    if os.path.lexists(folder / name):
        return True
    if _holds_run(folder):
        fix = f"bring '{name}' back from a copy, or begin another run from these weights: --init {folder} --out ..."
        raise DataError(f"the run folder '{folder}' has no '{name}', and holds a run.", fix=fix)
    return False


def _read(path: Path, what: str, parse: Callable[[str], Any]) -> tuple[Any, Opened]:
    """What a record says, and its text."""
    try:
        record = read_opened(path)
        return parse(record.text), record
    except DamagedError as error:
        raise DataError(f"cannot read the {what} '{path}'.", where=str(error), fix=EDITED) from None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the {what} '{path}'.", where=str(error)) from None


def check_same_run(folder: Path, config: Mapping[str, Any]) -> None:
    """Hold the settings that a run goes on with against those it has; others than its data and model may change.

    Raises:
      ConfigError: one of them would make it another run.
      SpanaxError: the run has taken more steps than they ask for.
    """
    before = recorded(folder)
    check_records(folder)
    check_steps(folder, config["steps"])
    for key in SAME_RUN:
        if key in before and before[key] != config.get(key):
            raise ConfigError(
                f"the run was begun with {key} {before[key]}, and is to go on with {config.get(key)}.",
                where=f"'{folder}'",
                fix=f"--{key.replace('_', '-')} {before[key]}, or another --out",
            )


def check_steps(folder: Path, steps: int) -> None:
    """Raises if a run that is resumed was already trained for more than `steps` steps.

    Raises:
      SpanaxError: its newest checkpoint is of a later step.
    """
    reached = max(manifest.steps(folder / CHECKPOINTS), default=0)
    if steps < reached:
        raise SpanaxError(
            f"cannot train to step {steps}: the run has reached step {reached} already.",
            where=f"'{folder}'",
            fix=f"--steps counts all steps of the run: pass more than {reached}",
        )


def changed_versions(folder: Path) -> list[str]:
    """What of the environment that a run was last in is another now; a run may go on, but not bit for bit."""
    if not _is_recorded(folder, ENV):
        return []
    try:
        before = parsed(Environment, _read(folder / ENV, "environment", parse_json)[0], is_open=True, is_strict=False)
    except ValueError as error:
        raise DataError(f"cannot read the environment '{folder / ENV}'.", where=str(error)) from None
    then = {name: before.packages.get(name) for name in VERSIONS} | {"python": before.python}
    now = {name: version(name) for name in VERSIONS} | {"python": sys.version.split()[0]}
    return [f"{name} {then[name]}, now {now[name]}" for name in now if then[name] not in (None, now[name])]


def write_records(folder: Path, config: Mapping[str, Any], plan_json: str, devices: list[Any]) -> None:
    """Write what the run is: its resolved configuration, its plan, and the environment it runs in."""
    described = [found.metadata for found in distributions()]  # each asks for its file to be parsed
    environment = Environment(
        python=sys.version.split()[0],
        platform=platform.platform(),
        devices=tuple(str(device) for device in devices),
        environment={key: os.environ[key] for key in sorted(os.environ) if key.startswith(("JAX_", "XLA_"))},
        packages=dict(sorted((said["Name"], said["Version"]) for said in described if said["Name"])),
    )
    _replace(folder / CONFIG, [sealed(config_text(config))])
    write_plan(folder, plan_json)
    _replace(folder / ENV, [sealed(json.dumps(asdict(environment), indent=1) + "\n")])


def config_text(config: Mapping[str, Any]) -> str:
    """Settings as TOML; those that are None are left out.

    Example:
      >>> print(config_text({"workload": "gpt2", "layout": None, "lr": 1e-4}), end="")
      workload = "gpt2"
      lr = 0.0001
    """
    import tomli_w  # only what writes a record needs it

    return tomli_w.dumps({key: value for key, value in config.items() if value is not None})


def write_plan(folder: Path, plan_json: str) -> None:
    """Write the plan of the run."""
    _replace(folder / PLAN, [sealed(plan_json)])


def open_metrics(folder: Path, last_step: int) -> Lines:
    """The metrics file, to append to; lines of steps after `last_step` go, because they will be taken again."""
    path = folder / METRICS

    def kept() -> Iterator[str]:
        for event in json_lines(path) if path.exists() else ():
            step = None if event is None else event.get("step", 0)
            if event is not None and isinstance(step, int) and step <= last_step and event.get("event") != "done":
                yield json_line(event) + "\n"

    _replace(path, kept())
    return Lines(path)


def _replace(path: Path, parts: Iterable[str]) -> None:
    """Replace a file: after a power cut it has its old or its new content."""
    temporary = path.with_name(path.name + ".new")
    try:
        temporary.unlink(missing_ok=True)
        with open(temporary, "x", encoding="utf-8", newline="") as file:  # "x" follows no link
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        manifest.flush_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise WriteError(f"cannot write '{path}'.", where=str(error)) from None
