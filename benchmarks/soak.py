"""Thousands of small steps with data, saves and metrics: memory, open files and threads must stay where they are.

The first quarter is warm-up: programs are compiled, Orbax is imported, and pools fill with the first saves. Then the
resident memory is measured every hundredth of the way: growth is the median of the last tenth over that of the first.

Usage:
  python benchmarks/soak.py [--steps 5000] [--devices 8] [--save-every 100] [--json]
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

MOST_GROWTH = 0.02


def measured() -> tuple[int, int, int]:
    """Resident bytes, open files and threads of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")), threading.active_count()


def soak(num_steps: int, num_devices: int, save_every: int) -> dict[str, Any]:
    """Trains so many steps, and measures on the way."""
    import numpy as np
    from flax import nnx

    import spanax
    from spanax.train.config import TrainConfig
    from spanax.train.trainer import train

    rows = np.random.default_rng(0).normal(size=(64, 16, 32)).astype("float32")
    workload = spanax.Workload(
        build=lambda rngs: nnx.Linear(32, 32, rngs=rngs),
        batch=rows[0],
        loss=lambda model, x: ((model(x) - x) ** 2).mean(),
        source=lambda: (row for _ in range(num_steps) for row in rows),
        num_steps=num_steps,
    )
    found: list[tuple[int, int, int]] = []

    def look(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] % max(1, num_steps // 100) == 0:
            if not any("spanax-save" in thread.name for thread in threading.enumerate()):
                found.append(measured())

    devices, began = spanax.simulate(num_devices), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(workload="soak", output_dir=f"{folder}/run", save_every=save_every, layout="fsdp")
        train(lambda **_: workload, config, devices, look)
    warm = found[len(found) // 4 :]
    tenth = max(1, len(warm) // 10)
    sizes = [statistics.median(size for size, _, _ in part) for part in (warm[:tenth], warm[-tenth:])]
    return {
        "steps": num_steps,
        "MiB after warm-up": round(sizes[0] / 2**20, 1),
        "MiB at the end": round(sizes[1] / 2**20, 1),
        "growth": round(sizes[1] / sizes[0] - 1, 4),
        "open files": sorted({files for _, files, _ in warm}),
        "threads": sorted({threads for _, _, threads in warm}),
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    told = soak(asked.steps, asked.devices, asked.save_every)
    print(json.dumps(told) if asked.json else "\n".join(f"{name:>16}  {what}" for name, what in told.items()))
    files = told["open files"]
    sys.exit(told["growth"] > MOST_GROWTH or files[-1] - files[0] > 4)


if __name__ == "__main__":
    main()
