"""The records in a run folder: configuration, plan, environment and metrics.

config.toml  plan.json  env.json  tokenizer.json  metrics.jsonl  events.jsonl  heartbeats/  log/
checkpoints/<step>/  LOCK
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
from spanax.entries.folder import Folder, Place
from spanax.entries.local_path import local_path
from spanax.entries.names import CHECKPOINTS, CONFIG, ENVIRONMENT, METRICS, PLAN, TOKENIZER, Name
from spanax.errors import ConfigError, EntryError, FileError, RangeError, WriteError
from spanax.schema import parsed
from spanax.sealed import DamagedError, Opened, checksum, opened, sealed
from spanax.train.record.append_log import AppendLog
from spanax.train.record.run_lock import holds_run
from spanax.train.store import manifest
from spanax.usage.renamed_flags import current_settings

SAME_RUN = ("workload", "data", "field", "tokenizer", "seed", "global_batch_size", "seq_len", "optimizer_state")
"""Settings that cannot change over a run: they determine its model and the order of its data."""

UNSEALED = (
    "workload", "steps_per_call", "seed", "optimizer_state", "init_partial", "save_every", "keep_last", "eval_every",
    "eval_batches", "log_every", "on_bad_step", "max_bad_steps",
)  # fmt: skip
"""Settings in every config.toml written before records had checksums; a file without one of them was truncated."""

EDITED = "restore it from a copy; if you edited it yourself, remove its lines `format` and `crc32`"

VERSIONS = ("jax", "jaxlib", "flax", "optax")
"""Packages whose versions affect the numerical results of a run."""


@dataclass(frozen=True)
class Environment:
    """The environment of a run: versions of Python and of all packages, devices, and JAX's environment variables.

    `device_kind` is that of the devices in JAX, and `size` their number as in the name of a cluster: `8`, `2x8`.
    `tokenizer` is the CRC-32 of tokenizer.json, whose format has no place for one. All three are empty in records of
    older versions.
    """

    python: str
    platform: str = ""
    devices: tuple[str, ...] = ()
    device_kind: str = ""
    size: str = ""
    tokenizer: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)


def read_config(path: Path) -> dict[str, Any]:
    """Returns the settings in a TOML file, which may be the config.toml of a run.

    Raises:
      DataError: the file is missing or not TOML, or does not match its checksum.
    """
    local_path(path)
    return current_settings(_parsed(lambda: read_opened(path), path, "configuration", parse_toml)[0], str(path))


def read_settings(folder: Path) -> dict[str, Any]:
    """Returns the settings in the config.toml of a run, complete or not.

    Raises:
      DataError: the file is missing, or does not match its checksum; also its subclass EntryError.
    """
    return _read_record(Folder.of(folder), CONFIG, "configuration", _parse_settings)[0]


def recorded(folder: Path) -> dict[str, Any]:
    """Returns the settings that the run in a folder was last started with; empty if there is no run.

    Raises:
      DataError: the settings of a run are missing, truncated or changed; also its subclass EntryError.
    """
    place = Folder.of(folder)
    if not _is_recorded(place, CONFIG):
        return {}
    settings, record = _read_record(place, CONFIG, "configuration", _parse_settings)
    missing = [] if record.is_sealed else [f"'{name}'" for name in UNSEALED if name not in settings]
    if missing or not record.text.endswith("\n"):
        where = f"it has no checksum and no {(missing or ['final newline'])[0]}: it was truncated, or is not of a run"
        raise FileError(f"cannot read the configuration '{place.path / CONFIG}'.", where=where, fix=EDITED)
    return settings


def check_records(folder: Path) -> list[str]:
    """Checks the records of the run in a folder, if any, against their checksums.

    Returns:
      The records without a checksum, written by an old version.

    Raises:
      DataError: a record is missing, or does not match its checksum.
    """
    place = Folder.of(folder)
    parts = (
        (CONFIG, "configuration", _parse_settings),
        (PLAN, "plan", parse_json),
        (ENVIRONMENT, "environment", parse_json),
    )
    records = [part for part in parts if _is_recorded(place, part[0])]
    saved_tokenizer(folder)
    return [str(name) for name, title, parse in records if not _read_record(place, name, title, parse)[1].is_sealed]


def _parse_settings(text: str) -> dict[str, Any]:
    """Returns the settings of a run, which an earlier version may have written under former names."""
    return current_settings(parse_toml(text))


def _is_recorded(place: Folder, name: Name) -> bool:
    """Returns whether a folder has a record; raises if it is missing although the folder contains a run."""
    if place.kind(name) is not None:
        return True
    if holds_run(place):
        fix = f"restore '{name}' from a copy, or start another run from these weights: --init {place} --output-dir ..."
        raise FileError(f"the run folder '{place}' contains a run but no '{name}'.", fix=fix)
    return False


def _read_record(place: Folder, name: Name, title: str, parse: Callable[[str], Any]) -> tuple[Any, Opened]:
    """Returns the parsed content of a record, and its text."""
    return _parsed(lambda: opened(place.read(name).decode("utf-8")), place.path / name, title, parse)


def _parsed(read: Callable[[], Opened], path: Path, title: str, parse: Callable[[str], Any]) -> tuple[Any, Opened]:
    try:
        record = read()
        return parse(record.text), record
    except EntryError:
        raise
    except DamagedError as error:
        raise FileError(f"cannot read the {title} '{path}'.", where=str(error), fix=EDITED) from None
    except (OSError, ValueError) as error:
        raise FileError(f"cannot read the {title} '{path}'.", where=str(error)) from None


def check_same_run(folder: Path, config: Mapping[str, Any]) -> None:
    """Checks that a resumed run keeps the settings in SAME_RUN; all others may change.

    Raises:
      ConfigError: one of them differs from the record.
      SpanaxError: the run has taken more steps than the settings request.
    """
    before = recorded(folder)
    check_records(folder)
    check_steps(folder, config["steps"])
    for key in SAME_RUN:
        if key in before and before[key] != config.get(key):
            raise ConfigError(
                f"the run was started with {key} {before[key]}, and cannot be resumed with {config.get(key)}.",
                where=f"'{folder}'",
                fix=f"--{key.replace('_', '-')} {before[key]}, or another --output-dir",
            )


def check_steps(folder: Path, steps: int) -> None:
    """Raises if a run that is resumed was already trained for more than `steps` steps.

    Raises:
      SpanaxError: its newest checkpoint is of a later step.
    """
    reached = max(manifest.steps(Folder.of(folder).inner(CHECKPOINTS)), default=0)
    if steps < reached:
        raise RangeError(
            f"cannot train to step {steps}: the run has reached step {reached}.",
            where=f"'{folder}'",
            fix=f"--steps counts all steps of the run: pass more than {reached}",
        )


def changed_versions(folder: Path) -> list[str]:
    """Returns the versions that differ from those that the run was last started with, and may change its results."""
    place = Folder.of(folder)
    if not _is_recorded(place, ENVIRONMENT):
        return []
    before = read_environment(place)
    then = {name: before.packages.get(name) for name in VERSIONS} | {"python": before.python}
    now = {name: version(name) for name in VERSIONS} | {"python": sys.version.split()[0]}
    return [f"{name} {then[name]}, now {now[name]}" for name in now if then[name] not in (None, now[name])]


def saved_tokenizer(folder: Path) -> str | None:
    """Returns the tokenizer.json that a run has saved; None if it reads no text, or is of an older version.

    Raises:
      DataError: the file is missing, or does not match its checksum; also its subclass EntryError.
    """
    place = Folder.of(folder)
    if not _is_recorded(place, ENVIRONMENT) or not (crc := read_environment(place).tokenizer):
        return None
    what = f"cannot read the tokenizer '{place.path / TOKENIZER}'."
    try:
        text = place.read(TOKENIZER).decode("utf-8")
    except EntryError:
        raise
    except (OSError, ValueError) as error:
        raise FileError(what, where=str(error), fix="restore it from a copy") from None
    if checksum(text) != crc:
        where = "it does not match its checksum in env.json: it was truncated, damaged or edited"
        raise FileError(what, where=where, fix="restore it from a copy")
    return text


def read_environment(folder: Place) -> Environment:
    """Returns the environment that the run in a folder was last started in.

    Raises:
      DataError: the record is missing, or does not match its checksum; also its subclass EntryError.
    """
    return _read_record(Folder.of(folder), ENVIRONMENT, "environment", _parsed_environment)[0]


def _parsed_environment(text: str) -> Environment:
    return parsed(Environment, parse_json(text), is_open=True, is_strict=False)


def write_records(
    folder: Path,
    config: Mapping[str, Any],
    plan_json: str,
    devices: list[Any],
    size: str = "",
    tokenizer: str | None = None,
) -> None:
    """Writes the resolved configuration, the plan, the environment and the tokenizer of a run.

    Args:
      folder: the run folder.
      config: the settings.
      plan_json: the plan.
      devices: the devices of the run.
      size: the size of their cluster.
      tokenizer: the tokenizer of its text, as a tokenizer.json.
    """
    packages = [distribution.metadata for distribution in distributions()]  # `metadata` parses a file at each access
    environment = Environment(
        python=sys.version.split()[0],
        platform=platform.platform(),
        devices=tuple(str(device) for device in devices),
        device_kind=next((getattr(device, "device_kind", "") for device in devices), ""),
        size=size,
        tokenizer="" if tokenizer is None else checksum(tokenizer),
        environment={key: os.environ[key] for key in sorted(os.environ) if key.startswith(("JAX_", "XLA_"))},
        packages=dict(sorted((package["Name"], package["Version"]) for package in packages if package["Name"])),
    )
    if tokenizer is not None:
        _replace(folder, TOKENIZER, [tokenizer])
    _replace(folder, CONFIG, [sealed(config_text(config))])
    write_plan(folder, plan_json)
    _replace(folder, ENVIRONMENT, [sealed(json.dumps(asdict(environment), indent=1) + "\n")])


def config_text(config: Mapping[str, Any]) -> str:
    """Returns settings as TOML, without those that are None.

    Example:
      >>> print(config_text({"workload": "gpt2", "layout": None, "lr": 1e-4}), end="")
      workload = "gpt2"
      lr = 0.0001
    """
    import tomli_w  # not needed to read records

    return tomli_w.dumps({key: value for key, value in config.items() if value is not None})


def write_plan(folder: Path, plan_json: str) -> None:
    """Writes the plan of a run."""
    _replace(folder, PLAN, [sealed(plan_json)])


def open_metrics(folder: Path, last_step: int) -> AppendLog:
    """Opens metrics.jsonl for appending, without the lines of steps after `last_step`, which will be repeated."""

    def retained() -> Iterator[str]:
        for event in Folder.of(folder).lines(METRICS):
            step = None if event is None else event.get("step", 0)
            if event is not None and isinstance(step, int) and step <= last_step and event.get("event") != "done":
                yield json_line(event) + "\n"

    _replace(folder, METRICS, retained())
    return AppendLog(Folder.of(folder), METRICS)


def _replace(folder: Path, name: Name, parts: Iterable[str]) -> None:
    """Replaces a file atomically, also across a power failure."""
    try:
        Folder.of(folder).replace(name, parts)
    except OSError as error:
        raise WriteError(f"cannot write '{folder / name}'.", where=str(error)) from None
