"""Faults over small real runs under their supervisor, each held against a run that nobody disturbs.

    python benchmarks/chaos.py kills --count 50 [--hosts 2]   kill -9 at random moments: same losses, same bits
    python benchmarks/chaos.py faults                         each kind of fault: when noticed, when the next step came
    python benchmarks/chaos.py elastic                        8 -> 4 -> 6 -> 8 devices and 2 -> 1 -> 2 hosts in one run
    python benchmarks/chaos.py chaos --minutes 10 --gap 60    all kinds at random: finishes, same bits, goodput

Prints a line for each fault and one JSON object at the end; exits with 1 where something differs.
"""

import argparse
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / name) for name in ("tests", "src")]
import conftest  # noqa: E402, F401 (8 simulated devices)
from launched import Launched, arrays, digest, examples, losses  # noqa: E402
from spanax.train.record.time_account import account  # noqa: E402
from spanax.train.store import manifest  # noqa: E402

NAME = "small.py:small"
STUCK = ("--stuck-seconds", "5")
KINDS = ("kill", "stop", "preempt", "supervisor", "flip")


def words(steps: int, save_every: int, *more: str) -> tuple[str, ...]:
    """`train` of the small model."""
    settings = ("--steps", str(steps), "--save-every", str(save_every), "--seed", "5", "--layout", "fsdp")
    return (NAME, *settings, "--log-every", "1", *more)


def differences(run: Launched, whole: Launched) -> list[str]:
    """What of a run is not as in the one that nobody disturbed."""
    checks: dict[str, Callable[[Path], Any]] = {"losses": losses, "examples": examples, "sha256 of the state": digest}
    return [name for name, of in checks.items() if of(run.folder) != of(whole.folder)]


def undisturbed(place: Path, train: tuple[str, ...], **how: Any) -> Launched:
    """A run without faults, to its end."""
    run = Launched.start(place, "whole", *train, **how)
    if run.end(3600):
        sys.exit(run.said())
    print(f"undisturbed: {time.time() - run.began:.0f} s", flush=True)
    return run


def kills(place: Path, count: int, hosts: int, seed: int) -> dict[str, Any]:
    """kill -9 of a random process, at random moments after each beginning."""
    moments, how = random.Random(seed), {"hosts": hosts, "devices": 8 // hosts}
    # More steps than are taken between two kills, so that the last of them still finds the run.
    train = words(count * (100 if hosts == 1 else 15), 20 if hosts == 1 else 5)
    whole = undisturbed(place, train, **how)
    run = Launched.start(place, "killed", *train, flags=("--restarts", str(2 * count)), **how)
    for kill in range(count):
        run.until(lambda: len(run.events("begin")) > kill)  # noqa: B023
        run.pause(moments.uniform(0, 6))
        if run.process.poll() is not None:
            break
        step = run.step()
        run.send(signal.SIGKILL, moments.randrange(hosts))
        print(f"kill {kill + 1} at step {step}", flush=True)
    code = run.end(3600)
    died = len(run.events("died"))
    differ = differences(run, whole) if code == 0 else ["all"]
    differ += [] if died == count else [f"{died} kills, not {count}"]
    return {"kills": died, "hosts": hosts, "code": code, "differ": differ}


def next_step_seconds(run: Launched, attempt: int, since: float) -> float:
    """Seconds from a fault to the first step that was finished after it."""
    run.until(lambda: len(run.events("begin")) > attempt)
    begin = run.events("begin")[-1]["step"]
    run.until(lambda: run.step() > begin)
    return time.time() - since


def faults(place: Path) -> list[dict[str, Any]]:
    """One fault of each kind, on two processes of four devices."""
    train, how = words(60, 10), {"hosts": 2, "devices": 4, "flags": STUCK}
    whole, table = undisturbed(place, train, **how), []

    def told(name: str, run: Launched, since: float, kind: str) -> None:
        begun = len(run.events("begin"))  # none yet where the port was taken
        run.until(lambda: run.events(kind))
        noticed = run.events(kind)[0]["time"] - since if run.events(kind) else float("nan")
        row = {"fault": name, "noticed_seconds": round(noticed, 1)}
        row["next_step_seconds"] = round(next_step_seconds(run, begun, since), 1)
        code = run.end(600)
        table.append(row | {"code": code, "differ": differences(run, whole)})
        print(table[-1], flush=True)

    for name, number, rank, kind in (
        ("dead worker", signal.SIGKILL, 1, "died"),
        ("dead coordinator", signal.SIGKILL, 0, "died"),
        ("stopped worker", signal.SIGSTOP, 1, "stuck"),
    ):
        run = Launched.start(place, name.replace(" ", "-"), *train, **how)
        run.until(lambda: run.step() >= 15)  # noqa: B023
        told(name, run, run.send(number, rank), kind)
    run = Launched.start(place, "skewed", *train, environ={"SKEW": "1:86400"}, **how)
    run.until(lambda: run.step() >= 15)
    told("clock a day ahead, then stopped", run, run.send(signal.SIGSTOP, 1), "stuck")
    run = Launched.start(place, "port", *train, **how)
    with taken_port(run):
        told("coordinator's port taken", run, time.time(), "died")
    asleep = Launched.start(place, "asleep", *train, environ={"ASLEEP": f"1:{12 * 15}:1"}, **how)
    asleep.until(lambda: asleep.step() >= 12)
    told("asleep in Python, step 12 on", asleep, time.time(), "stuck")
    run = Launched.start(place, "supervisor", *train, **how)
    run.until(lambda: run.step() >= 15)
    since = time.time()
    run.process.kill()
    while any(Path(f"/proc/{pid}").exists() for pid in (run.pid(0), run.pid(1))):
        time.sleep(0.05)
    ended = time.time() - since
    again = Launched.start(place, "supervisor", *train, "--resume", **how)
    row = {"fault": "supervisor killed: all saved and ended", "noticed_seconds": round(ended, 1)}
    row["next_step_seconds"] = round(next_step_seconds(again, 1, since), 1)
    table.append(row | {"code": again.end(600), "differ": differences(again, whole)})
    print(table[-1], flush=True)
    return table


@contextmanager
def taken_port(run: Launched) -> Iterator[None]:
    """Holds the port that the processes of a run were told to meet at, before the first of them listens there."""
    supervisor, name = run.process.pid, b"SPANAX_COORDINATOR="
    children, said = Path(f"/proc/{supervisor}/task/{supervisor}/children"), b""
    while name not in said:
        time.sleep(0.01)
        said = b"\0".join(Path(f"/proc/{child}/environ").read_bytes() for child in children.read_text().split())
    address = next(line for line in said.split(b"\0") if line.startswith(name)).removeprefix(name)
    host, _, port = address.decode().rpartition(":")
    with socket.socket() as taken:
        taken.bind((host, int(port)))
        taken.listen()
        yield


def elastic(place: Path) -> dict[str, Any]:
    """One run over changing devices and hosts: bits at each hand-over, and the order of the examples."""
    parts = ((1, 8), (1, 4), (1, 6), (1, 8), (2, 4), (1, 4), (2, 4))
    whole = undisturbed(place, words(10 * len(parts), 10, "--keep", "99"), hosts=1, devices=8)
    same_bits = []
    for part, (hosts, devices) in enumerate(parts):
        train = words(10 * len(parts), 10, "--keep", "99", *(("--resume",) if part else ()))
        size = ("--devices", str(hosts * devices))
        run = Launched.start(place, "elastic", *train, *size, hosts=hosts, devices=devices)
        until = 10 * (part + 1)
        run.until(lambda: run.step() >= until)  # noqa: B023
        if until < 10 * len(parts):
            run.process.send_signal(signal.SIGTERM)
        code = run.end(600)
        step = manifest.steps(run.folder / "checkpoints")[-1]
        begin = run.events("begin")[-1]
        print({"hosts": hosts, "devices": devices, "from": begin["step"], "to": step, "code": code}, flush=True)
        # What this part saved, read by one device and by a mesh of the next part's size.
        same_bits.append(handed_over(run.folder, step, parts[min(part + 1, len(parts) - 1)]))
    return {
        "hand_overs": len(parts) - 1,
        "bit_identical": all(same_bits),
        "examples_identical": examples(run.folder) == examples(whole.folder),
        "largest_relative_difference_of_losses": max(
            abs(a - b) / b for (_, a), (_, b) in zip(losses(run.folder), losses(whole.folder), strict=True)
        ),
    }


def handed_over(folder: Path, step: int, to: tuple[int, int]) -> bool:
    """Whether a step restored onto so many devices has the bits that one device reads."""
    import jax
    import numpy as np

    import spanax
    from spanax.hardware.cluster import local
    from spanax.models.workloads import load

    os.chdir(folder.parent)
    program = load(NAME, batch_size=None, seq_len=None).trace(learning_rate=1e-3, num_steps=1)
    devices = jax.devices()[: to[0] * to[1]]
    plan = spanax.plan(program, local(devices), layout="fsdp")
    run = spanax.restore(program, plan, folder / "checkpoints", step=step, devices=devices)
    one = arrays(folder, step)
    is_key = lambda a: jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key)  # noqa: E731
    found = {path: np.asarray(jax.random.key_data(a) if is_key(a) else a) for path, a in run.arrays().items()}
    return all(found[path].tobytes() == array.tobytes() for path, array in one.items())


def chaos(place: Path, minutes: float, gap_seconds: float, seed: int) -> dict[str, Any]:
    """Faults of all kinds at random moments, until the time is over; then the run may end."""
    moments, hosts = random.Random(seed), 1
    train, how = words(round(minutes * 60 * 32), 50), {"hosts": hosts, "devices": 8, "flags": STUCK}
    whole = undisturbed(place, train, **how)
    run, count = Launched.start(place, "chaos", *train, **how), {}
    kinds: list[str] = []
    until = time.time() + 60 * minutes
    while run.process.poll() is None and time.time() < until:
        run.pause(moments.expovariate(1 / gap_seconds))
        if run.process.poll() is not None or run.pid(0) is None:
            continue
        kinds = kinds or moments.sample(KINDS, len(KINDS))  # no kind twice before each came once
        kind = kinds.pop()
        count[kind] = count.get(kind, 0) + 1
        print(f"{time.time() - run.began:.0f} s, step {run.step()}: {kind}", flush=True)
        if kind == "flip":
            flip(run.folder, moments)
        number = {"stop": signal.SIGSTOP, "preempt": signal.SIGTERM}.get(kind, signal.SIGKILL)
        if kind == "supervisor":
            run.process.kill()
        else:
            run.send(number, moments.randrange(hosts))
        if kind in ("supervisor", "preempt"):
            run.end()
            while Path(f"/proc/{run.pid(0)}").exists():
                time.sleep(0.05)
            run = Launched.start(place, "chaos", *train, "--resume", **how)
            begun = len(run.events("begin"))
            run.until(lambda: len(run.events("begin")) > begun)  # noqa: B023
    code = run.end(3600)
    found = account(run.folder)
    summed = sum(found.seconds.values())
    return {
        "faults": count,
        "code": code,
        "differ": differences(run, whole) if code == 0 else [run.said()[-2000:]],
        "goodput": round(found.goodput, 3),
        "wall_seconds": round(summed, 1),
        "seconds": {bucket: round(seconds, 1) for bucket, seconds in found.seconds.items()},
    }


def flip(folder: Path, moments: random.Random) -> None:
    """Turn one bit of one file of the newest checkpoint around."""
    steps = manifest.steps(folder / "checkpoints")
    if len(steps) < 2:
        return
    files = [path for path in (folder / "checkpoints" / str(steps[-1])).rglob("*") if path.is_file()]
    with open(moments.choice([path for path in files if path.stat().st_size]), "r+b") as file:
        at = moments.randrange(file.seek(0, os.SEEK_END))
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << moments.randrange(8)]))


def main() -> None:
    """Run one campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaign", choices=["kills", "faults", "elastic", "chaos"])
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--gap", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        if args.campaign == "kills":
            result: Any = kills(place, args.count, args.hosts, args.seed)
        elif args.campaign == "chaos":
            result = chaos(place, args.minutes, args.gap, args.seed)
        else:
            result = (faults if args.campaign == "faults" else elastic)(place)
    print(json.dumps(result))
    rows = result if isinstance(result, list) else [result]
    is_good = all(not row.get("differ") and row.get("code", 0) == 0 for row in rows)
    sys.exit(not (is_good and all(row.get("bit_identical", True) for row in rows)))


if __name__ == "__main__":
    main()
