"""Untrusted run folders: one entry at a time is replaced by a link, a FIFO, a device or garbage, and a command runs.

What lies outside of the run folder must stay as it is, and none of it may be read into the folder or the output. The
verb has to end, with a result or with an error of a few lines. The names are those of `spanax.entries.names`.
"""

import contextlib
import io
import os
import shutil
import signal
import stat
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from spanax import cli
from spanax.entries.names import FILES, FOLDERS, IMPORTED, IN_STEP
from spanax.train.record.events import Events
from spanax.train.record.heartbeat import Pulse
from spanax.train.store import manifest

HANG_SECONDS = int(os.environ.get("SPANAX_TEST_HANG_SECONDS", "240"))
SECRET = "precious-a1f0"
SPARSE_BYTES = 4 << 30

ENDS = {0, 2, 65, 73, 78}
"""Exit codes of a result, and of errors that a run folder may cause."""

WORKLOAD = """
import numpy as np, spanax
from flax import nnx
rows = np.ones((4, 8, 16), "float32")
tiny = spanax.Workload(build=lambda rngs: nnx.Linear(16, 16, rngs=rngs), batch=rows[0], num_steps=4,
                       loss=lambda model, x: (model(x) ** 2).mean(), source=[row for row in rows])
"""

TEMPORARIES = ("config.toml.new", "metrics.jsonl.new", "heartbeats/0.new", "checkpoints/6.new0")
"""What files and folders were once called while they were written."""


def a_device(path: Path, outside: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        path.symlink_to("/dev/full")


def a_sparse_file(path: Path, outside: Path) -> None:
    path.touch()
    os.truncate(path, SPARSE_BYTES)


KINDS: dict[str, Callable[[Path, Path], object]] = {
    "link to a file": lambda path, outside: path.symlink_to(outside / "file"),
    "link to a folder": lambda path, outside: path.symlink_to(outside),
    "link to nothing": lambda path, outside: path.symlink_to(outside / "nothing"),
    "link to a device": lambda path, outside: path.symlink_to("/dev/zero"),
    "hard link": lambda path, outside: os.link(outside / "file", path),
    "FIFO": lambda path, outside: os.mkfifo(path),
    "device": a_device,
    "folder": lambda path, outside: path.mkdir(),
    "empty file": lambda path, outside: path.touch(),
    "sparse file": a_sparse_file,
}


@dataclass(frozen=True)
class Place:
    """Where good folders lie, which every case copies.

    Attributes:
      root: a folder with `run`, a run of two checkpoints; `imported`, weights; and `bin`, tools of a scheduler.
    """

    root: Path

    @staticmethod
    def trained(root: Path, weights: Path) -> "Place":
        """A run that was trained, and weights that were imported."""
        place = Place(root)
        place.prepare()
        place.call(*place.train("run"), "--save-every", "2", "--track", "tensorboard", "--profile", "2:3")
        place.call("import", str(weights), "--as", "gpt2", "--output-dir", str(root / "imported"))
        place.finish()
        return place

    @staticmethod
    def written(root: Path) -> "Place":
        """A run that was written by hand, in an instant: JAX cannot read it."""
        place, run = Place(root), root / "run"
        place.prepare()
        for step in (2, 4):
            folder = run / "checkpoints" / str(step)
            (folder / "arrays" / "d").mkdir(parents=True)
            (folder / "arrays" / "d" / "0").write_bytes(bytes(100))
            (folder / "plan.json").write_text("{}")
            (folder / "meta.json").write_text('{"saved_at": "2026-01-02T03:04:05Z", "leaves": {}, "meta": {}}')
            manifest.write(folder)
        for event in ({"event": "begin", "step": 0}, {"event": "end", "step": 4}):
            Events(run).append(**event)
        Pulse(run, 0, 0).beat("end", 4, seconds={"step": 1.0})
        (run / "config.toml").write_text('workload = "tiny"\n')
        (run / "metrics.jsonl").write_text('{"event": "step", "step": 4, "loss": 0.5}\n')
        for name in ("env.json", "plan.json"):
            (run / name).write_text("{}")
        place.finish()
        return place

    def prepare(self) -> None:
        """Write the workload and the tools."""
        (self.root / "w.py").write_text(WORKLOAD)
        (self.root / "bin").mkdir()
        for tool, answer in (("sbatch", "echo 17"), ("srun", "echo 127.0.0.1"), ("python", "exit 0")):
            (self.root / "bin" / tool).write_text(f"#!/bin/sh\n{answer}\n")
            (self.root / "bin" / tool).chmod(0o755)

    def finish(self) -> None:
        """Add what launchers and trackers leave in a run folder."""
        again = ("--", *self.train("run"), "--resume")
        self.call("launch", "slurm", *again)
        self.call("launch", "workers", "--start", str(self.root / "bin" / "python"), *again)
        (self.root / "run" / "wandb").mkdir()
        (self.root / "run" / "wandb" / "id").write_text("0123456789abcdef")

    def call(self, *command: str) -> None:
        """Call a verb that has to succeed."""
        code, text = called(list(command), self.root)
        assert code == 0, text

    def train(self, out: str, *, root: Path | None = None) -> list[str]:
        """The words of a run in a folder."""
        flags = ("--output-dir", str((root or self.root) / out), "--devices", "1", "--layout", "data")
        return ["train", f"{self.root / 'w.py'}:tiny", *flags]


def resumed(place: Place, root: Path, *more: str) -> list[str]:
    return [*place.train("run", root=root), "--resume", "--steps", "5", *more]


def launched(where: list[str]) -> Callable[[Place, Path], list[str]]:
    return lambda place, root: ["launch", *where, "--", *resumed(place, root)]


def on_run(*words: str) -> Callable[[Place, Path], list[str]]:
    """A verb on a run folder, which stands for RUN."""
    return lambda place, root: [word.replace("RUN", str(root / "run")).replace("ROOT", str(root)) for word in words]


VERBS: dict[str, Callable[[Place, Path], list[str]]] = {
    "report": on_run("report", "RUN"),
    "report --json": on_run("report", "RUN", "--json"),
    "report --out": on_run("report", "RUN", "--out", "ROOT/page.html"),
    "checkpoint show": on_run("checkpoint", "show", "RUN"),
    "checkpoint verify": on_run("checkpoint", "verify", "RUN", "--json"),
    "inspect": on_run("inspect", "RUN"),
    "inspect --hlo": on_run("inspect", "RUN", "--hlo", "ROOT/step.txt"),
    "check --profiled": lambda place, root: [
        "check", f"{place.root / 'w.py'}:tiny", "--on", "cpu:2", "--level", "0", "--profiled", str(root / "run"),
    ],
    "doctor": on_run("doctor", "--output-dir", "RUN"),
    "launch local": launched(["local", "--backoff-seconds", "0", "--restarts", "1"]),
    "launch slurm": launched(["slurm"]),
    "launch workers": lambda place, root: launched(["workers", "--start", f"{place.root}/bin/python"])(place, root),
    "launch workers srun": launched(["workers", "--start", "srun spanax", "--hosts", "2"]),
    "train": lambda place, root: place.train("run", root=root),
    "train --resume": resumed,
    "train --track": lambda place, root: resumed(place, root, "--track", "tensorboard"),
    "train --profile": lambda place, root: resumed(place, root, "--profile", "5:5"),
    "train --init": lambda place, root: [*place.train("new", root=root), "--steps", "1", "--init", str(root / "run")],
    "export": lambda place, root: ["export", str(root / "imported"), "--as", "gpt2", "--output-dir",
        str(root / "exported")],
}  # fmt: skip

LIGHT = ("report", "report --json", "report --out", "checkpoint show", "checkpoint verify", "launch local",
         "launch slurm", "launch workers", "launch workers srun")  # fmt: skip
"""The verbs that start no JAX."""


def names(place: Place, verb: str) -> list[str]:
    """Every entry that a command may open: files, their folders, and those of steps."""
    imported = [*IMPORTED, "model.json", *(f"0/{name}" for name in IN_STEP), "0", "0/arrays"]
    patterns = imported if verb == "export" else [*FILES, *FOLDERS, *TEMPORARIES]
    folder = place.root / ("imported" if verb == "export" else "run")
    listed = set()
    for pattern in patterns:
        matching = sorted(str(path.relative_to(folder)) for path in folder.glob(str(pattern)))
        # Of the many files of an array or a trace a few stand for all: some at the top, and the deepest.
        listed |= {*matching[-4:]} if matching else {pattern.replace("*", "0")}
        deeper = [path for name in matching for path in (folder / name).rglob("*") if path.is_file()]
        listed |= {str(path.relative_to(folder)) for path in sorted(deeper, key=lambda path: len(path.parts))[-1:]}
        listed |= {str(Path(name).parent) for name in listed} - {"."}
    return sorted(listed)


def cases(place: Place, verb: str) -> Iterator[tuple[str, str]]:
    """The names and kinds to try with a verb."""
    for kind in KINDS:
        for name in names(place, verb):
            yield name, kind


REPORTED: tuple[tuple[str, str, str], ...] = (
    ("launch local", "heartbeats", "link to a folder"),
    ("launch local", "log/rank0.log", "link to a file"),
    ("launch local", "log/rank0.log", "FIFO"),
    ("launch workers", "log/rank0.log", "hard link"),
    ("launch workers", "events.jsonl", "link to a file"),
    ("launch workers srun", "log", "link to a folder"),
    ("launch slurm", "job.sh", "link to a file"),
    ("launch slurm", "job.sh", "hard link"),
    ("report", "events.jsonl", "FIFO"),
    ("train", "heartbeats", "link to a folder"),
    ("train", "heartbeats/0.new", "link to a file"),
)
"""What once wrote, deleted or hung."""


def sample(place: Place, verb: str) -> list[tuple[str, str]]:
    """The reported cases of a verb; of the light ones also one name for every kind, each verb with other names."""
    every_name, first = names(place, verb), list(VERBS).index(verb)
    rotated = [(every_name[(first * 5 + number * 7) % len(every_name)], kind) for number, kind in enumerate(KINDS)]
    return [case[1:] for case in REPORTED if case[0] == verb] + (rotated if verb in LIGHT else [])


def problem(place: Place, verb: str, name: str, kind: str, root: Path) -> str:
    """What is wrong with how a verb takes a folder in which one entry was replaced; empty where nothing is."""
    folder, outside = root / ("imported" if verb == "export" else "run"), root / "outside"
    prepared(place, folder, outside, name, kind, is_bare=verb == "train")
    before = snapshot(outside)
    code, text = called(VERBS[verb](place, root), place.root)
    after = snapshot(outside)
    shutil.rmtree(outside)
    wrong = [
        after != before and f"outside: {sorted(before.items() ^ after.items())}",
        "Traceback (most recent call last)" in text and "a traceback",
        code not in ENDS and f"exit code {code}",
        SECRET in text and "the output holds what lies outside",
        *(f"{path} holds what lies outside" for path in leaked(root) if kind != "hard link"),
    ]
    for inner in root.iterdir():
        shutil.rmtree(inner) if inner.is_dir() and not inner.is_symlink() else inner.unlink()
    listed = "; ".join(part for part in wrong if part)
    return listed and f"{verb}, {name} is a {kind}: {listed}\n{text[-3000:]}"


def prepared(place: Place, folder: Path, outside: Path, name: str, kind: str, *, is_bare: bool) -> None:
    """A folder with one foreign entry, and files outside of it; `is_bare` is one without a run."""
    (outside / "inner").mkdir(parents=True)
    for path in ("file", "0.json", "manifest.json", "rank0.log", "inner/file"):
        (outside / path).write_text(SECRET)
    if is_bare:
        folder.mkdir()
    else:
        shutil.copytree(place.root / folder.name, folder, symlinks=True)
    path = folder / name
    if path.is_dir() and kind != "folder":
        shutil.rmtree(path)
    elif path.exists() and kind != "folder":
        path.unlink()
    elif path.is_file():
        path.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_dir():
        KINDS[kind](path, outside)


def snapshot(outside: Path) -> dict[str, object]:
    """The bytes, times and names of the files outside."""
    return {
        str(path.relative_to(outside)): (path.read_bytes() if path.is_file() else b"", path.lstat().st_mtime_ns)
        for path in [outside, *sorted(outside.rglob("*"))]
    }


def leaked(root: Path) -> list[str]:
    """Regular files with content from outside."""
    regular = [path for path in root.rglob("*") if not path.is_symlink() and path.is_file()]
    small = [path for path in regular if path.stat().st_size < 1 << 24]
    return [str(path.relative_to(root)) for path in small if SECRET.encode() in path.read_bytes()]


def called(command: list[str], root: Path) -> tuple[int, str]:
    """The exit code of a command and what it wrote; -1 where it raised or did not end."""
    output, code = io.StringIO(), 0

    def hang(*_: object) -> None:
        raise TimeoutError(f"it took more than {HANG_SECONDS} s")

    tools = {"PATH": f"{root / 'bin'}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    # The processes of a launch do nothing: `train` itself is a verb of its own.
    python = str(root / "bin" / "python") if command[0] == "launch" else sys.executable
    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(HANG_SECONDS)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(output))
        stack.enter_context(contextlib.redirect_stderr(output))
        if command[0] == "launch":  # JAX would find a cluster of Slurm
            stack.enter_context(mock.patch.dict(os.environ, tools))
        stack.enter_context(mock.patch.object(sys, "executable", python))
        try:
            cli.main(command)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1 if stop.code else 0
        except BaseException:
            code = -1
            output.write(traceback.format_exc())
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
    return code, output.getvalue()
