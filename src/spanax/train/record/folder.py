"""The records in a run folder: configuration, plan, environment and metrics.

config.toml  plan.json  env.json  tokenizer.json  metrics.jsonl  samples.jsonl  events.jsonl  heartbeats/
log/  checkpoints/<step>/  LOCK
"""

import json
import os
import platform
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

from spanax.documents import json_line, parse_json, parse_toml, read_opened
from spanax.entries.folder import Folder, Place
from spanax.entries.local_path import local_path
from spanax.entries.names import CHECKPOINTS, CONFIG, ENVIRONMENT, METRICS, PLAN, SAMPLES, TOKENIZER, Name
from spanax.errors import ConfigError, EntryError, FileError, FileErrors, RangeError, WriteError
from spanax.printable import to_stderr
from spanax.schema import parsed
from spanax.sealed import DamagedError, VersionError, checksum, opened, sealed
from spanax.train.record.run_lock import holds_run
from spanax.train.store import manifest
from spanax.usage import flag

SAME_RUN = (
    "workload", "data", "field", "tokenizer", "chat_template", "seed", "global_batch_size", "seq_len",
    "optimizer_state", "optimizer", "ema", "lora", "quantize",
)  # fmt: skip
"""Settings that cannot change over a run: they determine its state and the order of its data."""

OPTIONAL = ("chat_template", "optimizer", "ema", "lora", "quantize")
"""Those of them of which a record without a value means none."""

VERSIONS = ("jax", "jaxlib", "flax", "optax")
"""Packages whose versions affect the numerical results of a run."""

MAX_PENDING = 10_000
"""The number of lines buffered in memory while the disk is full; beyond it, the oldest are dropped."""


@dataclass(frozen=True)
class Environment:
    """The environment of a run: versions of Python and of all packages, devices, and JAX's environment variables.

    `device_kind` is that of the devices in JAX, and `size` their number as in the name of a cluster: `8`, `2x8`.
    `tokenizer` is the CRC-32 of tokenizer.json, whose format has no place for one; empty for a run that reads no text.
    `chat_template` is the template of its conversations, with its special tokens; empty if it has none.
    """

    python: str
    platform: str = ""
    devices: tuple[str, ...] = ()
    device_kind: str = ""
    size: str = ""
    tokenizer: str = ""
    chat_template: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)


RECORDS: Mapping[Name, tuple[str, Callable[[str], Any]]] = {
    CONFIG: ("configuration", parse_toml),
    PLAN: ("plan", parse_json),
    ENVIRONMENT: (
        "environment",
        lambda text: parsed(Environment, parse_json(text), is_open=True, is_strict=False),
    ),
}
"""The title of each record, and what parses it."""


def read_config(path: Path) -> dict[str, Any]:
    """Returns the settings in a TOML file, which may be the config.toml of a run.

    Raises:
      DataError: the file is missing or not TOML, or does not match its checksum.
    """
    local_path(path)
    return _parsed(lambda: read_opened(path), path, "configuration", parse_toml)


def recorded(folder: Path) -> dict[str, Any]:
    """Returns the settings that the run in a folder was last started with; empty if there is no run.

    Raises:
      DataError: the settings of a run are missing, truncated or changed; also its subclass EntryError.
    """
    place = Folder.of(folder)
    return _read_record(place, CONFIG) if _is_recorded(place, CONFIG) else {}


def check_records(folder: Path) -> None:
    """Checks the records of the run in a folder, if any, against their checksums.

    Raises:
      DataError: a record is missing, or does not match its checksum.
    """
    place = Folder.of(folder)
    records = [name for name in RECORDS if _is_recorded(place, name)]
    saved_tokenizer(folder)
    for name in records:
        _read_record(place, name)


def _is_recorded(place: Folder, name: Name) -> bool:
    """Returns whether a folder has a record; raises if it is missing although the folder contains a run."""
    if place.kind(name) is not None:
        return True
    if holds_run(place):
        raise FileError(f"the run folder '{place}' contains a run but no '{name}'.", fix=_restored(place, name))
    return False


def _restored(folder: Folder | Path, name: str) -> str:
    return f"restore '{name}' from a copy, or start another run from these weights: --init {folder} --output-dir ..."


def _read_record(place: Folder, name: Name) -> Any:
    """Returns the parsed content of a record."""
    title, parse = RECORDS[name]
    return _parsed(lambda: opened(place.read(name).decode("utf-8"), is_record=True), place.path / name, title, parse)


def _parsed(read: Callable[[], str], path: Path, title: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(read())
    except EntryError:
        raise
    except VersionError as error:
        raise FileError(f"cannot read the {title} '{path}'.", where=str(error), fix=error.fix) from None
    except DamagedError as error:
        fix = _restored(path.parent, path.name)
        raise FileError(f"cannot read the {title} '{path}'.", where=str(error), fix=fix) from None
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
        if (key in before or key in OPTIONAL) and before.get(key) != config.get(key):
            name = flag(key)
            had = f"with {key} {before[key]}" if key in before else f"without {name}"
            value = f"with {config.get(key)}" if key in before else f"with {name} {config.get(key)}"
            now = f"without {name}" if config.get(key) is None else value
            fix = f"{name} {before[key]}" if key in before else f"no {name}"
            raise ConfigError(
                f"the run was started {had}, and cannot be resumed {now}.",
                where=f"'{folder}'",
                fix=f"{fix}, or another --output-dir",
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
    """Returns the tokenizer.json that a run has saved; None if it reads no text.

    Raises:
      DataError: the file is missing, or does not match its checksum; also its subclass EntryError.
    """
    place = Folder.of(folder)
    if not _is_recorded(place, ENVIRONMENT) or not (crc := read_environment(place).tokenizer):
        return None
    what = f"cannot read the tokenizer '{place.path / TOKENIZER}'."
    with FileErrors(FileError, what, fix="restore it from a copy"):
        text = place.read(TOKENIZER).decode("utf-8")
    if checksum(text) != crc:
        where = "it does not match its checksum in env.json: it was truncated, damaged or edited"
        raise FileError(what, where=where, fix="restore it from a copy")
    return text


def saved_template(folder: Path) -> dict[str, str]:
    """Returns the `record` of the chat template of a run; empty if it has none.

    Raises:
      DataError: the environment is missing, or does not match its checksum; also its subclass EntryError.
    """
    place = Folder.of(folder)
    return dict(read_environment(place).chat_template) if _is_recorded(place, ENVIRONMENT) else {}


def read_environment(folder: Place) -> Environment:
    """Returns the environment that the run in a folder was last started in.

    Raises:
      DataError: the record is missing, or does not match its checksum; also its subclass EntryError.
    """
    return _read_record(Folder.of(folder), ENVIRONMENT)


def write_records(
    folder: Path,
    config: Mapping[str, Any],
    plan_json: str,
    devices: list[Any],
    size: str = "",
    tokenizer: str | None = None,
    chat_template: Mapping[str, str] | None = None,
) -> None:
    """Writes the resolved configuration, the plan, the environment and the tokenizer of a run.

    Args:
      folder: the run folder.
      config: the settings.
      plan_json: the plan.
      devices: the devices of the run.
      size: the size of their cluster.
      tokenizer: the tokenizer of its text, as a tokenizer.json.
      chat_template: the `record` of the template of its conversations.
    """
    packages = [distribution.metadata for distribution in distributions()]  # `metadata` parses a file at each access
    environment = Environment(
        python=sys.version.split()[0],
        platform=platform.platform(),
        devices=tuple(str(device) for device in devices),
        device_kind=next((getattr(device, "device_kind", "") for device in devices), ""),
        size=size,
        tokenizer="" if tokenizer is None else checksum(tokenizer),
        chat_template=chat_template or {},
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
      >>> print(config_text({"workload": "gpt2", "layout": None, "learning_rate": 1e-4}), end="")
      workload = "gpt2"
      learning_rate = 0.0001
    """
    import tomli_w  # not needed to read records

    return tomli_w.dumps({key: value for key, value in config.items() if value is not None})


def write_plan(folder: Path, plan_json: str) -> None:
    """Writes the plan of a run."""
    _replace(folder, PLAN, [sealed(plan_json)])


@dataclass(eq=False)
class AppendLog:
    """Appends lines to a text file; lines that cannot be written are buffered and written with the next line.

    Example:
      >>> import tempfile
      >>> log = AppendLog(Folder.of(tempfile.mkdtemp()), METRICS)
      >>> log.write("{}")
      >>> list(log.folder.lines(METRICS))
      [{}]
    """

    folder: Folder
    name: Name
    _pending: deque[bytes] = field(default_factory=partial(deque, maxlen=MAX_PENDING))
    _is_reported: bool = False

    def write(self, line: str) -> None:
        """Appends a line; the first of several failures is reported on standard error, and none raises."""
        self._pending.append(line.encode() + b"\n")
        try:
            self._flush()
        except OSError as error:
            if not self._is_reported:
                path = self.folder.path / self.name
                message = f"cannot write '{path}': {error.strerror}; training continues, and its lines are buffered."
                self._is_reported = True
                with suppress(OSError):  # standard error may be a file on the same disk
                    to_stderr(message)
        else:
            self._is_reported = False

    def _flush(self) -> None:
        # Opened for each write: lines written to a removed file would be lost.
        with self.folder.appending(self.name) as descriptor:
            while self._pending:
                num_written = os.write(descriptor, self._pending[0])
                remainder = self._pending[0][num_written:]
                if remainder:  # a disk that fills up writes a part of a line
                    self._pending[0] = remainder
                else:
                    self._pending.popleft()


def open_metrics(folder: Path, last_step: int) -> AppendLog:
    """Opens metrics.jsonl for appending, without the lines of steps after `last_step`, which will be repeated."""
    return _opened(folder, METRICS, last_step)


def open_samples(folder: Path, last_step: int) -> AppendLog:
    """Opens samples.jsonl, if any, in the same way."""
    place = Folder.of(folder)
    return AppendLog(place, SAMPLES) if place.kind(SAMPLES) is None else _opened(folder, SAMPLES, last_step)


def _opened(folder: Path, name: Name, last_step: int) -> AppendLog:
    def retained() -> Iterator[str]:
        for event in Folder.of(folder).lines(name):
            step = None if event is None else event.get("step", 0)
            if event is not None and isinstance(step, int) and step <= last_step and event.get("event") != "done":
                yield json_line(event) + "\n"

    _replace(folder, name, retained())
    return AppendLog(Folder.of(folder), name)


def _replace(folder: Path, name: Name, parts: Iterable[str]) -> None:
    """Replaces a file atomically, also across a power failure."""
    with FileErrors(WriteError, f"cannot write '{folder / name}'."):
        Folder.of(folder).replace(name, parts)
