"""Kill -9 during a save, again and again: what was acknowledged must be there, whole, and nothing else for long.

One parent imports JAX and Orbax once and forks a child for each kill. The child goes on with saves behind the newest
good step, and acknowledges each through a pipe once `wait` has returned. It is killed at a random moment; then the
parent looks at the folder without JAX.

  lost          an acknowledged step is not there, and neither is a newer one
  unreadable    a step that counts as finished differs from its manifest
  stale         what an earlier kill left is still there after the next save

At the end one more child restores the newest step and compares its numbers.

Usage:
  python benchmarks/kill_during_save.py [--kills 200] [--seed 0] [--json]
"""

import argparse
import collections
import json
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from spanax.train.store import checkpoint, manifest

NAMES, ROWS, KEEP = 6, 64, 3


def value(step: int, at: int) -> float:
    return float(step * NAMES + at)


def save_for_ever(root: Path, acknowledge: Callable[[int], None]) -> None:
    """Saves until it is killed, each step with numbers of its own."""
    import jax.numpy as jnp

    step = max(manifest.steps(root), default=0)
    while True:
        step += 1
        arrays = {f"layer.{at}": jnp.full((ROWS, ROWS), value(step, at)) for at in range(NAMES)}
        checkpoint.save(root, step, arrays, plan_json="{}", meta={}, keep=KEEP).wait()
        acknowledge(step)


def is_restored(root: Path) -> bool:
    """Whether the newest step has the numbers that were saved in it."""
    import jax
    import numpy as np

    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shape = jax.ShapeDtypeStruct((ROWS, ROWS), "float32", sharding=here)
    found = checkpoint.restore(root, {f"layer.{at}": shape for at in range(NAMES)})
    return all(np.all(found.arrays[f"layer.{at}"] == value(found.step, at)) for at in range(NAMES))


def forked(act: Callable[[int], object]) -> tuple[int, int]:
    """A child that does something with the writing end of a pipe; its process and the reading end."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of forks: nothing of it runs here before one
        child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    os.close(reading)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        ended = act(writing)
        os._exit(0 if ended else 1)
    except BaseException as error:
        os.write(writing, f"{type(error).__name__}: {error}\n".encode())
        os._exit(2)


def one_kill(root: Path, chance: random.Random) -> tuple[list[int], str]:
    """The steps that a child acknowledged before it was killed, and the moment: what it was busy with."""
    before = set(manifest.unfinished(root))
    child, reading = forked(lambda w: save_for_ever(root, lambda step: os.write(w, f"{step}\n".encode())))
    with open(reading) as pipe:
        first, began = pipe.readline(), time.monotonic()
        left_over = sorted(path.name for path in before & set(manifest.unfinished(root)))
        second = pipe.readline()
        # A moment of the next save, however long one takes on this machine.
        time.sleep(chance.uniform(0, time.monotonic() - began))
        os.kill(child, signal.SIGKILL)
        acknowledged = [int(first), int(second), *map(int, pipe)]
    os.waitpid(child, 0)
    during = "a save" if manifest.unfinished(root) else "the rest"
    return acknowledged, f"stale {left_over}" if left_over else during


def campaign(num_kills: int, seed: int) -> dict[str, object]:
    """Kills so many children, and counts what must not be."""
    checkpoint.orbax_v1()
    chance, found, when = random.Random(seed), collections.Counter[str](), collections.Counter[str]()
    began, num_saves = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "checkpoints"
        for _ in range(num_kills):
            acknowledged, moment = one_kill(root, chance)
            num_saves += len(acknowledged)
            found["stale"] += moment.startswith("stale")
            when[moment] += 1
            steps = manifest.finished(root)
            found["lost"] += max((step for step, _ in steps), default=0) < acknowledged[-1]
            found["lost"] += not {step for step in acknowledged[-KEEP + 1 :]} <= {step for step, _ in steps}
            found["unreadable"] += sum(bool(manifest.problems(path)) for _, path in steps)
        child, reading = forked(lambda _: is_restored(root))
        restored = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.close(reading)
    return {
        "kills": num_kills,
        "killed in a save": when["a save"],
        "acknowledged": num_saves,
        **{name: found[name] for name in ("lost", "unreadable", "stale")},
        "newest restored": restored == 0,
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    told = campaign(asked.kills, asked.seed)
    print(json.dumps(told) if asked.json else "\n".join(f"{name:>18}  {what}" for name, what in told.items()))
    sys.exit(bool(told["lost"] or told["unreadable"] or told["stale"] or not told["newest restored"]))


if __name__ == "__main__":
    main()
