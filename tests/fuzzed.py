"""Run folders in which values were changed at random, and everything that reads one."""

import contextlib
import io
import json
import random
import re
import shutil
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import tomli_w

from spanax import cli
from spanax.entries.names import CHECKPOINTS, CONFIG, ENVIRONMENT, PLAN
from spanax.errors import DataError, SpanaxError
from spanax.launch import exit_codes as ending
from spanax.launch.supervisor import Limits, Supervisor
from spanax.plan.plan import Plan
from spanax.sealed import opened, sealed
from spanax.step.guard import History
from spanax.train.config import TrainConfig, check, with_settings
from spanax.train.data.batches import Batches
from spanax.train.record import folder, heartbeat, time_account
from spanax.train.record.events import Events
from spanax.train.record.run_lock import claimed
from spanax.train.state.restore import _meta
from spanax.train.store import manifest

RECORDED = Path(__file__).parent / "data" / "run"
BEGAN = 1_700_000_000.0

NESTED: Any = 0
for _ in range(80):
    NESTED = [NESTED]

ODD = (
    None, True, False, -1, 0, 1, 7.5, 1e308, 9e14, -5e-324, float("nan"), float("inf"), 1 << 40, 1 << 61, 1 << 64,
    -(10**30), 10**400, "", "7", "x" * 5000, "\x1b[2J\x07\u202e\nfix: rm", "[bold]", "nan", "../..", "\ud800",
    "/dev/zero", [], {}, [[]], {"a": 1}, [1, 2], ["a"] * 500, NESTED, {"": None},
)  # fmt: skip
"""Values of every type that JSON and TOML have, and some that no record has."""

STEERING = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def template() -> dict[str, bytes]:
    """The files of a run that died once and went on, by path."""
    with tempfile.TemporaryDirectory() as place:
        target = Path(place) / "run"
        shutil.copytree(RECORDED, target)
        config = with_settings(TrainConfig(), folder.read_config(target / CONFIG), "")
        folder.write_records(target, config.record(), (target / PLAN).read_text(), ["cpu:0"])
        for position, (event, values) in enumerate({
            "died": {"rank": 1, "what": "it was killed.", "words": "hm\nouch", "code": -9},
            "restart": {"what": "it was killed.", "step": 2, "wait_seconds": 1.0},
            "begin": {"step": 2, "devices": 1, "hosts": 1, "mesh": {"data": 1}, "layout": "data", "pid": 7},
            "stuck": {"ranks": [0], "stopped": [], "rank": 0, "seconds": 3.0, "phase": "step", "step": 3},
            "bad_step": {"step": 3, "batch": 2, "reason": "loss is nan"},
            "save_failed": {"step": 3, "reason": "full", "removed": None},
            "stopped": {"why": "it would end the same way again", "what": "it died", "code": 70, "step": 3},
            "ledger": {"step": 4, "seconds": {"restart": 2.0, "step": 3.0}, "wall_seconds": 5.0},
        }.items()):  # fmt: skip
            Events(target, attempt=1).append(event, time=2e9 + position, **values)
        seconds = {"compute": 0.1, "communication": 0.1, "idle": 0.0, "host": 0.0, "input wait": 0.0}
        profile = {"steps": 6, "devices": 8, "step_seconds": 0.2, "seconds": seconds, "communication": {"fsdp": 0.1}}
        (target / "profile").mkdir()
        (target / "profile" / "summary.json").write_text(json.dumps(profile | {"operations": {"fusion.1": 0.1}}))
        (target / "log").mkdir()
        (target / "log" / "rank0.log").write_text("== attempt 0\nsomething\nspanax: the reason\n")
        return {path.relative_to(target).as_posix(): path.read_bytes() for path in target.rglob("*") if path.is_file()}


def changed(data: Any, rng: random.Random) -> Any:
    """The same values but for one, which is another, is gone, or has another name."""
    data = json.loads(json.dumps(data)) if not isinstance(data, dict) else {**data}
    here, key = data, None
    while isinstance(here, dict | list) and here:
        parent, key = here, rng.choice(list(here) if isinstance(here, dict) else range(len(here)))
        here = parent[key]
        if isinstance(here, dict):
            here = parent[key] = {**here}
        if rng.random() < 0.2:
            break
    if key is None:
        return rng.choice(ODD)
    if rng.random() < 0.1:
        del parent[key]
    elif isinstance(parent, dict) and rng.random() < 0.1:
        parent[rng.choice(["", "\x1b[31m", "[b]", "a" * 200, *map(str, range(3))])] = parent.pop(key)
    else:
        parent[key] = rng.choice(ODD)
    return data


def rewritten(name: str, content: bytes, rng: random.Random) -> bytes:
    """A file in which a value, or a few bytes, are changed; a checksum mostly fits what is written."""
    if rng.random() < 0.2:
        end = rng.randrange(len(content) + 1)
        cut = [content[:end], content[end:], content[:end] + rng.randbytes(3) + content[end + 3 :], b"", content * 2]
        return rng.choice(cut)
    if name.endswith(".jsonl"):
        lines = content.decode().splitlines()
        for position in rng.sample(range(len(lines)), rng.randrange(1, 4)):
            line = json.dumps(changed(json.loads(lines[position]), rng))
            lines[position] = line if rng.random() < 0.9 else line[: rng.randrange(len(line))]
        if rng.random() < 0.1:
            rng.shuffle(lines)
        return ("\n".join(lines) + rng.choice(["\n", ""])).encode()
    if name.endswith(".toml"):
        values = changed(tomllib.loads(opened(content.decode())), rng)
        try:
            text = tomli_w.dumps({key: value for key, value in values.items() if value is not None})
            return (sealed(text) if rng.random() < 0.8 else text).encode()
        except (TypeError, ValueError, AttributeError):
            return content
    if name.endswith(".json"):
        is_sealed = name in (PLAN, ENVIRONMENT)
        data = json.loads(opened(content.decode()) if is_sealed else content)
        text = json.dumps(changed(data, rng), indent=1) + "\n"
        return (sealed(text) if is_sealed and text.startswith("{\n") else text).encode()
    return rng.randbytes(rng.randrange(200))


def spoil(place: Path, files: dict[str, bytes], rng: random.Random) -> None:
    """Write a run folder with some of its files changed or gone."""
    names = [name for name in files if "/arrays/" not in name]
    for name in rng.sample(names, rng.randrange(1, 4)):
        files = {**files, name: rewritten(name, files[name], rng)}
        if rng.random() < 0.05:
            del files[name]
    for name, content in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    step = place / "checkpoints" / "2"
    if rng.random() < 0.7 and (step / manifest.MANIFEST).exists() and rng.random() < 0.9:
        with contextlib.suppress(SpanaxError, OSError):
            manifest.write(step)  # so that what it lists is read as well


# ---- everything that reads a run folder


def command(*words: str) -> Callable[[Path], object]:
    """A command of the command line that is given the folder."""

    def read(place: Path) -> None:
        try:
            cli.main([*words, str(place)])
        except SystemExit as stop:
            if stop.code not in (0, None, 1, 2, 65, 73, 78):
                raise AssertionError(f"exit code {stop.code}") from None

    return read


def page(place: Path) -> None:
    command("report", "-o", str(place.with_suffix(".html")))(place)


def supervise(place: Path) -> None:
    """What a supervisor reads while it watches, and once the processes have ended."""
    supervisor = Supervisor(lambda attempt: [], place, Limits())
    supervisor._silent({}, 0.0)
    for rank in (0, 1):
        ending.last_words(place, rank)
    supervisor.watch()


def resume(place: Path) -> None:
    """Reads the files of a resumed run in the order of the trainer, without JAX."""
    settings = folder.recorded(place)
    config = check(with_settings(TrainConfig(output_dir=str(place), resume=True), settings, str(place)))
    with claimed(place, resume=True):
        time_account.reached(place)
        time_account.record_last_heartbeat(Events(place))
        folder.check_same_run(place, config.record() | {"steps": config.steps or 3})
        Plan.of_run(place)
        folder.changed_versions(place)
        for _, step in manifest.finished(place / CHECKPOINTS):
            try:
                meta = _meta(manifest.read_meta(step).meta, step)
            except (OSError, ValueError) as error:  # as the checkpoint's own reader does
                raise DataError(str(error)) from error
            History.of(meta.history, 2)
            if meta.position is not None:
                Batches._checked(HERE, meta.position)  # type: ignore[arg-type]
        folder.open_metrics(place, 2)


POSITION = json.loads((RECORDED / "checkpoints" / "2" / "meta.json").read_text())["meta"]["position"]
HERE = SimpleNamespace(source=POSITION["source"], _order=POSITION["order"])
"""The batches of the run, as far as a position is compared with them."""


READERS: dict[str, Sequence[Callable[[Path], object]]] = {
    "report": (command("report"), command("report", "--json"), page),
    "inspect": (command("inspect"), command("inspect", "--json")),
    "checkpoint show": (command("checkpoint", "show"), command("checkpoint", "show", "--json")),
    "checkpoint verify": (command("checkpoint", "verify"),),
    "heartbeats": (lambda place: (heartbeat.read(place), heartbeat.damaged(place)),),
    "resume": (resume,),
    "supervise": (supervise,),
}
"""What reads a folder, each in several forms; a folder is read in one of them."""


@dataclass
class Campaign:
    """What came of many folders.

    Attributes:
      failures: what was raised or printed that should not have been, by seed and reader.
      outcomes: how often a reader was content, and how often it refused.
      cpu_seconds: of the folder that took most, and its seed.
    """

    failures: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    cpu_seconds: tuple[float, int] = (0.0, 0)

    def __str__(self) -> str:
        seconds, seed = self.cpu_seconds
        counts = "\n".join(f"  {name}: {count}" for name, count in sorted(self.outcomes.items()))
        slowest = f"most CPU: {seconds:.2f} s (folder {seed})"
        return "\n".join([counts, slowest, f"{len(self.failures)} failures", *self.failures[:20]])


@mock.patch("os.fsync", lambda descriptor: None)
def read_folders(count: int, first: int, place: Path) -> Campaign:
    """Have every reader read `count` folders; no power is cut here, so that nothing waits for a disk."""
    campaign, files = Campaign(), template()
    for seed in range(first, first + count):
        target = place / f"f{seed}"
        spoil(target, files, random.Random(seed))
        began = time.process_time()
        for name, forms in READERS.items():
            output, outcome = io.StringIO(), "read"
            try:
                with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                    forms[seed % len(forms)](target)
            except SpanaxError as error:
                outcome = "refused"
                output.write(str(error))
            except Exception:
                campaign.failures.append(f"{seed} {name}: {traceback.format_exc()[-600:]}")
            text = output.getvalue()
            if text.startswith("spanax: "):
                outcome = "refused"
            if "Traceback" in text or (match := STEERING.search(text)):
                shown = text[-600:] if "Traceback" in text else f"{match!r} in {text[-300:]!r}"
                campaign.failures.append(f"{seed} {name}: {shown}")
            campaign.outcomes[f"{name}, {outcome}"] += 1
        campaign.cpu_seconds = max(campaign.cpu_seconds, (time.process_time() - began, seed))
        shutil.rmtree(target)
    return campaign
