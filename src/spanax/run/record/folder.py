"""The run folder: one place a run, with its configuration, plan, environment, metrics and checkpoints.

config.toml  plan.json  env.json  metrics.jsonl  events.jsonl  heartbeats/  log/  checkpoints/<step>/  LOCK
"""

import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

from spanax.documents import json_line, parse_json, parse_toml, read_opened
from spanax.entries.folder import Folder
from spanax.entries.names import CHECKPOINTS, CONFIG, ENVIRONMENT, METRICS, PLAN, Name
from spanax.errors import ConfigError, DataError, EntryError, SpanaxError, WriteError
from spanax.run.record.append_log import AppendLog
from spanax.run.record.run_lock import holds_run
from spanax.run.store import manifest
from spanax.schema import parsed
from spanax.sealed import DamagedError, Opened, opened, sealed

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


def read_config(path: Path) -> dict[str, Any]:
    """The settings in a TOML file, which may be the record of a run.

    Raises:
      DataError: there is no such file, it is not TOML, or it is a record that was cut or changed.
    """
    return _parsed(lambda: read_opened(path), path, "configuration", parse_toml)[0]


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings in the record of a run, complete or not.

    Raises:
      DataError: there is no record, or it was cut or changed; also its kind EntryError.
    """
    return _read_record(Folder.of(folder), CONFIG, "configuration", parse_toml)[0]


def recorded(folder: Path) -> dict[str, Any]:
    """The settings that the run in a folder was last started with; none where there is no run.

    Raises:
      DataError: the folder holds a run without its settings, or they were cut or changed; also its kind EntryError.
    """
    place = Folder.of(folder)
    if not _is_recorded(place, CONFIG):
        return {}
    settings, record = _read_record(place, CONFIG, "configuration", parse_toml)
    missing = [] if record.is_sealed else [f"'{name}'" for name in UNSEALED if name not in settings]
    if missing or not record.text.endswith("\n"):
        where = f"it has no checksum and no {(missing or ['end of a line'])[0]}: it was cut, or no run wrote it"
        raise DataError(f"cannot read the configuration '{place.path / CONFIG}'.", where=where, fix=EDITED)
    return settings


def check_records(folder: Path) -> list[str]:
    """Checks that the plan and the environment of a run were not cut or changed, if there is a run in the folder.

    Returns:
      The records that have no checksum, because they were written before there were any.

    Raises:
      DataError: one of them was, or is missing.
    """
    place = Folder.of(folder)
    parts = (
        (CONFIG, "configuration", parse_toml),
        (PLAN, "plan", parse_json),
        (ENVIRONMENT, "environment", parse_json),
    )
    here = [part for part in parts if _is_recorded(place, part[0])]
    return [str(name) for name, what, parse in here if not _read_record(place, name, what, parse)[1].is_sealed]


def _is_recorded(place: Folder, name: Name) -> bool:
    """Whether a folder has a record; raises where it holds a run that cannot go on without."""
    if place.kind(name) is not None:
        return True
    if holds_run(place):
        fix = f"bring '{name}' back from a copy, or begin another run from these weights: --init {place} --out ..."
        raise DataError(f"the run folder '{place}' has no '{name}', and holds a run.", fix=fix)
    return False


def _read_record(place: Folder, name: Name, what: str, parse: Callable[[str], Any]) -> tuple[Any, Opened]:
    """What a record of a run folder says, and its text."""
    return _parsed(lambda: opened(place.read(name).decode("utf-8")), place.path / name, what, parse)


def _parsed(read: Callable[[], Opened], path: Path, what: str, parse: Callable[[str], Any]) -> tuple[Any, Opened]:
    try:
        record = read()
        return parse(record.text), record
    except EntryError:
        raise
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
    reached = max(manifest.steps(Folder.of(folder).inner(CHECKPOINTS)), default=0)
    if steps < reached:
        raise SpanaxError(
            f"cannot train to step {steps}: the run has reached step {reached} already.",
            where=f"'{folder}'",
            fix=f"--steps counts all steps of the run: pass more than {reached}",
        )


def changed_versions(folder: Path) -> list[str]:
    """What of the environment that a run was last in is another now; a run may go on, but not bit for bit."""
    place = Folder.of(folder)
    if not _is_recorded(place, ENVIRONMENT):
        return []
    try:
        record, _ = _read_record(place, ENVIRONMENT, "environment", parse_json)
        before = parsed(Environment, record, is_open=True, is_strict=False)
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"cannot read the environment '{folder / ENVIRONMENT}'.", where=str(error)) from None
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
    _replace(folder, CONFIG, [sealed(config_text(config))])
    write_plan(folder, plan_json)
    _replace(folder, ENVIRONMENT, [sealed(json.dumps(asdict(environment), indent=1) + "\n")])


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
    _replace(folder, PLAN, [sealed(plan_json)])


def open_metrics(folder: Path, last_step: int) -> AppendLog:
    """The metrics file, to append to; lines of steps after `last_step` go, because they will be taken again."""

    def kept() -> Iterator[str]:
        for event in Folder.of(folder).lines(METRICS):
            step = None if event is None else event.get("step", 0)
            if event is not None and isinstance(step, int) and step <= last_step and event.get("event") != "done":
                yield json_line(event) + "\n"

    _replace(folder, METRICS, kept())
    return AppendLog(Folder.of(folder), METRICS)


def _replace(folder: Path, name: Name, parts: Iterable[str]) -> None:
    """Replace a file: after a power cut it has its old or its new content."""
    try:
        Folder.of(folder).replace(name, parts)
    except OSError as error:
        raise WriteError(f"cannot write '{folder / name}'.", where=str(error)) from None
