"""From the command to the end of the first step: `spanax train` beside hand-written JAX and the usual NNX loop.

Each trains gpt-nano's model on one device, in a process of its own, in turn. Cold: nothing was compiled before; warm:
what the run before it compiled is there. The peers begin with numbers and tokens that NumPy draws; Spanax also finds
its axes, plans, reads its data and keeps a record. Seconds are medians over rounds, ratios to the hand-written loop.

Usage:
  python benchmarks/start.py [--rounds 5] [--json]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

from peers.__main__ import Peer, rounds  # noqa: E402

SHAPE = "--num-layers 4 --num-heads 4 --embed-dim 128 --seq-len 64 --vocab-size 256 --batch-size 32".split()
REFERENCE = "hand-written JAX"
WORK = ("parameters", "tokens")
"""What is equal of all."""


AS_INSTALLED = {"PYTHONDONTWRITEBYTECODE": ""}
"""Bytecode is kept: installed packages have theirs, this one where it lies may not."""


def peer(script: str, *words: str, caches: Path) -> dict[str, Any]:
    """What a peer says once its first step is done."""
    kept = {"JAX_COMPILATION_CACHE_DIR": str(caches), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    made = Peer.start(script, (script, *words), SHAPE, AS_INSTALLED | kept)
    if isinstance(made, str):
        raise SystemExit(f"{script}: {made}")
    made.end()
    return {"seconds": made.facts["to_first_step_seconds"], **{name: made.facts[name] for name in WORK}}


def trained(caches: Path) -> dict[str, Any]:
    """What `spanax train` took to its first step, by when it says so."""
    with tempfile.TemporaryDirectory() as out:
        began = time.time()
        command = [sys.executable, "-m", "spanax", "train", "gpt-nano", "--devices", "1", "--steps", "1", "--json"]
        variables = {"XDG_CACHE_HOME": str(caches), "PYTHONPATH": str(HERE.parent / "src")}
        with subprocess.Popen(
            [*command, "--output-dir", f"{out}/run"],
            stdout=subprocess.PIPE,
            env={**os.environ, **AS_INSTALLED, **variables},
        ) as process:
            assert process.stdout is not None
            seen: dict[str, Any] = {}
            for line in process.stdout:
                event = json.loads(line)
                seen.setdefault(event["event"], event | {"seconds": time.time() - began})
        if process.returncode:
            raise SystemExit(f"spanax train ended with {process.returncode}")
    step = seen["step"]
    tokens = round(step["tokens_per_second"] * step["step_seconds"])
    return {"seconds": step["seconds"], "parameters": seen["start"]["parameters"], "tokens": tokens}


PEERS: dict[str, Callable[..., dict[str, Any]]] = {
    REFERENCE: partial(peer, "by_hand.py", "--scan"),
    "nnx.jit loop": partial(peer, "nnx_loop.py", "--scan"),
    "spanax train": trained,
}


def measure(count: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of every peer, cold and warm, one a round.

    Raises:
      SystemExit: one has other parameters or tokens than the others.
    """
    taken: dict[str, dict[str, list[float]]] = {name: {"cold": [], "warm": []} for name in PEERS}
    for turn in range(-1, count):  # the first round leaves bytecode
        with tempfile.TemporaryDirectory() as caches:
            for when in ("cold", "warm"):
                found = {name: start(caches=Path(caches) / name) for name, start in PEERS.items()}
                work = {name: tuple(one[what] for what in WORK) for name, one in found.items()}
                if len(set(work.values())) > 1:
                    raise SystemExit(f"not the same work ({', '.join(WORK)}): {work}")
                for name, one in found.items():
                    if turn >= 0:
                        taken[name][when].append(one["seconds"])
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=rounds, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    taken = measure(args.rounds)
    for name, times in taken.items():
        row: dict[str, Any] = {"peer": name}
        for when, seconds in times.items():
            ratios = [a / b for a, b in zip(seconds, taken[REFERENCE][when], strict=True)]
            row |= {f"{when}_seconds": statistics.median(seconds), f"{when}_ratio": statistics.median(ratios)}
        if args.json:
            print(json.dumps(row))
            continue
        said = [f"{when} {row[f'{when}_seconds']:5.2f} s, {row[f'{when}_ratio']:.2f}" for when in times]
        print(f"{name:18} {'   '.join(said)}", flush=True)


if __name__ == "__main__":
    main()
