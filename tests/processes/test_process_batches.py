"""Batches of a loader in two processes, which torchrun's variables describe."""

import json
import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

import spanax
from spanax.errors import SpanaxError

SCRIPT = """
import json
import numpy as np, optax
import spanax
from flax import nnx

group = spanax.distributed()
assert spanax.distributed() == group
import jax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec as P
from spanax.processes import process_batches

rank = group.process_index
assert (rank, group.process_count) == (jax.process_index(), jax.process_count())
result, errors = {"count": group.process_count, "devices": jax.device_count()}, []

def raised(call, *args):
    try:
        call(*args)
    except spanax.SpanaxError as error:
        errors.append(str(error))

def values(array):
    replicated = NamedSharding(array.sharding.mesh, P())
    return np.asarray(jax.jit(lambda x: x, out_shardings=replicated)(array)).tolist()

rows = np.arange(12, dtype="int64").reshape(6, 2)
mine = rows[3 * rank : 3 * rank + 3]
# Three rows on two devices of a process: every device has all of them.
result["three"] = values(spanax.local_batch({"x": mine})["x"])
result["four"] = values(spanax.local_batch(np.repeat(mine, 2, 0)[:4]))
reverse = jax.sharding.Mesh(np.array(jax.devices()[::-1]), ("data",))
moved = spanax.local_batch(np.repeat(mine, 2, 0)[:4], NamedSharding(reverse, P("data")))
result["reverse"] = values(moved)
places = moved.sharding.devices_indices_map((8, 2)).items()
result["first row on"] = next(device.process_index for device, index in places if not index[0].start)
straight = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
result["straight"] = values(spanax.local_batch(np.repeat(mine, 2, 0)[:4], NamedSharding(straight, P("data"))))

example = {"x": jax.ShapeDtypeStruct((4,), "int32", sharding=NamedSharding(straight, P("data")))}
read = spanax.batches([{"x": i} for i in range(40)], example, seed=5)
result["batches"] = [values(batch["x"]) for batch in read]

raised(spanax.local_batch, {"x": rows, "y": 0 * rows})
raised(spanax.local_batch, {"x": rows.reshape(4, 3)[: 2 + rank]})
raised(spanax.local_batch, np.float32(3))
raised(spanax.local_batch, moved)
zeros = spanax.local_batch(np.zeros((5, 2)))  # the same everywhere, as in a benchmark

program = spanax.trace(
    build=lambda rngs: nnx.Linear(4, 8, rngs=rngs), optimizer=optax.sgd(0.05), batch=np.zeros((8, 4), "float32"),
    loss=lambda model, x: (model(x) ** 2).mean(),
)
run = spanax.start(program, spanax.plan(program, spanax.local(), layout="fsdp"), seed=1)
x = np.random.default_rng(0).standard_normal((8, 4)).astype("float32")
result["losses"] = [float(run.step(x)["loss"]), float(run.step(spanax.local_batch(x[4 * rank : 4 * rank + 4]))["loss"])]
run.step(x)
raised(run.evaluate, x + rank)  # the third batch on the host: not compared, the fourth is
raised(run.step, x + rank)
if rank == 0:
    process_batches.AGREEMENT_SECONDS = 1
    raised(process_batches.verdict, "alone", lambda texts: "")
print(json.dumps(result | {"errors": errors}), flush=True)
multihost_utils.sync_global_devices("both have printed")
if rank == 1:
    raise spanax.DataError("damaged")
import multiprocessing
multiprocessing.Event().wait(600)
"""


def test_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # torchrun listens on MASTER_PORT itself.
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port - 1), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    group |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "SPANAX_HOST_DEVICES": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env=os.environ | group | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        out, err = processes[1].communicate(timeout=400)
        # It ends at once, while the other one waits; JAX would abort both after minutes.
        assert (processes[1].returncode, processes[0].poll()) == (65, None), out + err
        assert "DataError: damaged" in err
    finally:
        processes[0].kill()
        first_out, first_err = processes[0].communicate(timeout=400)
    # Gloo prints, too, and blank lines.
    results = [json.loads(line) for text in (first_out, out) for line in text.splitlines() if line.startswith("{")]
    assert len(results[0]["errors"]) == 6, (results, first_err)
    errors = [result.pop("errors") for result in results]
    alone = errors[0].pop()
    assert "did not compare their batches" in alone
    assert results[0] == results[1] and errors[0] == errors[1]
    assert (results[0]["count"], results[0]["devices"], results[0]["first row on"]) == (2, 4, 1)
    rows = np.arange(12).reshape(6, 2)
    four = np.concatenate([np.repeat(rows[:3], 2, 0)[:4], np.repeat(rows[3:], 2, 0)[:4]]).tolist()
    assert results[0]["three"] == rows.tolist()
    assert results[0]["four"] == results[0]["reverse"] == results[0]["straight"] == four
    alone_read = spanax.batches([{"x": i} for i in range(40)], {"x": np.zeros(4, "int32")}, seed=5)
    assert results[0]["batches"] == [batch["x"].tolist() for batch in alone_read]
    expected = ["same rows on all", "differ in shape", "no rows", "already a global array", "global batch differs"]
    assert [text for text, part in zip(errors[0], expected, strict=True) if part not in text] == []
    assert "process 0 has batch 6: x int32[2, 3]; process 1 has batch 6: x int32[3, 3]" in errors[0][1]
    np.testing.assert_allclose(results[0]["losses"], _losses_of_one_process(), rtol=1e-6)


def _losses_of_one_process() -> list[float]:
    import optax
    from flax import nnx

    x = np.random.default_rng(0).standard_normal((8, 4)).astype("float32")
    program = spanax.trace(
        build=lambda rngs: nnx.Linear(4, 8, rngs=rngs), optimizer=optax.sgd(0.05), batch=x,
        loss=lambda model, x: (model(x) ** 2).mean(),
    )  # fmt: skip
    run = spanax.start(program, spanax.plan(program, spanax.cluster("cpu:1"), layout="data"), seed=1)
    return [float(run.step(x)["loss"]) for _ in range(2)]


def test_local_batch_works_in_a_single_process() -> None:
    batch = spanax.local_batch({"x": np.arange(16.0).reshape(8, 2), "y": np.arange(3, dtype="int64")})
    assert batch["x"].sharding.shard_shape((8, 2)) == (8 // jax.device_count(), 2)
    assert batch["y"].sharding.is_fully_replicated and batch["y"].tolist() == [0, 1, 2]
    for wrong in (3.0, np.zeros((0, 2))):
        with pytest.raises(SpanaxError, match="no rows"):
            spanax.local_batch({"x": wrong})
