"""What is printed when the process ends while XLA compiles."""

import subprocess
import sys
from pathlib import Path

import pytest

# One process imports Spanax; for every case it forks one that ends.
SCRIPT = """
import os
import sys
import traceback
from types import SimpleNamespace
from spanax.hardware.mesh import MeshShape
from spanax.step.compiled_function import compile_notice

for number, (axes, first, second, _) in enumerate({cases}):
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1], "it ended without an error"
        continue
    os.dup2(os.open(f"{{number}}.txt", os.O_WRONLY | os.O_CREAT), 2)
    plan = SimpleNamespace(mesh=MeshShape.of(axes), title="fsdp on fsdp=8")
    try:
        with compile_notice("`update`", plan):
            exec(first)
        exec(second)
    except ValueError:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
"""

CASES = [
    ({"fsdp": 8}, "os.abort()", "", True),
    ({"fsdp": 8}, "os.kill(os.getpid(), 9)", "", True),
    ({"fsdp": 8}, "pass", "os.abort()", False),
    ({"fsdp": 8}, "raise ValueError", "", False),
    ({"fsdp": 1}, "os.abort()", "", False),
]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What each case prints to stderr, also after its process ended."""
    folder: Path = tmp_path_factory.mktemp("ended")
    # It returns when the last that could still print has closed the pipe.
    subprocess.run([sys.executable, "-c", SCRIPT.format(cases=CASES)], cwd=folder, stdout=subprocess.PIPE, check=True)
    return [(folder / f"{number}.txt").read_text() for number in range(len(CASES))]


@pytest.mark.parametrize(
    "number", range(len(CASES)), ids=[f"{first} {second}".strip() for _, first, second, _ in CASES]
)
def test_a_fatal_error_of_the_compiler_is_explained(number: int, printed: list[str]) -> None:
    has_notice = CASES[number][-1]
    assert ("the process ended while XLA compiled `update`. [SPX606]" in printed[number]) == has_notice
    assert ("layout fsdp on fsdp=8" in printed[number]) == has_notice
