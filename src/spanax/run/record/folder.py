"""The run folder: one place a run, with its configuration, plan, environment, metrics and checkpoints.

config.toml  plan.json  env.json  metrics.jsonl  events.jsonl  heartbeats/  log/  checkpoints/<step>/  LOCK
"""

import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

from spanax.documents import json_line, parse_json, parse_toml, read_toml
from spanax.entries.folder import Folder
from spanax.entries.names import CHECKPOINTS, CONFIG, ENVIRONMENT, METRICS, PLAN, Name
from spanax.errors import ConfigError, DataError, EntryError, SpanaxError, WriteError
from spanax.run.record.lines import Lines
from spanax.run.store import manifest

SAME_RUN = ("workload", "data", "field", "tokenizer", "seed", "batch", "seq", "optimizer_state")
"""Settings that a run keeps for life: they make its model and the order of its data."""

VERSIONS = ("jax", "jaxlib", "flax", "optax")
"""Packages that the numbers of a run follow from."""


def read_config(path: Path) -> dict[str, Any]:
    """The settings in a TOML file.

    Raises:
      DataError: there is no such file, or it is not TOML.
    """
    try:
        return read_toml(path)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the configuration '{path}'.", where=str(error)) from None


def recorded(folder: Path) -> dict[str, Any]:
    """The settings that the run in a folder was last started with; none where there is no run.

    Raises:
      DataError: they are damaged; also its kind EntryError.
    """
    place = Folder.of(folder)
    try:
        return parse_toml(place.read(CONFIG))
    except FileNotFoundError:
        return {}
    except EntryError:
        raise
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the configuration '{place.path / CONFIG}'.", where=str(error)) from None


def check_same_run(folder: Path, config: Mapping[str, Any]) -> None:
    """Hold the settings that a run goes on with against those it has; others than its data and model may change.

    Raises:
      ConfigError: one of them would make it another run.
      SpanaxError: the run has taken more steps than they ask for.
    """
    check_steps(folder, config["steps"])
    before = recorded(folder)
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
    try:
        before = parse_json(Folder.of(folder).read(ENVIRONMENT))
        then = {name: before["packages"].get(name) for name in VERSIONS} | {"python": before["python"]}
    except EntryError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    now = {name: version(name) for name in VERSIONS} | {"python": sys.version.split()[0]}
    return [f"{name} {then[name]}, now {now[name]}" for name in now if then[name] not in (None, now[name])]


def write_records(folder: Path, config: Mapping[str, Any], plan_json: str, devices: list[Any]) -> None:
    """Write what the run is: its resolved configuration, its plan, and the environment it runs in."""
    lines = [f"{key} = {_toml(value)}" for key, value in config.items() if value is not None]
    described = [found.metadata for found in distributions()]  # each asks for its file to be parsed
    environment = {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "devices": [str(device) for device in devices],
        "environment": {key: os.environ[key] for key in sorted(os.environ) if key.startswith(("JAX_", "XLA_"))},
        "packages": dict(sorted((said["Name"], said["Version"]) for said in described if said["Name"])),
    }
    _replace(folder, CONFIG, ["\n".join(lines) + "\n"])
    write_plan(folder, plan_json)
    _replace(folder, ENVIRONMENT, [json.dumps(environment, indent=1) + "\n"])


def write_plan(folder: Path, plan_json: str) -> None:
    """Write the plan of the run."""
    _replace(folder, PLAN, [plan_json])


def open_metrics(folder: Path, last_step: int) -> Lines:
    """The metrics file, to append to; lines of steps after `last_step` go, because they will be taken again."""

    def kept() -> Iterator[str]:
        for event in Folder.of(folder).lines(METRICS):
            step = event.get("step", 0)
            if isinstance(step, int) and step <= last_step and event.get("event") != "done":
                yield json_line(event) + "\n"

    _replace(folder, METRICS, kept())
    return Lines(Folder.of(folder), METRICS)


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else json.dumps(value)


def _replace(folder: Path, name: Name, parts: Iterable[str]) -> None:
    try:
        Folder.of(folder).replace(name, parts)
    except OSError as error:
        raise WriteError(f"cannot write '{folder / name}'.", where=str(error)) from None
