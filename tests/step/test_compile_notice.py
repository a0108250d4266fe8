"""What is printed when the process ends while XLA compiles."""

import subprocess
import sys

import pytest

SCRIPT = """
import os
from types import SimpleNamespace
from spanax.hardware.mesh import MeshShape
from spanax.step.compiled_function import compile_notice

plan = SimpleNamespace(mesh=MeshShape.of({axes}), title="fsdp on fsdp=8")
with compile_notice("`update`", plan):
    {first}
{second}
"""


@pytest.mark.parametrize(
    "axes, first, second, has_notice",
    [
        ({"fsdp": 8}, "os.abort()", "", True),
        ({"fsdp": 8}, "os.kill(os.getpid(), 9)", "", True),
        ({"fsdp": 8}, "pass", "os.abort()", False),
        ({"fsdp": 8}, "raise ValueError", "", False),
        ({"fsdp": 1}, "os.abort()", "", False),
    ],
)
def test_a_fatal_error_of_the_compiler_is_explained(
    axes: dict[str, int], first: str, second: str, has_notice: bool
) -> None:
    code = SCRIPT.format(axes=axes, first=first, second=second)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode
    assert ("the process ended while XLA compiled `update`. [SPX606]" in ended.stderr) == has_notice
    assert ("layout fsdp on fsdp=8" in ended.stderr) == has_notice
