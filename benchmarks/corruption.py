"""Flips, cuts and removals over every file of a checkpoint: each must be found, and the older good step be used.

Two steps are saved. A trial changes one file of the newer one: a flipped bit, a cut, bytes more, no bytes, no file.
It counts as found when the file is named; then the step that a run would be restored from is asked for, and every
fiftieth time restored and compared. The file is put back before the next trial.

Usage:
  python benchmarks/corruption.py [--trials 500] [--seed 0] [--megabytes 1024] [--json]
"""

import argparse
import collections
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spanax.entries.folder import Folder
from spanax.train.store import checkpoint, manifest

Damage = Callable[[bytes, random.Random], bytes | None]

DAMAGES: dict[str, Damage] = {
    "flipped bit": lambda content, chance: _flipped(content, chance.randrange(8 * len(content))),
    "cut short": lambda content, chance: content[: chance.randrange(len(content))],
    "made longer": lambda content, chance: content + chance.randbytes(chance.randrange(1, 9)),
    "emptied": lambda content, chance: b"",
    "removed": lambda content, chance: None,
}


def saved(root: Path) -> dict[str, Any]:
    """Two steps of some arrays, and the arrays of the older one."""
    of = {step: {f"layer.{at}": jnp.arange(512.0) * step + at for at in range(8)} for step in (1, 2)}
    for step, arrays in of.items():
        checkpoint.save(root, step, arrays, plan_json='{"layout": "data"}', meta={"step": step}).wait()
    return of[1]


def campaign(num_trials: int, seed: int) -> dict[str, Any]:
    """So many trials over all files in turn; what was tried, found and restored."""
    chance, tried, missed = random.Random(seed), collections.Counter[str](), []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        older = saved(root)
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        targets = {key: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=here) for key, array in older.items()}
        files = sorted(path for path in (root / "2").rglob("*") if path.is_file())
        num_fallbacks = 0
        for trial in range(num_trials):
            file = files[trial % len(files)]
            whole = file.read_bytes()
            kind = chance.choice(list(DAMAGES)) if whole else "made longer"
            damaged = DAMAGES[kind](whole, chance)
            file.unlink() if damaged is None else file.write_bytes(damaged)
            name = file.relative_to(root / "2").as_posix()
            is_found = any(name in problem for problem in manifest.problems(root / "2"))
            number, _ = checkpoint.choose(Folder.of(root), None, lambda _: None)
            if trial % 50 == 0:
                found = checkpoint.restore(root, targets, warn=lambda _: None)
                is_found &= all(np.array_equal(found.arrays[key], older[key]) for key in older)
            num_fallbacks += number == 1
            tried[kind] += 1
            if not is_found or number != 1:
                missed.append(f"{kind} {name}")
            file.write_bytes(whole)
        assert not manifest.problems(root / "2"), "a trial was not undone"
    return {
        "trials": num_trials, "files": len(files), **dict(sorted(tried.items())),
        "not found": missed, "older step used": num_fallbacks,
    }  # fmt: skip


def seconds_per_gb(megabytes: int) -> float:
    """What holding a step against its manifest takes, at best: a busy machine takes longer."""
    with tempfile.TemporaryDirectory() as folder:
        step = Path(folder) / "7"
        step.mkdir()
        piece = random.Random(0).randbytes(1 << 20)
        with open(step / "arrays", "wb") as file:
            for _ in range(megabytes):
                file.write(piece)
        manifest.write(step)
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            assert not manifest.problems(step)
            seconds.append(time.perf_counter() - began)
        return min(seconds) / (megabytes * (1 << 20) / 1e9)


def _flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    told = campaign(asked.trials, asked.seed)
    told["seconds per GB"] = round(seconds_per_gb(asked.megabytes), 2)
    print(json.dumps(told) if asked.json else "\n".join(f"{name:>16}  {what}" for name, what in told.items()))
    sys.exit(bool(told["not found"] or told["older step used"] != asked.trials))


if __name__ == "__main__":
    main()
