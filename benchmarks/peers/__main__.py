"""Spanax beside its peers: the same GPT, data and optimizer, each in a process of its own, steps taken in turn.

A ratio is the median over rounds of one peer's step time over the reference's in the same round; the range is that of
the middle half. A peer that did not do the same work (parameters, tokens, matmul FLOPs, losses) gets no ratio, and the
whole ends with 1; one that is not installed is listed as such.

    python benchmarks/peers [--rounds 20] [--only spanax hand torch] [--num-layers 6 ...] [--json]
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from alike import differences
from shape import Shape, shape_of, with_shape

HERE = Path(__file__).resolve().parent
TORCH_PYTHON = HERE.parents[1] / ".venv-peers" / "bin" / "python"
"""Made by `make bench-peers`: PyTorch and transformers, in an environment of their own; else this one's are taken."""

REFERENCE = "hand-written JAX, 1 device"
OWN_FACTS = ("to_first_step_seconds", "first_step_seconds", "peak_bytes", "devices", "versions")

PEERS: dict[str, tuple[str, ...]] = {
    REFERENCE: ("by_hand.py",),
    "hand-written JAX, 1 device, scanned": ("by_hand.py", "--scan"),
    "hand-written JAX, 2 devices": ("by_hand.py", "--devices", "2"),
    "hand-written JAX, fsdp 8": ("by_hand.py", "--devices", "8", "--layout", "fsdp"),
    "spanax, 1 device": ("with_spanax.py",),
    "spanax, 1 device, scanned": ("with_spanax.py", "--scan"),
    "spanax, 2 devices": ("with_spanax.py", "--devices", "2"),
    "spanax, fsdp 8": ("with_spanax.py", "--devices", "8", "--layout", "fsdp"),
    "nnx.jit loop, 1 device": ("nnx_loop.py",),
    "nnx.jit loop, 2 devices": ("nnx_loop.py", "--devices", "2"),
    "nnx.jit loop, fsdp 8": ("nnx_loop.py", "--devices", "8", "--layout", "fsdp"),
    "PyTorch eager": ("with_torch.py",),
    "PyTorch compiled": ("with_torch.py", "--mode", "compiled"),
    "PyTorch DDP, 2 processes": ("with_torch.py", "--mode", "ddp", "--devices", "2"),
    "PyTorch FSDP2, 2 processes": ("with_torch.py", "--mode", "fsdp2", "--devices", "2"),
    "Hugging Face Trainer": ("with_trainer.py",),
}


NONE: Mapping[str, str] = MappingProxyType({})


class PeerDied(Exception):
    """A peer ended before it was told to; its last words."""


@dataclass
class Peer:
    """One peer that runs, waiting for its next step.

    Attributes:
      name: its name in the table.
      process: what trains.
      log: what it writes beside its answers.
      facts: what it said of itself.
      seconds: its steps, one a round.
      losses: of its steps, the first one among them.
    """

    name: str
    process: subprocess.Popen[str]
    log: IO[str]
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @staticmethod
    def start(
        name: str, words: Sequence[str], shape_flags: Sequence[str], variables: Mapping[str, str] = NONE
    ) -> "Peer | str":
        """A peer that has taken its first step, with variables of its own; or why there is none."""
        needs_torch = words[0] in ("with_torch.py", "with_trainer.py")
        python = str(TORCH_PYTHON) if needs_torch and TORCH_PYTHON.exists() else sys.executable
        if needs_torch and python == sys.executable and not find_spec("torch"):
            return "not installed: make bench-peers"
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive", **variables, "PEER_BEGAN": str(time.time())}
        environment["PYTHONPATH"] = str(HERE.parents[1] / "src")
        log = tempfile.TemporaryFile("w+")  # a pipe that nobody reads would stop who writes much
        process = subprocess.Popen(
            [python, str(HERE / words[0]), *words[1:], *shape_flags],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
        )  # fmt: skip
        peer = Peer(name, process, log)
        try:
            peer.facts = peer.heard()
        except PeerDied as error:
            return str(error)
        peer.losses.append(peer.facts["loss"])
        return peer

    def ask(self, word: str) -> dict[str, Any]:
        """What it answers."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(word + "\n")
            self.process.stdin.flush()
        return self.heard()

    def heard(self) -> dict[str, Any]:
        """The next line that it says.

        Raises:
          PeerDied: there is none.
        """
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return json.loads(line)
        code = self.process.wait()
        self.log.seek(0)
        said = self.log.read().strip().splitlines()
        self.end()
        raise PeerDied(f"failed: {said[-1][:160] if said else code}")

    def count_work(self) -> None:
        """Have it count what a step computes."""
        self.facts["flops"] = self.ask("work")["flops"]

    def step(self, *, counts: bool) -> None:
        """Take one step."""
        answer = self.ask("step")
        self.losses.append(answer["loss"])
        self.facts["peak_bytes"] = answer["peak_bytes"]
        if counts:
            self.seconds.append(answer["seconds"])

    def end(self) -> None:
        """Let it go."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.log.close()


def measure(
    names: Sequence[str], shape_flags: Sequence[str], rounds: int, words: Mapping[str, Sequence[str]] = PEERS
) -> tuple[list[Peer], dict[str, str]]:
    """All peers that can be had, with a step of each in every round, and why the others cannot; `words` starts each."""
    peers, absent = [], {}
    for name in names:
        made = Peer.start(name, words[name], shape_flags)
        if isinstance(made, str):
            absent[name] = made
        else:
            peers.append(made)
        print(f"{name}: {made if isinstance(made, str) else 'ready'}", file=sys.stderr, flush=True)
    turns(peers, absent, Peer.count_work)
    for turn in range(-2, rounds):
        # Each goes first in turn; two rounds are for caches.
        turns(peers, absent, partial(Peer.step, counts=turn >= 0), turn)
    return peers, absent


def turns(peers: list[Peer], absent: dict[str, str], act: Callable[[Peer], None], first: int = 0) -> None:
    """Have each peer act, some other one first each time; those that die are taken out, and are absent."""
    for peer in [peers[(first + place) % len(peers)] for place in range(len(peers))]:
        try:
            act(peer)
        except PeerDied as error:
            absent[peer.name] = str(error)
            peers.remove(peer)


def quartiles(peer: Peer, reference: Peer) -> list[float]:
    """Those of one peer's step time over the reference's in the same round."""
    found = [mine / theirs for mine, theirs in zip(peer.seconds, reference.seconds, strict=True)]
    return statistics.quantiles(found * 2 if len(found) == 1 else found, n=4)


def row(peer: Peer, reference: Peer) -> dict[str, Any]:
    """One line of the table."""
    low, median, high = quartiles(peer, reference)
    seconds = statistics.median(peer.seconds)
    return {
        "peer": peer.name, "ratio": median, "low": low, "high": high, "step_seconds": seconds,
        "tokens_per_second": peer.facts["tokens"] / seconds,
    } | {name: peer.facts[name] for name in OWN_FACTS}  # fmt: skip


def table(rows: Sequence[dict[str, Any]], absent: dict[str, str]) -> str:
    """The rows as a table in Markdown."""
    lines = [
        "| peer | ratio (middle half) | s a step | tokens/s | to the first step, s | first step, s | peak, MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in rows:
        lines.append(
            f"| {one['peer']} | {one['ratio']:.3f} ({one['low']:.3f} to {one['high']:.3f}) | {one['step_seconds']:.3f} "
            f"| {one['tokens_per_second']:,.0f} | {one['to_first_step_seconds']:.1f} | {one['first_step_seconds']:.1f} "
            f"| {one['peak_bytes'] / 2**20:,.0f} |"
        )
    return "\n".join([*lines, *(f"| {name} | {why} | | | | | |" for name, why in absent.items())])


def rounds(word: str) -> int:
    """A number of rounds, as a command takes it."""
    if (count := int(word)) < 1:
        raise argparse.ArgumentTypeError(f"{count} rounds measure nothing; it takes 1 or more")
    return count


def main() -> None:
    """Measure them all."""
    described = argparse.ArgumentParser(
        prog="python benchmarks/peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser = with_shape(described)
    parser.add_argument("--rounds", type=rounds, default=20)
    parser.add_argument("--only", nargs="*", default=[], help="parts of names")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    shape: Shape = shape_of(args)
    names = [name for name in PEERS if not args.only or name == REFERENCE or any(part in name for part in args.only)]
    flags = [word for name in vars(shape) for word in (f"--{name.replace('_', '-')}", str(getattr(shape, name)))]
    peers, absent = measure(names, flags, args.rounds)
    for peer in peers:
        peer.end()
    if not peers or peers[0].name != REFERENCE:
        sys.exit(f"{REFERENCE} did not run: {absent}")
    others = differences({peer.name: peer.facts | {"losses": peer.losses} for peer in peers})
    absent |= {name: f"other work: {what}" for name, what in others.items()}
    rows = [row(peer, peers[0]) for peer in peers if peer.name not in others]
    if args.json:
        for one in rows:
            print(json.dumps(one))
        for name, why in absent.items():
            print(json.dumps({"peer": name, "absent": why}))
    else:
        print(table(rows, absent))
        print(f"\n{vars(shape)}, {args.rounds} rounds, {os.cpu_count()} cores, {platform.platform()}")
    if others:
        sys.exit(f"not the same work as {REFERENCE}: {', '.join(others)}")


if __name__ == "__main__":
    main()
