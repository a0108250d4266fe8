"""Processes that do not take the same steps end with one error, within seconds."""

import os
import subprocess
import sys

import pytest

from spanax.launch.local import free_port
from spanax.processes.lockstep import Place, conflict

SCRIPT = """
import sys
import numpy as np, optax, spanax
from flax import nnx

rank = spanax.distributed().process_index
is_longer, what = rank == int(sys.argv[1]), sys.argv[2]
model = nnx.Linear(4, 8, rngs=nnx.Rngs(1))
optimizer = nnx.Optimizer(model, optax.sgd(0.05), wrt=nnx.Param)

@spanax.jit(layout="fsdp")
def train_step(model, optimizer, batch):
    loss, gradients = nnx.value_and_grad(lambda model: (model(batch["x"]) ** 2).mean())(model)
    optimizer.update(model, gradients)
    return loss

def rows(step):
    if what == "an error" and not is_longer and step == 4:
        raise ValueError("no such shard")
    size = 2 if what == "a smaller batch" and is_longer and step == 4 else 4
    return np.full((size, 4), 1 + rank + step, "float32")

for step in range(6 if what == "one more" and is_longer else 5):
    float(train_step(model, optimizer, spanax.local_batch({"x": rows(step)})))
print("the last step", flush=True)
"""

MISSING = "process {0} has ended, and process {1} waits for it in `train_step` of x float32[8, 4]."
SMALLER = "process 1 is in `train_step` of x float32[8, 4], and process 0 waits for it in the comparison of a batch."


@pytest.mark.parametrize(
    ("longer", "what", "message"),
    [
        (0, "one more", MISSING.format(1, 0)),
        pytest.param(1, "one more", MISSING.format(0, 1), marks=pytest.mark.slow),
        pytest.param(0, "a smaller batch", SMALLER, marks=pytest.mark.slow),
        pytest.param(1, "an error", MISSING.format(0, 1), marks=pytest.mark.slow),
    ],
)
def test_processes_that_wait_in_vain_end_with_one_error(longer: int, what: str, message: str) -> None:
    group = {
        "SPANAX_COORDINATOR": f"127.0.0.1:{free_port('127.0.0.1')}",
        "SPANAX_NUM_HOSTS": "2",
        "SPANAX_HOST_DEVICES": "2",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(longer), what],
            env=os.environ | group | {"SPANAX_HOST": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        first = processes[1 - longer]
        assert first.stdout is not None
        while what == "one more" and "the last step" not in first.stdout.readline():
            assert first.poll() is None
        errors = [process.communicate(timeout=280)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [1 if what == "an error" else 70, 70], errors
    more = "where: no such shard" if what == "an error" else "fix: the same steps on every process"
    assert f"spanax: {message} [SPX604]\n  {more}" in errors[1], errors
    assert f"spanax: {message} [SPX604]" in errors[0] or "ValueError: no such shard" in errors[0], errors


def test_only_a_process_that_waits_in_vain_is_an_error() -> None:
    step, save = "`step`", "a save"
    for places in (
        {},
        {0: Place(4, step), 1: Place(4, step)},
        {0: Place(4, step), 1: Place(5, save)},  # their results may still be computed
        {0: Place(3, step, has_ended=True), 1: Place(3, step)},
        {0: Place(5, save, has_ended=True), 1: Place(4, step)},
        {0: Place(5, save, has_ended=True), 1: Place(4, step, has_ended=True)},
    ):
        assert conflict(places) is None
    behind = {0: Place(9, save, has_ended=True), 1: Place(4, step), 2: Place(3, step, has_ended=True)}
    assert "process 2 has ended, and process 1 waits for it in `step`." in str(conflict(behind))
    assert "process 1 is in a save, and process 0 waits" in str(conflict({0: Place(4, step), 1: Place(4, save)}))
