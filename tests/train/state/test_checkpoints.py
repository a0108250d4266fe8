"""Checkpoints of NNX objects: bit-equal on any mesh, of a run and for a run, and nothing changed where they differ."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import spanax
from programs import Net
from spanax.entries.names import STEPS_LOCK
from spanax.train.record.run_lock import claimed
from spanax.train.state.named_objects import NamedObjects, is_nnx
from spanax.train.store import manifest, view

MESHES: dict[str, tuple[int, int] | None] = {"4x2": (4, 2), "2x4": (2, 4), "unsharded": None}
EXAMPLES = [{"x": np.full(8, number, "float32")} for number in range(40)]
BATCH = {"x": np.zeros((16, 8), "float32")}


class Odd(nnx.Module):
    """A net, and values that are not arrays of JAX: a number, a table of NumPy, one of weak type."""

    def __init__(self, rngs: nnx.Rngs):
        self.net = Net(rngs)
        self.number = nnx.Variable(0.5 * (1 + rngs.params.key.get_value().size))
        self.table = nnx.data(np.arange(3))
        self.weak, self.half = nnx.Variable(jnp.asarray(0.25)), nnx.Param(jnp.ones((8, 4), jnp.bfloat16))
        self.empty = nnx.Param(jnp.zeros((0, 4)))


@nnx.jit
def train_step(model: Odd, optimizer: nnx.Optimizer[Any], metrics: nnx.MultiMetric, batch: Any) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda model: (model.net(batch["x"]) ** 2).mean() + model.half.sum())(model)
    optimizer.update(model, grads)
    metrics.update(loss=loss)
    return loss


def objects(seed: int, mesh: tuple[int, int] | None = None) -> dict[str, Any]:
    model = Odd(nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.adamw(0.1), wrt=nnx.Param)
    metrics, streams = nnx.MultiMetric(loss=nnx.metrics.Average("loss")), nnx.Rngs(params=seed, noise=seed + 1)
    named = {"model": model, "optimizer": optimizer, "metrics": metrics, "streams": streams}
    if mesh is not None:
        built = jax.make_mesh(mesh, ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        _shard(NamedObjects.of(named), built)
    return named


def _shard(named: NamedObjects, mesh: jax.sharding.Mesh) -> None:
    """Shards matrices over both axes, as `spanax.jit` may, and replicates other arrays."""
    arrays = {
        path: jax.device_put(
            value, NamedSharding(mesh, PartitionSpec("a", "b") if value.ndim == 2 else PartitionSpec())
        )
        for path, value in named.arrays.items()
        if isinstance(value, jax.Array) and value.size
    }
    named.update(named.arrays | arrays)


def arrays_of(named: dict[str, Any]) -> dict[str, Any]:
    return NamedObjects.of({name: value for name, value in named.items() if is_nnx(value)}).arrays


def bits(named: dict[str, Any]) -> dict[str, bytes]:
    is_key = lambda value: jax.dtypes.issubdtype(jax.typeof(value).dtype, jax.dtypes.prng_key)  # noqa: E731
    pairs = arrays_of(named).items()
    return {path: np.asarray(jax.random.key_data(v) if is_key(v) else jnp.asarray(v)).tobytes() for path, v in pairs}


def placed(named: dict[str, Any]) -> dict[str, Any]:
    """The type of every array, its sharding, and whether it is committed to it."""
    return {
        path: (type(v), jax.typeof(v), getattr(v, "sharding", None), getattr(v, "committed", None))
        for path, v in arrays_of(named).items()
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A checkpoint of objects that were trained sharded over 4x2 devices, and their bytes."""
    named, folder = objects(0, MESHES["4x2"]), tmp_path_factory.mktemp("saved")
    with spanax.Checkpoints(folder) as checkpoints:
        for _ in range(2):
            train_step(named["model"], named["optimizer"], named["metrics"], BATCH)
        named["streams"].noise()
        named["model"].seen = nnx.Intermediate(jnp.ones(2))  # no state
        checkpoints.save(2, named)
        at_save = bits(named)
        train_step(named["model"], named["optimizer"], named["metrics"], BATCH)  # while it is written
    assert bits(named) != at_save
    return folder, at_save


@pytest.mark.parametrize("mesh", MESHES)
def test_objects_are_bit_equal_on_any_mesh(mesh: str, saved: tuple[Path, dict[str, bytes]]) -> None:
    folder, expected = saved
    new = objects(1, MESHES[mesh])
    before = placed(new)
    assert bits(new) != expected
    assert spanax.Checkpoints(folder).restore(new) == 2
    assert bits(new) == expected and placed(new) == before
    if mesh == "unsharded":  # uncommitted arrays still go where the batch is
        everywhere = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        batch = jax.device_put(BATCH, NamedSharding(everywhere, PartitionSpec("data")))
        assert np.isfinite(train_step(new["model"], new["optimizer"], new["metrics"], batch))


def test_an_abstract_model_gets_its_shardings(saved: tuple[Path, dict[str, bytes]]) -> None:
    folder, expected = saved
    model = nnx.eval_shape(lambda: Odd(nnx.Rngs(0)))
    sharding = NamedSharding(jax.make_mesh((8,), ("data",)), PartitionSpec(None, "data"))
    kernel = model.net.up.kernel
    kernel.set_value(jax.ShapeDtypeStruct(kernel.shape, kernel.dtype, sharding=sharding))
    assert spanax.Checkpoints(folder).restore({"model": model}) == 2
    assert bits({"model": model}) == {path: expected[path] for path in bits({"model": model})}
    assert model.net.up.kernel.get_value().sharding == sharding and not model.net.up.bias.get_value().committed
    with pytest.raises(spanax.SpanaxError, match="has no values to save: its object is abstract"):
        spanax.Checkpoints(folder).save(3, {"model": nnx.eval_shape(lambda: Odd(nnx.Rngs(0)))})


# ---- what differs


class Wider(Odd):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.net.up, self.half = nnx.Linear(8, 32, rngs=rngs), nnx.Param(jnp.ones((8, 4)))
        self.new = nnx.Param(jnp.zeros(3))


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (
            {"model": Wider},
            "arrays: 1 missing, 3 of another shape or dtype.\n  where: {folder}/1: missing: new; ",
        ),
        (
            {"model": Wider},
            "dtype: half: model float32[8,4], checkpoint bfloat16[8,4], net.up.bias: ",
        ),
        ({"ema": Odd}, "no object 'ema'.\n  where: {folder}: model, metrics, optimizer, streams, data"),
        ({"watch": lambda rngs: spanax.Guard().watch()}, "no object 'watch'"),
        ({"data": lambda rngs: spanax.batches(EXAMPLES, BATCH, seed=1)}, "belongs to other data: its order differs"),
        ({"streams": lambda rngs: 3}, "'streams' is a int, which has neither arrays nor a state"),
        ({"a.b": Net}, "'a.b' cannot be the name of an object"),
    ],
)
def test_objects_that_differ_are_unchanged(change: dict[str, Any], reported: str, tmp_path: Path) -> None:
    with spanax.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, objects(0) | {"data": spanax.batches(EXAMPLES, BATCH)})
    data = spanax.batches(EXAMPLES, BATCH)
    next(data)
    new = objects(1) | {"data": data} | {name: build(nnx.Rngs(1)) for name, build in change.items()}
    nnx_objects = {name: value for name, value in new.items() if is_nnx(value) and "." not in name}
    before, position = bits(nnx_objects), data.state()
    with pytest.raises(spanax.SpanaxError) as error:
        checkpoints.restore(new)
    assert reported.format(folder=tmp_path) in error.value.args[0]
    assert bits(nnx_objects) == before and data.state() == position


@pytest.mark.parametrize("mesh", ["4x2", "unsharded"])
def test_arrays_that_match_are_restored_and_others_reported(mesh: str, tmp_path: Path) -> None:
    old, new, warnings = objects(0), objects(1, MESHES[mesh]), list[str]()
    with spanax.Checkpoints(tmp_path, warn=warnings.append) as checkpoints:
        checkpoints.save(3, old | {"data": spanax.batches(EXAMPLES, BATCH), "more": Net(nnx.Rngs(0))})
    new |= {
        "model": Wider(nnx.Rngs(1)),
        "ema": Net(nnx.Rngs(1)),
        "fails": Fails(),
        "data": spanax.batches(EXAMPLES, BATCH),
    }
    nnx_objects = {name: value for name, value in new.items() if is_nnx(value)}
    before, expected = bits(nnx_objects), bits(old)
    loaded = checkpoints.restore(new, partial=True)
    after, changed = bits(nnx_objects), ["half", "net.up.bias", "net.up.kernel"]
    assert loaded.step == 3 and {path.partition(":")[0] for path in loaded.mismatched} == {*changed}
    assert {path for path in loaded.missing if not path.startswith("ema.")} == {"new", "fails"}
    assert loaded.unexpected == () and "data" in loaded.loaded and "optimizer.step" in loaded.loaded
    assert {*loaded.loaded, *loaded.missing, *changed} == {*after, "data", "fails"}
    for path in after:
        assert after[path] == (expected if path in loaded.loaded else before)[path], path
    assert warnings == [f"WARNING: {loaded}"] and "loaded " in warnings[0] and "mismatched: half: model " in warnings[0]
    with pytest.raises(spanax.DataError, match="has none of the arrays of these objects"):
        checkpoints.restore({"ema": Net(nnx.Rngs(1))}, partial=True)


def test_the_advice_for_objects_that_differ_restores_them(tmp_path: Path) -> None:
    old = objects(0)
    with spanax.Checkpoints(tmp_path, warn=lambda line: None) as checkpoints:
        checkpoints.save(1, {name: old[name] for name in ("model", "optimizer")})
    model, advice = Odd(nnx.Rngs(1)), r"fix: restore some of the objects, or restore\(objects, partial=True\)"
    for other in ({"model": model, "ema": Net(nnx.Rngs(1))}, {"model": Wider(nnx.Rngs(1))}):
        with pytest.raises(spanax.DataError, match=advice):
            checkpoints.restore(other)
    assert checkpoints.restore({"model": model}) == 1 and bits({"model": model}) == bits({"model": old["model"]})
    assert checkpoints.restore({"model": Wider(nnx.Rngs(1))}, partial=True).missing == ("new",)


class Fails:
    def state(self) -> int:
        return 1

    def restore(self, state: int) -> None:
        raise RuntimeError("not today")


def test_a_state_that_cannot_be_restored_changes_no_other(tmp_path: Path) -> None:
    data = spanax.batches(EXAMPLES, BATCH)
    named = objects(0) | {"data": data, "fails": Fails()}
    with spanax.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, named)
    next(data)
    new = objects(1)
    before, position = bits(new), data.state()
    with pytest.raises(RuntimeError, match="not today"):
        checkpoints.restore(new | {"data": data, "fails": Fails()})
    assert bits(new) == before and data.state() == position != {}


def test_variables_are_saved_as_stored() -> None:
    class Doubled(nnx.Variable[Any]):
        def get_value(self, **options: Any) -> Any:
            return 2 * super().get_value(**options)

    class Stored(nnx.Module):
        def __init__(self) -> None:
            self.doubled, self.several = Doubled(jnp.ones(2)), nnx.Variable({"one": jnp.ones(1), "more": [jnp.ones(2)]})

    model = Stored()
    named = NamedObjects.of({"model": model})
    named.update({path: value + 1 for path, value in named.arrays.items()})
    assert model.doubled.get_value().tolist() == [4, 4]  # not saved as it is read
    assert type(model.several.get_value()) is dict and list(named.arrays) == [
        "doubled",
        "several.more.0",
        "several.one",
    ]


def test_an_attribute_of_the_model_has_no_other_objects_name() -> None:
    model = Odd(nnx.Rngs(0))
    with pytest.raises(spanax.SpanaxError, match="'net' is the name of an object and of an attribute of the model"):
        NamedObjects.of({"model": model, "net": Net(nnx.Rngs(1))})
    shared = NamedObjects.of({"optimizer": nnx.ModelAndOptimizer(model, optax.sgd(0.1)), "model": model})
    assert {path for path in shared.arrays if path.startswith("optimizer.model")} == set()  # each array once


# ---- steps


def test_intact_steps_are_read_and_damaged_ones_skipped(tmp_path: Path) -> None:
    warnings: list[str] = []
    with spanax.Checkpoints(tmp_path, keep=2, warn=warnings.append) as checkpoints:
        assert checkpoints.latest() is None
        for step in (5, 10, 15):
            checkpoints.save(step, objects(step))
    assert checkpoints.steps() == [10, 15] and checkpoints.latest() == 15
    path = next(path for path in (tmp_path / "15" / "arrays").rglob("d/*") if path.is_file())
    path.write_bytes(bytes(reversed(path.read_bytes())))
    new = objects(0)
    assert checkpoints.restore(new) == 10 and bits(new) == bits(objects(10))
    assert len(warnings) == 1 and "skipped damaged checkpoint: step 15" in warnings[0]
    with pytest.raises(spanax.DataError, match="no checkpoint of step 5"):
        checkpoints.restore(new, step=5)
    assert manifest.steps(tmp_path) == [10, 15]


@pytest.mark.parametrize("is_failing", [False, True])
def test_a_failed_save_is_an_error_at_the_end(is_failing: bool, tmp_path: Path, monkeypatch: Any) -> None:
    def fail(folder: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manifest, "write", fail)
    warnings: list[str] = []
    with pytest.raises(RuntimeError if is_failing else spanax.WriteError):
        with spanax.Checkpoints(tmp_path, warn=warnings.append) as checkpoints:
            checkpoints.save(1, objects(0))
            if is_failing:
                raise RuntimeError("of the loop")
    assert len(warnings) == is_failing and checkpoints.steps() == []


# ---- one writer

WRITER = """
import os, sys, time
import numpy as np, spanax
from flax import nnx
from spanax.entries.folder import Folder
from spanax.train.store import writer

objects = {"rngs": nnx.State({"seed": nnx.Param(np.full(4, int(sys.argv[2])))})}
checkpoints, saved = spanax.Checkpoints(sys.argv[1]), []
for step in range(1, 9):
    try:
        checkpoints.save(step, objects).wait()
        saved.append(step)
    except spanax.WriteError as error:
        assert error.exit_code == 73 and "is in use" in str(error), error
print(saved, flush=True)
if saved:
    if os.fork() == 0:  # another writer: it has no lock, and holds none after its parent has ended
        try:
            writer.claim(Folder.of(sys.argv[1]).resolved())
        except spanax.WriteError:
            print("refused", flush=True)
        os.close(1)
        time.sleep(600)
time.sleep(600)
"""


def test_one_process_saves_into_a_folder_until_it_closes_or_ends(tmp_path: Path) -> None:
    steps = tmp_path / "run" / "checkpoints"
    command = [sys.executable, "-W", "ignore", "-c", WRITER, str(steps)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    options: dict[str, Any] = {"env": environment, "stdout": -1, "text": True, "start_new_session": True}
    writers = [subprocess.Popen([*command, seed], **options) for seed in "12"]
    try:
        saved = [json.loads(writer.stdout.readline()) for writer in writers if writer.stdout]
        assert sorted(saved) == [[], [*range(1, 9)]], "one of them saved every step, and the other none"
        holder = writers[saved.index([*range(1, 9)])]
        assert holder.stdout is not None and holder.stdout.readline() == "refused\n"
        checkpoints = spanax.Checkpoints(steps)
        named = {"rngs": nnx.State({"seed": nnx.Param(jnp.zeros(4, int))})}
        for step in range(1, 9):
            assert checkpoints.restore(named, step=step) == step  # reading needs no lock
            assert named["rngs"]["seed"][...].tolist() == [writers.index(holder) + 1] * 4
        with pytest.raises(spanax.WriteError, match=f"is in use.*\n.*process {holder.pid} on"):
            checkpoints.save(9, named)
        with pytest.raises(spanax.WriteError, match="is in use"), claimed(steps.parent, resume=True):
            pass
        assert checkpoints.steps() == [*range(1, 9)] and view.verify(steps) == []
        holder.kill()
        holder.wait()
        with checkpoints:
            checkpoints.save(9, named)
            assert (steps / STEPS_LOCK).read_text().startswith(f"process {os.getpid()} ")
        assert not (steps / STEPS_LOCK).exists()
    finally:
        for writer in writers:
            os.killpg(writer.pid, signal.SIGKILL)
            writer.communicate()


def test_threads_and_objects_of_a_process_share_its_lock(tmp_path: Path) -> None:
    def save(step: int) -> None:
        spanax.Checkpoints(tmp_path).save(step, named).wait()

    named = {"net": Net(nnx.Rngs(0))}
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(save, [*range(12), *range(12)]))
    checkpoints = spanax.Checkpoints(tmp_path)
    assert checkpoints.steps() == [*range(12)] and view.verify(tmp_path) == []
    shutil.rmtree(tmp_path)  # the lock with it
    save(1)
    assert (tmp_path / STEPS_LOCK).exists() and checkpoints.steps() == [1]
    checkpoints.close()
    checkpoints.close()


# ---- of a run and for a run


def test_a_run_and_a_loop_read_each_others_checkpoints(tmp_path: Path) -> None:
    shapes = {"x": jax.ShapeDtypeStruct((16, 8), "float32")}
    program = spanax.trace(
        build=Net, optimizer=optax.adam(0.1), batch=shapes, loss=lambda model, batch: (model(batch["x"]) ** 2).mean()
    )
    plan = spanax.plan(program, spanax.cluster("cpu:8"), mesh="fsdp=8")
    run = spanax.start(program, plan, guard=spanax.Guard("skip"))
    data = spanax.batches(EXAMPLES, plan, epochs=2)
    run.step(next(data))
    run.save(tmp_path / "run", data=data).wait()

    model = Net(nnx.Rngs(3))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    named = {
        "model": model,
        "optimizer": optimizer,
        "data": spanax.batches(EXAMPLES, BATCH),
        "guard": run.guard.watch(),
    }
    assert spanax.Checkpoints(tmp_path / "run").restore(named) == 1
    assert bits(named) == {path: np.asarray(jax.random.key_data(array) if "key" in path else array).tobytes()
                           for path, array in run.arrays().items()}  # fmt: skip
    assert named["data"].state()["next_index"] == 1 and named["guard"].history.last_good_step == 1
    next(named["data"])

    with spanax.Checkpoints(tmp_path / "loop") as checkpoints:
        checkpoints.save(7, named)
    again = spanax.restore(program, plan, tmp_path / "loop", guard=run.guard)
    assert again.num_steps == 7 and again.history == named["guard"].history
    assert spanax.batches(EXAMPLES, plan, epochs=2, position=again.position).state()["next_index"] == 2
    new = spanax.start(program, plan, init=tmp_path / "loop")
    for array, other in ((new, run), (again, run)):
        np.testing.assert_array_equal(array.params()["up.kernel"], other.params()["up.kernel"])


# ---- several processes


PROCESS = """
import sys, jax
sys.path[:0] = sys.argv[3].split(":")
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", num_processes=2, process_id=int(sys.argv[1]))
import numpy as np, shutil, spanax
from flax import nnx
from jax.experimental.multihost_utils import process_allgather
from spanax.train.state.named_objects import NamedObjects
from spanax.train.store import manifest

def objects(seed, mesh):  # the model is sharded over both processes, the streams are in each
    model, mesh = nnx.Linear(8, 16, rngs=nnx.Rngs(seed)), jax.make_mesh(mesh, ("a", "b"))
    kernel, spec = np.asarray(model.kernel[...]), jax.NamedSharding(mesh, jax.P("a", "b"))
    model.kernel.set_value(jax.make_array_from_callback(kernel.shape, spec, lambda index: kernel[index]))
    return {"model": model, "streams": nnx.Rngs(seed)}

old, new = objects(0, (4, 2)), objects(1, (2, 4))
with spanax.Checkpoints(sys.argv[4]) as checkpoints:
    checkpoints.save(1, old)
checkpoints.restore(new)
for named in (old, new):
    streams, kernel = named["streams"].params.key.get_value(), named["model"].kernel.get_value()
    print("values", jax.random.key_data(streams).tolist(), process_allgather(kernel, tiled=True).tolist())
try:
    checkpoints.save(2, {"streams": nnx.Rngs(jax.process_index())})
except spanax.SpanaxError as error:
    print("values", str(error).splitlines()[0])
checkpoints.save(2, new).wait()
write = manifest.write
manifest.write = lambda folder: (_ for _ in ()).throw(OSError(28, "No space left on device"))  # on one of them
try:
    checkpoints.save(3, new).wait()
except spanax.WriteError as error:
    print("values", str(error).splitlines()[0])
manifest.write = write
if jax.process_index() == 0:  # intact, and Orbax cannot load it
    shutil.rmtree(checkpoints.folder.path / "2" / "arrays")
    manifest.write(checkpoints.folder.path / "2")
process_allgather(np.int32(0))
loaded = checkpoints.restore(new | {"more": nnx.Rngs(0)}, partial=True)
print("values", loaded.step, loaded.loaded, loaded.missing)
"""


@pytest.mark.slow
def test_two_processes_save_and_restore(tmp_path: Path) -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    arguments = [sys.executable, "-c", PROCESS]
    environment = {**os.environ, "XLA_FLAGS": ""}
    rest = [port, str(Path(__file__).parents[2]), str(tmp_path)]
    runs = [subprocess.Popen([*arguments, rank, *rest], env=environment, stdout=-1, text=True) for rank in "01"]
    outputs = [run.communicate(timeout=300)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    for output in outputs:
        old, new, error, failed, partial = [line for line in output.splitlines() if line.startswith("values")]
        assert old == new and json.loads(old.split("]", 1)[1]) and len(old) > 1000
        assert re.match(
            "values `streams.default.(count|key)` differs between processes, and a checkpoint stores", error
        )
        assert failed.startswith("values step 3 was not saved: ")
        assert partial.startswith("values 1 ('bias', 'kernel', 'streams.default.count', 'streams.default.key') ('more.")


@pytest.mark.parametrize("is_raw", [False, True])
def test_a_state_is_saved_and_restored_in_place(is_raw: bool, tmp_path: Path) -> None:
    model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    average = jax.tree.map(lambda param: param + 1, nnx.state(model, nnx.Param))
    state = nnx.State(nnx.to_pure_dict(average)) if is_raw else average
    new = jax.tree.map(jnp.zeros_like, state)
    with spanax.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": model, "average": state})
    checkpoints.restore({"average": new})
    np.testing.assert_array_equal(new["kernel"], np.asarray(model.kernel) + 1)
    np.testing.assert_array_equal(new["bias"], np.ones(8))


LAST_LINE = """
import sys, spanax
from flax import nnx
from spanax.train.store import manifest

def fail(folder):
    raise OSError(28, "No space left on device")

if sys.argv[2] == "fails":
    manifest.write = fail
model = nnx.Linear(512, 2048, rngs=nnx.Rngs(0))
spanax.Checkpoints(sys.argv[1]).save(3, {"model": model})
"""


@pytest.mark.parametrize("outcome", ["succeeds", "fails"])
def test_a_save_without_a_wait_ends_before_the_program(outcome: str, tmp_path: Path) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", LAST_LINE, str(tmp_path / "steps"), outcome]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0
    if outcome == "succeeds":
        assert ended.stderr == "" and spanax.Checkpoints(tmp_path / "steps").steps() == [3]
        spanax.Checkpoints(tmp_path / "steps").restore({"model": nnx.Linear(512, 2048, rngs=nnx.Rngs(1))})
    else:
        assert ended.stderr == "spanax: WARNING: step 3 was not saved: no space left on the device.\n"
        assert spanax.Checkpoints(tmp_path / "steps").steps() == []
