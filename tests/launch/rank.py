"""Runs as one rank of a job in tests, instead of training: a mode, then the arguments of python."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from spanax.processes.supervision import attach_supervisor
from spanax.train.record.heartbeat import Pulse


def main() -> None:
    mode, *words = sys.argv[1:]
    folder, attempt = Path(words[words.index("--output-dir") + 1]), int(os.environ["SPANAX_ATTEMPT"])
    rank = int(os.environ.get("SPANAX_HOST") or os.environ["SLURM_PROCID"])
    with open(folder / "attempts.txt", "a") as file:
        file.write(f"{attempt} {rank} {'--resume' in words}\n")
    while sum(line.startswith(f"{attempt} ") for line in (folder / "attempts.txt").read_text().splitlines()) < 2:
        time.sleep(0.05)
    attach_supervisor()
    if mode == "group":
        (folder / f"{rank}.json").write_text(json.dumps(group()))
    elif mode == "bad":
        # The other rank is ended because of it, which must not be reported as the cause.
        sys.exit(65) if rank == 1 else time.sleep(300)
    elif attempt == 0 and mode == "stuck":
        Pulse(folder, rank, attempt).beat("step", 3)
        time.sleep(300)
    elif attempt == 0:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(75))
        time.sleep(300)


def group() -> dict:
    """What JAX makes of the environment, and where the coordinator listens."""
    import jax

    from spanax.processes.devices import devices
    from spanax.processes.supervision import Hosts

    devices(None)
    assert jax.process_index() == Hosts.of().rank
    result = {
        "processes": jax.process_count(),
        "process": jax.process_index(),
        "devices": jax.device_count(),
        "local_devices": jax.local_device_count(),
        "listening": listening(),
    }
    jax.distributed.shutdown()
    return result


def listening() -> list[str]:
    """The addresses this process listens on, in the kernel's hexadecimal."""
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    sockets = {os.readlink(link) for link in links if os.path.islink(link)}
    result = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                result.append(local)
    return result


main()
