"""Commands on a terminal: wide, narrow, dumb, and resized while they run."""

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from sampling import sampled
from spanax.show.live.events import reporter

WEIGHTS = Path(__file__).parent / "interop" / "weights" / "gpt2"
WIDE, NARROW = 120, 40
HANG_SECONDS = 240

WORKLOAD = """
import os, time
import numpy as np
import spanax
from spanax.models import gpt

class Examples:
    # With RESIZED in the environment, steps wait until the test has resized the terminal.
    def __len__(self):
        return 64

    def __getitem__(self, index):
        while os.environ.get("RESIZED") and not os.path.exists(os.environ["RESIZED"]):
            time.sleep(0.01)
        ids = np.random.default_rng(int(index)).integers(0, 16, 9, dtype="int32")
        return {"inputs": ids[:-1], "targets": ids[1:]}

def tiny(batch_size=4, seq_len=8):
    config = gpt.GPTConfig(16, seq_len, num_layers=1, num_heads=2, embed_dim=8)
    return spanax.Workload(build=lambda rngs: gpt.GPT(config, rngs), batch=gpt.example_batch(batch_size, seq_len),
                           loss=gpt.loss, source=Examples(), num_steps=3)
"""

CHILD = """
import fcntl, json, os, sys, termios, traceback
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that it receives SIGWINCH
import spanax
from spanax.__main__ import main
spanax.simulate(2)  # before `import`, which starts JAX with one device
for line in iter(sys.stdin.readline, ""):
    asked, code = json.loads(line), 0
    os.environ.update(asked["environ"])
    sys.argv = ["spanax", *asked["args"]]
    try:
        main()
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    print(f"EXIT {code}", flush=True)
"""


class Verb(NamedTuple):
    """A command line, with `{out}` for a new path, and the pattern of the last text that it prints."""

    args: str
    last: str


TRAIN = "train tiny.py:tiny --steps 3 --layout data --output-dir {out}"
VERBS = {
    "train": Verb(
        f"{TRAIN} --devices 2", r"to resume for longer.* over \d+ steps: spanax train --output-dir \S+ --resume"
    ),
    "launch": Verb(f"launch local --processes 2 --devices-per-process 1 -- {TRAIN}", r"done: 3 steps in"),
    "plan": Verb("plan tiny.py:tiny --on cpu:2", r"layouts priced in"),
    "compare": Verb("compare tiny.py:tiny --devices 2 --mesh data=2 --top 1 --steps 1", r"rank correlation .*none"),
    "probe": Verb("probe --devices 2 --seconds 0.1 --out {out}.toml", r"measured; spanax plan"),
    "check": Verb("check tiny.py:tiny --on cpu:2 --layout data --level 1", r"no findings|SPX"),
    "import": Verb(f"import {WEIGHTS} --as gpt2 --output-dir {{out}}", r"gpt2: \S+ \S+ parameters"),
    "export": Verb("export weights --as gpt2 --output-dir {out}", r"gpt2: \S+ \S+ parameters"),
}


def resize(terminal: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


@dataclass
class Session:
    """A process on a terminal that carries out one command line after the other: JAX is imported once."""

    folder: Path
    terminal: int
    num_runs: int = 0

    def run(self, args: str, *, columns: int, term: str = "xterm-256color", then: int | None = None) -> tuple[int, str]:
        """The exit code and output of a command; `then` resizes the terminal once the progress bar is drawn."""
        self.num_runs += 1
        out, resized = f"out{self.num_runs}", self.folder / f"resized{self.num_runs}"
        environ = {"TERM": term, "RESIZED": str(resized) if then else ""}
        resize(self.terminal, columns)
        asked = {"args": args.format(out=out).split(), "environ": environ}
        os.write(self.terminal, json.dumps(asked).encode() + b"\n")
        output = b""
        while not (ended := re.search(rb"EXIT (\d+)\r\n", output)):
            if then and not resized.exists() and b"0/?" in output:
                resize(self.terminal, then)
                resized.touch()
            assert select.select([self.terminal], [], [], HANG_SECONDS)[0], f"no output: {output[-4000:].decode()}"
            output += os.read(self.terminal, 1 << 16)
        return int(ended[1]), output[: ended.start()].decode()


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    folder = tmp_path_factory.mktemp("terminal")
    (folder / "tiny.py").write_text(WORKLOAD)
    terminal, theirs = pty.openpty()
    modes = termios.tcgetattr(theirs)
    modes[3] &= ~termios.ECHO
    termios.tcsetattr(theirs, termios.TCSANOW, modes)
    environ = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS", "LINES")}
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], cwd=folder, env=environ, stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True,
    ) as process:  # fmt: skip
        os.close(theirs)
        yield Session(folder, terminal)
        process.kill()
    os.close(terminal)


def lines(output: str) -> list[str]:
    """The lines that were drawn, without the sequences that move the cursor and set colors."""
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output))


def live(output: str) -> list[str]:
    """The lines of a progress bar."""
    return [line for line in lines(output) if re.match(r" *\d+/(\d+|\?) ", line)]


def read_to_end(terminal: int) -> str:
    output = b""
    try:
        while part := os.read(terminal, 1 << 16):
            output += part
    except OSError:  # what Linux raises when the other side has closed
        pass
    return output.decode()


STEP = {
    "event": "step", "step": 15, "loss": 2.4512345, "tokens_per_second": 123456.0, "step_seconds": 0.0312,
    "data_wait_seconds": 0.01, "learning_rate": 3e-4, "accuracy": 0.62512, "perplexity": 11.6, "aux_loss": 0.013,
}  # fmt: skip
NUMBERS = (
    "loss 2.4512  123 k tokens/s  learning_rate 0.0003  accuracy 0.6251  perplexity 11.6  aux_loss 0.013  0.031 s  "
    "data wait 0.0 s"
)


@pytest.mark.parametrize("columns", [40, 80, 120, 200])
def test_a_progress_bar_shows_the_numbers_that_fit(columns: int) -> None:
    terminal, theirs = pty.openpty()
    resize(terminal, columns)
    start = {"event": "start", "step": 0, "steps": 20000, "workload": "", "parameters": 1, "layout": "", "mesh": {}}
    with ThreadPoolExecutor(1) as pool:
        output = pool.submit(read_to_end, terminal)
        with os.fdopen(theirs, "w") as stream, reporter(as_json=False, stream=stream) as emit:
            emit(start | {"why": "", "state_bytes_per_device": 1, "out": ""})
            emit(STEP)
    bar = live(output.result())[-1].rstrip()
    os.close(terminal)
    head, loss, others = bar.partition("loss")
    assert "15/20000" in head and "0:00:00" in head and len(bar) <= columns
    shown = f"{loss}{others}  "
    assert "…" not in bar and (columns == 40 or f"{NUMBERS}  ".startswith(shown)), "a number is cut"
    assert loss == "" if columns == 40 else (shown.strip() == NUMBERS) == (columns == 200)


def test_standard_error_in_a_file_is_not_redirected(capsys: pytest.CaptureFixture[str]) -> None:
    terminal, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream, reporter(as_json=False, stream=stream):
        print("a warning", file=sys.stderr)
    os.close(terminal)
    assert capsys.readouterr().err == "a warning\n"


CASES = [(name, mode) for name in VERBS if name != "launch" for mode in ("wide", "narrow", "dumb")]
CASES += [("train", "resized"), ("launch", "resized"), ("launch", "dumb")]


QUICK = [
    *(("train", mode) for mode in ("dumb", "resized")),
    *((verb, "narrow") for verb in ("plan", "check", "import")),
    *((verb, "dumb") for verb in ("probe", "export")),
]
"""Every mode, and every verb but the slowest two, `launch` and `compare`."""


@pytest.mark.parametrize("name, mode", sampled(CASES, QUICK))
def test_a_command_on_a_terminal(name: str, mode: str, session: Session) -> None:
    args, last = VERBS[name]
    if name == "export" and not (session.folder / "weights").exists():
        assert session.run(f"import {WEIGHTS} --as gpt2 --output-dir weights", columns=WIDE)[0] == 0
    code, output = session.run(
        args,
        columns=NARROW if mode == "narrow" else WIDE,
        term="dumb" if mode == "dumb" else "xterm-256color",
        then=NARROW if mode == "resized" else None,
    )
    end = output[-4000:]
    assert code == 0 and "Traceback" not in output, end
    assert re.search(last, " ".join(lines(output))), end
    if mode == "dumb":
        assert "\x1b" not in output, end
    if name == "compare":
        assert mode == "dumb" or re.search(r"\d+ s: (compiling|step) 1 of 1", " ".join(lines(output))), end
    if name in ("train", "launch"):
        bars = live(output)
        if mode == "dumb":
            assert not bars and "step 3  loss" in output, end
        else:
            assert "0/?" in bars[0] and "3/3" in bars[-1] and "loss" in bars[-1], end
            assert len(bars[0]) == (NARROW if mode == "narrow" else WIDE), end
            assert len(bars[-1]) == (WIDE if mode == "wide" else NARROW), end
