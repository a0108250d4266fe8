"""Objects of `spanax.init`: those that eager code creates, but each array only in its shards."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import spanax

BATCH = {name: jax.ShapeDtypeStruct((8, 4), "int32") for name in ("inputs", "targets")}


class Block(nnx.Module):
    def __init__(self, drop: nnx.Dropout, rngs: nnx.Rngs):
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.down = nnx.Linear(64, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.drop = drop

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.drop(self.down(jax.nn.relu(self.up(self.norm(x)))))


class Model(nnx.Module):
    """Tied weights, a module and random state that blocks share, statistics, and an array without a Variable."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(64, 32, rngs=rngs)
        drop = nnx.Dropout(0.1, rngs=rngs)
        self.blocks = nnx.List([Block(drop, rngs) for _ in range(2)])
        self.head = self.embed
        self.scale = jnp.arange(1, 33) / 32

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head.attend(x * self.scale)


def make_objects() -> tuple[Model, nnx.Optimizer, nnx.EMA]:
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), nnx.EMA(model, decay=0.5, only=nnx.Param)


def train_step(model: Model, optimizer: nnx.Optimizer, average: nnx.EMA, batch: Any) -> jax.Array:
    def loss(model: Model) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(batch["inputs"]), batch["targets"]).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    average.update(model)
    return value


def host(array: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(array) if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key) else array)


def test_initialized_objects_equal_eager_ones_and_are_sharded_as_planned() -> None:
    step = spanax.jit(train_step, mesh="fsdp=4,model=2")
    objects, eager = spanax.init(make_objects, like=step, batch=BATCH), make_objects()
    model, mesh = objects[0], step.placement.mesh
    assert model.head is model.embed and model.blocks[0].drop is model.blocks[1].drop
    assert [type(each) for each in objects] == [type(each) for each in eager]
    assert jax.tree.structure(nnx.state(objects)) == jax.tree.structure(nnx.state(eager))
    pointers = [{shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards} for array in plain(objects)]
    assert len(set().union(*pointers)) == sum(map(len, pointers)), "a buffer of two arrays could not be donated"
    states = zip(nnx.to_flat_state(nnx.state(objects)), nnx.to_flat_state(nnx.state(eager)), strict=True)
    arrays = [(path, *jax.tree.leaves((ours, theirs))) for (path, ours), (_, theirs) in states]
    for (path, ours, theirs), placement in zip(arrays, step.plan.leaves, strict=True):
        np.testing.assert_allclose(host(ours), host(theirs), rtol=1e-6, atol=1e-9, err_msg=str(path))
        assert ours.sharding == placement.sharding(mesh)
        assert {shard.data.shape for shard in ours.addressable_shards} == {placement.local_shape}
    assert model.embed.embedding.sharding.num_devices == 8 and not model.embed.embedding.sharding.is_fully_replicated
    batch = {name: np.arange(32, dtype="int32").reshape(8, 4) + offset for offset, name in enumerate(BATCH)}
    trained = [[float(step(*each, batch)) for _ in range(2)] for each in (objects, eager)]
    assert trained[0] == pytest.approx(trained[1], rel=1e-5) and trained[0][1] < trained[0][0]


def plain(objects: Any) -> list[jax.Array]:
    arrays = jax.tree.leaves(nnx.state(objects))
    return [array for array in arrays if not jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)]


@pytest.mark.parametrize("form", ["tuple", "dict", "keyword"])
def test_a_batch_is_the_arguments_after_the_objects(form: str) -> None:
    x, y = jax.ShapeDtypeStruct((8, 16), "float32"), jax.ShapeDtypeStruct((8, 4), "float32")

    def several(model: nnx.Linear, x: Any, y: Any, scale: float = 1.0) -> Any:
        return ((model(x) - y) * scale).mean()

    def by_name(model: nnx.Linear, *, y: Any) -> Any:
        return (model(y["x"]) - y["y"]).mean()

    step = spanax.jit(by_name if form == "keyword" else several, mesh="fsdp=4")
    batch = {"tuple": (x, y), "dict": {"y": y, "x": x, "scale": 2.0}, "keyword": {"x": x, "y": y}}[form]
    model = spanax.init(lambda: nnx.Linear(16, 4, rngs=nnx.Rngs(0)), like=step, batch=batch)
    assert isinstance(model, nnx.Linear) and model.kernel.sharding.num_devices == 4
    assert [leaf.shape for leaf in step.plan.batch if leaf.shape] == [(8, 16), (8, 4)]
    with pytest.raises(spanax.SpanaxError, match="`batch` does not match") as caught:
        spanax.init(lambda: nnx.Linear(16, 4, rngs=nnx.Rngs(0)), like=spanax.jit(several, mesh="fsdp=4"), batch=x)
    assert "`y` is missing" in str(caught.value)


def test_objects_that_cannot_be_created_sharded_raise() -> None:
    step = spanax.jit(train_step, mesh="fsdp=8")

    def reading() -> nnx.Module:
        model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        model.norm = float(jnp.linalg.norm(model.kernel[...]))
        return model

    with pytest.raises(spanax.SpanaxError, match="`make_objects` reads the value") as caught:
        spanax.init(reading, like=step, batch=BATCH)
    assert "in reading: model.norm" in str(caught.value)
    with pytest.raises(spanax.SpanaxError, match="returned dict, not NNX objects"):
        spanax.init(lambda: {"model": 1}, like=step, batch=BATCH)
    with pytest.raises(spanax.SpanaxError, match="5 objects for 4 positional parameters"):
        spanax.init(lambda: (nnx.Linear(4, 4, rngs=nnx.Rngs(0)),) * 5, like=step, batch=BATCH)
    with pytest.raises(spanax.SpanaxError, match="`like` is of type function"):
        spanax.init(make_objects, like=train_step, batch=BATCH)  # type: ignore[arg-type]


LARGE = """
import resource, sys
import jax, numpy as np, optax, spanax
from flax import nnx

class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)

def objects(width):
    model = nnx.List([Block(width, nnx.Rngs(seed)) for seed in range(4)])
    return model, nnx.Optimizer(model, optax.adam(1e-5), wrt=nnx.Param)

def train_step(model, optimizer, x):
    def loss(model):
        y = x
        for block in model:
            y = y + block.down(jax.nn.relu(block.up(y)))
        return ((y - 1) ** 2).mean()
    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value

def live_bytes():
    by_device = dict.fromkeys(jax.devices(), 0)
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            by_device[shard.device] += shard.data.nbytes
    return max(by_device.values())

def train(how, width):
    step, x = spanax.jit(train_step, mesh="model=8"), np.ones((8, width), "float32")
    made = lambda: objects(width)
    model, optimizer = made() if how == "eager" else spanax.init(made, like=step, batch=x)
    most = [live_bytes()]
    losses = []
    for _ in range(3):
        losses.append(float(step(model, optimizer, x)))
        most.append(live_bytes())
    return max(most), losses

def data_bytes():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmData")]
    return 1024 * int(line.split()[1])

how, device_bytes = sys.argv[1], int(sys.argv[2])
train(how, 16)  # starts threads and compilers
resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + 8 * device_bytes,) * 2)
most, losses = train(how, 1024)
assert losses[0] > losses[1] > losses[2], losses
print(most)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the data of a process")
@pytest.mark.parametrize("how", ["init", "eager"])
def test_a_model_larger_than_the_memory_of_a_device_trains(how: str) -> None:
    """The simulated devices share a limit of eight times the memory of one; eager creation exceeds it."""
    num_params = 4 * 2 * 1024 * 2048
    device_bytes = 3 * num_params
    assert 4 * num_params > device_bytes, "the model fits on a device"
    run = subprocess.run(
        [sys.executable, "-c", LARGE, how, str(device_bytes)], capture_output=True, text=True, timeout=600
    )
    if how == "eager":
        assert run.returncode != 0 and any(name in run.stderr for name in ("RESOURCE_EXHAUSTED", "MemoryError"))
    else:
        assert run.returncode == 0, run.stderr
        state_bytes = 3 * 4 * num_params
        assert state_bytes / 8 < int(run.stdout) < 1.1 * state_bytes / 8


RESTORE = """
import sys
import jax
jax.distributed.initialize(sys.argv[2], num_processes=2, process_id=int(sys.argv[3]))
import numpy as np, orbax.checkpoint as ocp, spanax
from flax import nnx

def make_model():
    return nnx.Linear(2048, 1024, use_bias=False, rngs=nnx.Rngs(1))

def read_bytes():
    (line,) = [line for line in open("/proc/self/io") if line.startswith("rchar")]
    return int(line.split()[1])

predict = spanax.jit(lambda model, x: model(x), layout="fsdp", mesh="fsdp=8")
model = spanax.init(make_model, like=predict, batch=np.ones((8, 2048), "float32"))
with ocp.StandardCheckpointer() as checkpointer:
    before = read_bytes()
    nnx.update(model, checkpointer.restore(sys.argv[1], target=nnx.state(model)))
    print(f'read {read_bytes() - before}')  # one write, which Gloo's text cannot split
for shard in model.kernel.addressable_shards:
    expected = np.random.default_rng(0).normal(size=(2048, 1024)).astype("float32")
    np.testing.assert_array_equal(shard.data, expected[shard.index])
assert len(model.kernel.addressable_shards) == 4
"""


def test_a_process_reads_its_shards_of_an_orbax_checkpoint(tmp_path: Path) -> None:
    model = nnx.Linear(2048, 1024, use_bias=False, rngs=nnx.Rngs(0))
    predict = spanax.jit(lambda model, x: model(x), layout="fsdp", mesh="fsdp=8")
    plan = predict.prepare(model, np.ones((8, 2048), "float32"))
    model.kernel[...] = np.random.default_rng(0).normal(size=(2048, 1024)).astype("float32")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", jax.device_put(nnx.state(model), spanax.shardings(model, plan)))
    num_bytes = sum(path.stat().st_size for path in (tmp_path / "saved").rglob("*") if path.is_file())
    assert num_bytes > 4 << 20
    environ = os.environ | {"XLA_FLAGS": os.environ["XLA_FLAGS"].replace("count=8", "count=4")}
    with socket.socket() as reserved:  # otherwise a connection of another process may take the port meanwhile
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", RESTORE, str(tmp_path / "saved"), address, str(rank)],
                env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        results = [process.communicate(timeout=600) for process in processes]
    for process, (out, errors) in zip(processes, results, strict=True):
        assert process.returncode == 0, errors
        # Gloo prints to the same pipe; its text may stand before ours in one line.
        (num_read,) = [int(digits) for digits in re.findall(r"read (\d+)", out)]
        assert 0.45 < num_read / num_bytes < 0.55
