"""Errors that user code raises: one line, the user's frames, and an exit code of their own."""

import operator
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import pytest

from spanax import cli
from spanax.errors import MISTAKE

FILE = """\
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import spanax


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def loss(model, batch):
    y = model(batch["x"])
    return (y**2).mean()


class Rows:
    def __iter__(self):
        for _ in range(9):
            yield {"x": self.read()}

    def read(self):
        return np.ones((16, 8), np.float32)


def optimizer(learning_rate, num_steps):
    return optax.sgd(learning_rate)


workload = spanax.Workload(
    build=Net,
    batch={"x": jax.ShapeDtypeStruct((16, 8), "float32")},
    loss=loss,
    optimizer=optimizer,
    source=Rows(),
    num_steps=2,
)
"""
"""A correct workload; each mistake replaces one of its lines."""


@dataclass(frozen=True)
class Mistake:
    """A wrong line, and what is printed for it.

    Attributes:
      right: the line of FILE that is replaced.
      wrong: the new text.
      error: the type of the exception.
      shown: a source line that the innermost frame shows.
      is_planned: whether `spanax plan` raises it too.
    """

    right: str
    wrong: str
    error: str
    shown: str
    is_planned: bool = True


RETURN = "    return (y**2).mean()"
READ = "        return np.ones((16, 8), np.float32)"
LAYERS = "        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])"
PLAIN_LIST = "        self.layers = [nnx.Linear(8, 8, rngs=rngs) for _ in range(2)]"

MISTAKES = {
    "NumPy in the loss": Mistake(RETURN, "    return np.mean(np.log(y))", "TracerArrayConversionError", "np.log(y)"),
    "a branch on a traced value": Mistake(
        RETURN, "    return y.sum() if y.sum() > 0 else y.mean()", "TracerBoolConversionError", "if y.sum() > 0"
    ),
    "a plain list of modules": Mistake(LAYERS, PLAIN_LIST, "ValueError", "self.layers = [nnx.Linear"),
    "an error in the loss": Mistake(RETURN, '    return y[batch["label"]].mean()', "KeyError: 'label'", "batch["),
    "shapes that do not match": Mistake(RETURN, "    return (y @ y).mean()", "TypeError", "return (y @ y)"),
    "an error in build": Mistake(
        LAYERS, '        raise RuntimeError("no weights")', "RuntimeError: no weights", "raise RuntimeError"
    ),
    "a broken pipe in build": Mistake(LAYERS, "        raise BrokenPipeError(32, 'gone')", "BrokenPipeError", "raise"),
    "an error in the optimizer": Mistake(
        "    return optax.sgd(learning_rate)", "    return optax.sgdd(learning_rate)", "AttributeError", "optax.sgdd"
    ),
    "an error in the loader": Mistake(
        READ, '        raise OSError("no such shard\\nsecond line")', "OSError: no such shard", "raise OSError", False
    ),
    "a syntax error": Mistake(RETURN, "    return (y**2.mean()", "SyntaxError", "return (y**2.mean()"),
    "a missing name": Mistake("    loss=loss,", "    loss=los,", "NameError: name 'los' is not defined", "loss=los"),
    "a missing module": Mistake("import optax", "import optax, nowhere", "ModuleNotFoundError", "optax, nowhere"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for name in sys.modules.keys() - modules:
        if getattr(sys.modules[name], "__file__", None) == str(tmp_path / f"{name}.py"):
            del sys.modules[name]


def answer(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int | str | None, str]:
    with pytest.raises(SystemExit) as stop:
        cli.main(args)
    return stop.value.code, capsys.readouterr().err


COMMANDS = {
    "train": ("train", "mine.py:workload", "--output-dir", "run", "--steps", "2"),
    "plan": ("plan", "mine.py:workload", "--on", "cpu:8"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_the_users_frames(
    name: str, command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mistake = MISTAKES[name]
    if command == "plan" and not mistake.is_planned:
        pytest.skip("plan reads no data")
    assert FILE.count(mistake.right) == 1
    text = FILE.replace(mistake.right, mistake.wrong)
    Path("mine.py").write_text(text)
    code, err = answer(capsys, *COMMANDS[command])
    first, *frames, last = err.rstrip().splitlines()
    assert code == MISTAKE, err
    assert first.startswith("spanax: ") and mistake.error in first
    assert "--traceback" in last
    assert len(frames) % 2 == 0 and 2 <= len(frames) <= 8
    for place, source in zip(frames[::2], frames[1::2], strict=True):
        line = place.removeprefix('  File "mine.py", line ').partition(",")[0]
        assert text.splitlines()[int(line) - 1].strip() == source.strip()
    assert mistake.shown in frames[-1]
    if command == "plan":
        code, err = answer(capsys, *COMMANDS[command], "--traceback")
        assert code == MISTAKE and "Traceback (most recent call last)" in err
        assert "cli.py" in err and mistake.error.partition(":")[0] in err


def test_other_files_and_recursion(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "models").mkdir()
    (folder / "models" / "deep.py").write_text("def depth(n):\n    return depth(n + 1) + 1\n")
    call = "    from models.deep import depth\n    return depth(0)"
    Path("mine.py").write_text(FILE.replace(RETURN, call))
    code, err = answer(capsys, *COMMANDS["plan"])
    lines = err.splitlines()
    assert code == MISTAKE and "RecursionError" in lines[0] and len(lines) < 40
    assert '  File "mine.py", line 23, in loss' in lines and '  File "models/deep.py", line 2, in depth' in lines
    assert "frames omitted" in err


def test_an_error_of_spanax_shows_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verb = replace(cli.COMMANDS["axes"], answer=partial(operator.truediv, 1))
    monkeypatch.setitem(cli.COMMANDS, "axes", verb)
    code, err = answer(capsys, "axes", "gpt-nano")
    assert code == 70 and err.startswith("Traceback") and "TypeError: unsupported operand" in err
    assert "report the traceback" in err.splitlines()[-1]


def test_an_error_of_spanax_below_user_code(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(FILE.replace(RETURN, "    return spanax.errors.nearest('x', None)"))
    code, err = answer(capsys, *COMMANDS["plan"])
    assert code == 70 and err.startswith("Traceback") and "errors.py" in err
    Path("mine.py").write_text(FILE.replace("    loss=loss,", "    loss=loss, los=loss,"))
    code, err = answer(capsys, *COMMANDS["plan"])
    assert code == MISTAKE and "unexpected keyword argument 'los'" in err, "the call is the user's"


def test_the_traceback_of_a_refused_request(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(FILE.replace(LAYERS, LAYERS + "\n        float(self.layers[0].kernel[0, 0])"))
    code, err = answer(capsys, *COMMANDS["plan"])
    assert code == 2 and "eager_build=True" in err and "Traceback" not in err
    code, err = answer(capsys, *COMMANDS["plan"], "--traceback")
    assert code == 2 and "ConcretizationTypeError" in err and "eager_build=True" in err


def test_a_loader_that_raises_in_a_worker_process(folder: Path) -> None:
    Path("mine.py").write_text(FILE.replace(READ, '        raise OSError("no such shard")'))
    done = subprocess.run([sys.executable, "-m", "spanax", *COMMANDS["train"]], capture_output=True, text=True)
    assert done.returncode == MISTAKE and "spanax: OSError: no such shard" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("full", "shown"), [(False, "spanax: OSError: gone\n"), (True, "Traceback")])
def test_a_process_of_a_group_ends_at_once(
    full: bool, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as stop:
        try:
            raise OSError("gone")
        except OSError as error:
            cli.leave(error, full=full)
    assert stop.value.code == MISTAKE and capsys.readouterr().err.startswith(shown)
