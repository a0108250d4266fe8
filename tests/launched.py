"""A small run under a supervisor, for faults, and its comparison with an uninterrupted run."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spanax.train.record import events, heartbeat
from spanax.train.store import manifest

WORKLOAD = """
import os, signal, time
import jax
import numpy as np
import spanax
from spanax.models import gpt

RANK, ATTEMPT = (os.environ.get(name, "0") for name in ("SPANAX_HOST", "SPANAX_ATTEMPT"))

# The clock of one rank may be wrong by so many seconds.
skewed, skew = os.environ.get("SKEW", "-1:0").split(":")
if skewed == RANK:
    right = time.time
    time.time = lambda: right() + int(skew)

def num_until(event):
    # RANK:EXAMPLES:ATTEMPTS, after how many examples it happens to a rank, in its first attempts.
    rank, examples, attempts = os.environ.get(event, "-1:0:0").split(":")
    return int(examples) if rank == RANK and int(ATTEMPT) < int(attempts) else -1

class Examples:
    # Numbers that follow from the index; a rank may fall asleep or be asked to stop after so many of them.
    def __init__(self, seq_len):
        self.seq_len, self.num_read = seq_len, 0
        self.asleep, self.asked = num_until("ASLEEP"), num_until("ASKED_TO_STOP")

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        self.num_read += 1
        if self.num_read == self.asleep:
            time.sleep(600)
        if self.num_read == self.asked:
            os.kill(os.getpid(), signal.SIGTERM)
        ids = np.random.default_rng(int(index)).integers(0, 64, self.seq_len + 1, dtype="int32")
        return {"inputs": ids[:-1], "targets": ids[1:], "index": np.int32(index)}

def loss(model, batch):
    # What was trained on, in its order, stands in the metrics of every step.
    return gpt.loss(model, batch), {"examples": batch["index"]}

def small(batch_size=24, seq_len=16):
    config = gpt.GPTConfig(64, seq_len, num_layers=2, num_heads=4, embed_dim=24, dropout=0.1)
    batch = gpt.example_batch(batch_size, seq_len) | {"index": jax.ShapeDtypeStruct((batch_size,), "int32")}
    return spanax.Workload(build=lambda rngs: gpt.GPT(config, rngs), batch=batch, loss=loss,
                           source=Examples(seq_len), num_steps=12)
"""

TRAIN = ("small.py:small", "--steps", "12", "--save-every", "2", "--seed", "5", "--layout", "fsdp")


@dataclass
class Launched:
    """One run under a supervisor of its own.

    Attributes:
      folder: the run folder.
      process: the supervisor.
      began: when it was started.
    """

    folder: Path
    process: subprocess.Popen[str]
    began: float

    @staticmethod
    def start(
        place: Path,
        out: str,
        *train: str,
        hosts: int = 1,
        devices: int = 8,
        flags: tuple[str, ...] = (),
        environ: Mapping[str, str] | None = None,
    ) -> "Launched":
        """`spanax launch local` in a folder, `devices` in each of the processes."""
        (place / "small.py").write_text(WORKLOAD)
        sizes = ("--processes", str(hosts), "--devices-per-process", str(devices), "--backoff-seconds", "0.1")
        argv = [sys.executable, "-m", "spanax", "launch", "local", *sizes, *flags, "--", "train", *(train or TRAIN)]
        with open(place / f"{out}.txt", "w") as text:
            process = subprocess.Popen(
                [*argv, "--output-dir", out],
                cwd=place,
                env={**os.environ, "PYTHONWARNINGS": "", **(environ or {})},
                stdout=text,
                stderr=subprocess.STDOUT,
                text=True,
            )
        return Launched(place / out, process, time.time())

    def pid(self, rank: int) -> int | None:
        """The process of a rank, as soon as it has given a sign of life in the attempt of now."""
        beat = heartbeat.read(self.folder).get(rank)
        return None if beat is None else beat.pid

    def send(self, number: int, rank: int) -> float:
        """A signal to a process; returns when."""
        pid = self.pid(rank)
        assert pid is not None
        os.kill(pid, number)
        return time.time()

    def until(self, holds: Callable[[], Any], timeout_seconds: float = 240) -> None:
        """Wait until something holds, or the run has ended."""
        deadline = time.monotonic() + timeout_seconds
        while not holds() and self.process.poll() is None:
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.02)

    def pause(self, seconds: float) -> None:
        """Let it run for a while."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)

    def end(self, timeout_seconds: float = 400) -> int:
        """The exit code of the supervisor, when it has one."""
        return self.process.wait(timeout_seconds)

    def kill(self) -> None:
        """End all of it."""
        self.process.kill()
        for beat in heartbeat.read(self.folder).values():
            with suppress(ProcessLookupError):
                os.kill(beat.pid, signal.SIGKILL)
        self.process.wait()

    def step(self) -> int:
        """How far the run has come, by its last signs of life."""
        return max((beat.step for beat in heartbeat.read(self.folder).values()), default=0)

    def output(self) -> str:
        """Its output, and the end of each log."""
        logs = [path.read_text()[-3000:] for path in sorted((self.folder / "log").glob("*"))]
        return "\n".join([self.folder.with_suffix(".txt").read_text(), *logs])

    def events(self, name: str) -> list[dict[str, Any]]:
        """Its events of one name."""
        return [event for event in events.read(self.folder).records if event["event"] == name]


def losses(folder: Path) -> list[tuple[int, float]]:
    """Every step and its loss, as the run's metrics have them."""
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if line["event"] == "step"]


def examples(folder: Path) -> bytes:
    """The examples that a run was trained on, a line a step, in their order."""
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    rows = (" ".join(map(str, line["examples"])) for line in lines if line["event"] == "step")
    return "\n".join(rows).encode()


def digest(folder: Path, step: int | None = None) -> str:
    """The sha256 of every array of a step, by default the newest, for any mesh that it was saved from."""
    state = hashlib.sha256()
    for path, array in sorted(arrays(folder, step).items()):
        state.update(f"{path} {array.dtype} {array.shape}".encode())
        state.update(array.tobytes())
    return state.hexdigest()


def arrays(folder: Path, step: int | None = None) -> dict[str, np.ndarray]:
    """Every array of a step, on one device; keys as their numbers."""
    import jax

    from spanax.train.store import checkpoint

    step = manifest.steps(folder / "checkpoints")[-1] if step is None else step
    meta = json.loads((folder / "checkpoints" / str(step) / "meta.json").read_text())
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    plan = json.loads((folder / "plan.json").read_text())
    assert len(meta["leaves"]) == len(plan["leaves"])
    targets = {
        leaf["path"]: jax.ShapeDtypeStruct(
            leaf["shape"], jax.random.key(0).dtype if "key<" in leaf["dtype"] else leaf["dtype"], sharding=here
        )
        for leaf in plan["leaves"]
    }
    restored = checkpoint.restore(folder / "checkpoints", targets, step=step)
    is_key = lambda a: jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key)  # noqa: E731
    return {
        path: np.asarray(jax.random.key_data(array) if is_key(array) else array)
        for path, array in restored.arrays.items()
    }
