"""Checkpoints: bit-equal on any devices, every damage found, nothing lost to kills, full disks or donation."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from spanax.entries.folder import Folder
from spanax.entries.names import STEPS_LOCK
from spanax.errors import DataError, SpanaxError, WriteError
from spanax.train.state.weights import Source
from spanax.train.store import checkpoint, manifest

KERNEL = "optimizer.opt_state.0.mu.blocks.0.attn.qkv.kernel"
SPECS = {
    KERNEL: PartitionSpec("a", "b"),
    "blocks.0.norm.scale": PartitionSpec("b"),
    "step": PartitionSpec(),
    "rngs.dropout.key": PartitionSpec(),
    "rngs.each.key": PartitionSpec("a"),
    "tokens": PartitionSpec(None, "b"),
    "mask": PartitionSpec(),
    "none": PartitionSpec(),
    "../../outside": PartitionSpec(),
    "/tmp/outside": PartitionSpec(),
    "..": PartitionSpec(),
}


def mesh(*shape: int) -> jax.sharding.Mesh:
    return jax.make_mesh(shape, ("a", "b"), axis_types=(AxisType.Auto,) * 2)


def values(seed: int = 0) -> dict[str, jax.Array]:
    """One leaf of every kind, on one device; no two seeds share a bit pattern."""
    rng = np.random.default_rng(seed)
    kernel = rng.integers(0, 2**32, (16, 8), dtype=np.uint32).view(np.float32)
    return {
        KERNEL: jnp.asarray(kernel),
        "blocks.0.norm.scale": jnp.asarray(rng.standard_normal(8), jnp.bfloat16),
        "step": jnp.int32(seed),
        "rngs.dropout.key": jax.random.key(seed),
        "rngs.each.key": jax.random.split(jax.random.key(seed, impl="rbg"), 8),
        "tokens": jnp.asarray(rng.integers(-9, 9, (3, 8)), jnp.int8),
        "mask": jnp.asarray([True, False]),
        "none": jnp.zeros((0, 4)),
        "../../outside": jnp.float32(seed),
        "/tmp/outside": jnp.float32(-seed),
        "..": jnp.float32(0.5),
    }


def placed(arrays: dict[str, jax.Array], on: jax.sharding.Mesh) -> dict[str, jax.Array]:
    return {key: jax.device_put(array, NamedSharding(on, SPECS[key])) for key, array in arrays.items()}


def targets(on: jax.sharding.Mesh | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """The same leaves without values, on a mesh or on one device."""
    item = SingleDeviceSharding(jax.devices()[0])
    return {
        key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(on, SPECS[key]) if on else item)
        for key, leaf in jax.eval_shape(values).items()
    }


def bits(array: jax.Array) -> bytes:
    data = jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array
    return np.asarray(data).tobytes()


def assert_same(result: dict[str, jax.Array], expected: dict[str, jax.Array]) -> None:
    assert result.keys() == expected.keys()
    for key, array in expected.items():
        assert (result[key].dtype, result[key].shape) == (array.dtype, array.shape), key
        assert bits(result[key]) == bits(array), key


def saved(root: Path, step: int, seed: int | None = None, **options: Any) -> dict[str, jax.Array]:
    arrays = values(step if seed is None else seed)
    checkpoint.save(root, step, arrays, plan_json="{}", meta={"step": step}, **options).wait()
    return arrays


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name != STEPS_LOCK)


def no_warning(line: str) -> None:
    pytest.fail(line)


# ---- what is read is what was written


@pytest.fixture(scope="module")
def from_4x2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("deep") / "a" / "b"
    arrays = placed(values(7), mesh(4, 2))
    plan = '{"layout": "fsdp", "é": "\\r\\n"}\n'
    checkpoint.save(root, 30, arrays, plan_json=plan, meta={"loss": 2.5, "data": [1, {"x": None}]}).wait()
    return root


@pytest.mark.parametrize("shape", [(4, 2), (2, 4), (8, 1), None])
def test_arrays_are_bit_equal_on_any_devices(from_4x2: Path, shape: tuple[int, int] | None) -> None:
    expected = targets(mesh(*shape) if shape else None)
    restored = checkpoint.restore(from_4x2, expected, warn=no_warning)
    assert_same(restored.arrays, values(7))
    for key, array in restored.arrays.items():
        assert array.sharding.is_equivalent_to(expected[key].sharding, array.ndim), key
    assert (restored.step, restored.meta) == (30, {"loss": 2.5, "data": [1, {"x": None}]})
    assert (from_4x2 / "30" / "plan.json").read_bytes().decode() == '{"layout": "fsdp", "é": "\\r\\n"}\n'


def test_no_key_names_a_file(from_4x2: Path) -> None:
    assert names(from_4x2) == ["30"] and names(from_4x2.parent.parent) == ["a"]
    assert names(from_4x2 / "30") == ["arrays", "manifest.json", "meta.json", "plan.json"]
    assert not [path for path in from_4x2.rglob("*") if "outside" in path.name]
    odd = [*SPECS, ".", "...", "%2E.", "a/b", "a%2Fb", "é", "a b"]
    stored = [checkpoint.stored_name(key) for key in odd]
    assert [urllib.parse.unquote(name) for name in stored] == odd
    assert not [name for name in stored if re.search(r"^\.|[^\w.%-]", name, re.ASCII)]


def test_donating_right_after_save_changes_nothing(tmp_path: Path) -> None:
    sharding = NamedSharding(mesh(4, 2), PartitionSpec("a", "b"))
    fresh = jax.jit(lambda key: jax.random.normal(key, (1024, 1024)), out_shardings=sharding)
    spoil = jax.jit(lambda array: array * 0 - 1, donate_argnums=0)
    gone = fresh(jax.random.key(1))
    spoil(gone).block_until_ready()
    assert gone.is_deleted()
    arrays = {"w": fresh(jax.random.key(0))}
    pending = checkpoint.save(tmp_path, 1, arrays, plan_json="{}", meta={})
    spoil(arrays["w"]).block_until_ready()
    pending.wait()
    target = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=sharding)}
    assert bits(checkpoint.restore(tmp_path, target).arrays["w"]) == bits(fresh(jax.random.key(0)))


def test_a_deleted_array_raises_and_leaves_no_file(tmp_path: Path) -> None:
    arrays = values()
    arrays["step"].delete()
    with pytest.raises(RuntimeError, match="deleted"):
        checkpoint.save(tmp_path, 1, arrays, plan_json="{}", meta={})
    assert names(tmp_path) == []
    saved(tmp_path, 1)


# ---- damage


def flip(step: Path) -> str:
    """Flips a bit in the largest array file; the file's name."""
    path = max((step / "arrays").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    return path.relative_to(step).as_posix()


def test_a_damaged_step_is_skipped_with_a_warning(tmp_path: Path) -> None:
    first, second = saved(tmp_path, 1), saved(tmp_path, 2)
    saved(tmp_path, 3)
    flipped = flip(tmp_path / "3")
    lines: list[str] = []
    restored = checkpoint.restore(tmp_path, targets(), warn=lines.append)
    assert restored.step == 2 and len(lines) == 1
    assert_same(restored.arrays, second)
    assert f"step 3: {flipped}: checksum differs" in lines[0] and "Restoring step 2" in lines[0]
    with pytest.raises(DataError, match=f"step 3 is damaged.*\n.*{flipped}(.|\n)*other steps here: 1, 2") as error:
        checkpoint.restore(tmp_path, targets(), step=3)
    assert error.value.exit_code == 65
    assert_same(checkpoint.restore(tmp_path, targets(), step=1, warn=no_warning).arrays, first)
    (tmp_path / "2" / "plan.json").unlink()
    (tmp_path / "1" / "extra").touch()
    with pytest.raises(DataError, match="no valid checkpoint") as error:
        checkpoint.restore(tmp_path, targets(), warn=no_warning)
    assert all(part in str(error.value) for part in (flipped, "step 2: plan.json: missing", "step 1: extra: extra"))
    assert [record.state for record in checkpoint.describe(tmp_path)] == ["bad"] * 3


def test_a_missing_checkpoint_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"no checkpoint found.*\n.*{tmp_path}/none does not exist"):
        checkpoint.restore(tmp_path / "none", targets())
    (tmp_path / "5").mkdir()
    with pytest.raises(DataError, match=f"no checkpoint found.*\n.*{tmp_path} contains only unfinished steps: 5"):
        checkpoint.restore(tmp_path, targets())
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file is not a folder"):
        checkpoint.restore(tmp_path / "file", targets())
    with pytest.raises(DataError, match="no checkpoint of step 5.*\n(.|\n)*finished steps: none"):
        checkpoint.restore(tmp_path, targets(), step=5)


def test_another_model_is_reported_by_its_paths(from_4x2: Path) -> None:
    expected = targets()
    expected["step"] = jax.ShapeDtypeStruct((), jnp.int16, sharding=expected["step"].sharding)
    expected["head.bias"] = expected.pop("mask")
    expected["none"] = jax.ShapeDtypeStruct((4, 0), jnp.float32, sharding=expected["none"].sharding)
    with pytest.raises(DataError) as error:
        checkpoint.restore(from_4x2, expected)
    for part in (
        "arrays: 1 missing, 1 unexpected, 2 of another shape or dtype",
        "missing: head.bias;",
        "unexpected: mask;",
        "none: model float32[4,0], checkpoint float32[0,4], step: model int16[], checkpoint int32[]",
    ):
        assert part in str(error.value)
    assert len(str(error.value).splitlines()) <= 4


def test_a_sharding_that_does_not_divide_is_one_error(from_4x2: Path) -> None:
    expected = targets(mesh(2, 4))
    odd = NamedSharding(mesh(8, 1), PartitionSpec("a"))
    expected["tokens"] = jax.ShapeDtypeStruct(expected["tokens"].shape, jnp.int8, sharding=odd)
    with pytest.raises(SpanaxError, match="the sharding of tokens does not fit its shape.*\n.*8 times"):
        checkpoint.restore(from_4x2, expected)
    expected["tokens"] = jax.ShapeDtypeStruct(expected["tokens"].shape, jnp.int8)
    with pytest.raises(SpanaxError, match="tokens has no sharding"):
        checkpoint.restore(from_4x2, expected)


def test_a_failure_of_orbax_skips_the_step(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    shutil.rmtree(tmp_path / "1" / "arrays")
    manifest.write(tmp_path / "1")
    with pytest.raises(DataError, match="step 1 passes verification but cannot be loaded") as error:
        checkpoint.restore(tmp_path, targets())
    assert len(str(error.value).splitlines()) <= 4
    first, lines = saved(tmp_path, 0), list[str]()
    assert_same(checkpoint.restore(tmp_path, targets(), warn=lines.append).arrays, first)
    assert len(lines) == 1 and "skipped damaged checkpoint: checkpoint step 1 passes verification but" in lines[0]


def test_a_step_without_a_valid_record_is_damaged(tmp_path: Path) -> None:
    first, record = saved(tmp_path, 0), tmp_path / "1" / "meta.json"
    saved(tmp_path, 1)
    record.write_text("{}")
    manifest.write(record.parent)
    (line,) = checkpoint.verify(tmp_path)
    assert line.startswith("step 1: meta.json: meta.json is invalid")
    lines: list[str] = []
    assert_same(checkpoint.restore(tmp_path, targets(), warn=lines.append).arrays, first)
    assert len(lines) == 1
    record.unlink()
    with pytest.raises(WriteError, match="its meta.json was removed"):
        manifest.write(record.parent)
    content = json.loads((tmp_path / "1" / "manifest.json").read_text())
    del content["crc32"], content["files"]["meta.json"]
    (tmp_path / "1" / "manifest.json").write_bytes(manifest._render(content))
    assert checkpoint.verify(tmp_path) == ["step 1: meta.json: missing, also in the manifest"]
    assert_same(checkpoint.restore(tmp_path, targets(), warn=lines.append).arrays, first)


@pytest.mark.parametrize(
    "changes",
    [{"step": -1}, {"step": True}, {"step": 10**18}, {"keep": 0}, {"arrays": {}}, {"meta": {"x": {1}}}],
    ids=str,
)
def test_objects_that_cannot_be_saved_raise_before_a_file_is_created(tmp_path: Path, changes: dict[str, Any]) -> None:
    good = {"step": 1, "arrays": values(), "plan_json": "{}", "meta": {}, "keep": None}
    with pytest.raises(SpanaxError):
        checkpoint.save(tmp_path / "new", **{**good, **changes})
    assert names(tmp_path) == []


# ---- one save after the other


def test_keep_retains_the_newest_and_the_one_just_saved(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        saved(tmp_path, step)
    saved(tmp_path, 40, keep=3)
    assert names(tmp_path) == ["20", "30", "40"]
    saved(tmp_path, 5, keep=2)
    assert names(tmp_path) == ["40", "5"]
    saved(tmp_path, 41, keep=1)
    assert names(tmp_path) == ["41"]


def test_pruning_waits_for_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = saved(tmp_path, 1)
    monkeypatch.setattr(manifest, "write", raises(OSError(28, "No space left on device")))
    with pytest.raises(WriteError, match="step 2 was not saved: no space left"):
        saved(tmp_path, 2, keep=1)
    assert names(tmp_path) == ["1"]
    assert_same(checkpoint.restore(tmp_path, targets()).arrays, first)


def raises(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_a_step_is_replaced_only_by_a_finished_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = saved(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "write", raises(OSError(5, "Input/output error")))
        pending = checkpoint.save(tmp_path, 1, values(2), plan_json="{}", meta={})
        for _ in range(2):
            with pytest.raises(WriteError, match="Input/output error") as error:
                pending.wait()
    assert error.value.exit_code == 73 and names(tmp_path) == ["1"]
    assert_same(checkpoint.restore(tmp_path, targets()).arrays, first)
    second = saved(tmp_path, 1, seed=2)
    assert names(tmp_path) == ["1"] and checkpoint.verify(tmp_path) == []
    assert_same(checkpoint.restore(tmp_path, targets()).arrays, second)


def test_the_next_save_does_not_touch_a_save_in_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, reached, go_on = manifest.write, threading.Event(), threading.Event()

    def slow(folder: Path) -> None:
        reached.set()
        assert go_on.wait(240)
        write(folder)

    monkeypatch.setattr(manifest, "write", slow)
    checkpoint.save(tmp_path, 1, values(1), plan_json="{}", meta={})
    assert reached.wait(240) and checkpoint.describe(tmp_path)[0].state == "saving"
    assert checkpoint.verify(tmp_path) == []
    threading.Timer(0.2, go_on.set).start()
    saved(tmp_path / ".." / tmp_path.name, 2)
    assert manifest.steps(tmp_path) == [1, 2] and checkpoint.verify(tmp_path) == []


@pytest.mark.parametrize("read", ["restore", "weights"])
def test_a_step_removed_while_its_arrays_are_read_is_not_damage(
    read: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1)
    load = checkpoint.load

    def late(folder: Folder, *args: Any, **options: Any) -> Any:
        manifest.discard(folder.outer)
        return load(folder, *args, **options)

    monkeypatch.setattr(checkpoint, "load", late)
    floating = {path: target for path, target in targets().items() if jnp.issubdtype(target.dtype, jnp.floating)}
    with pytest.raises(DataError, match="step 1 was removed or renamed while it was being read"):
        checkpoint.restore(tmp_path, targets()) if read == "restore" else Source.of(tmp_path).read(floating)


def test_restore_waits_for_the_save_in_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 1)
    write, go_on = manifest.write, threading.Event()
    monkeypatch.setattr(manifest, "write", lambda folder: (go_on.wait(240), write(folder)))
    pending = checkpoint.save(tmp_path, 2, values(2), plan_json="{}", meta={})
    threading.Timer(0.2, go_on.set).start()
    assert checkpoint.restore(tmp_path, targets()).step == 2
    pending.wait()


def test_a_save_error_is_raised_by_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "write", raises(OSError(5, "Input/output error")))
        checkpoint.save(tmp_path, 1, values(), plan_json="{}", meta={})
        with pytest.raises(WriteError, match="step 1 was not saved"):
            saved(tmp_path, 2)
    saved(tmp_path, 2)
    assert names(tmp_path) == ["2"]


# ---- full and read-only disks


def test_a_full_disk_loses_one_save_and_leaks_no_bytes(small_disk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = saved(small_disk, 1)
    free = os.statvfs(small_disk).f_bfree
    noise = {f"w{i}": jax.random.bits(jax.random.key(i), (256, 256)) for i in range(8)}
    for _ in range(3):
        with pytest.raises(WriteError, match="step 2 was not saved: no space left on the device.*\n") as error:
            checkpoint.save(small_disk, 2, noise, plan_json="{}", meta={}, keep=1).wait()
        assert error.value.exit_code == 73 and "finished steps there: 1" in str(error.value)
        assert names(small_disk) == ["1"] and os.statvfs(small_disk).f_bfree == free
    with pytest.raises(WriteError, match="no space left"):
        checkpoint.save(small_disk, 2, values(), plan_json="x" * 2**20, meta={})
    assert names(small_disk) == ["1"] and os.statvfs(small_disk).f_bfree == free
    assert_same(checkpoint.restore(small_disk, targets(), warn=no_warning).arrays, first)
    saved(small_disk, 2)
    assert capfd.readouterr() == ("", "")


def test_writes_that_outlive_a_failed_save_leave_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_late(folder: Path) -> None:
        for _ in range(4):
            time.sleep(0.2)
            with suppress(FileNotFoundError):  # a parent may be removed at this moment
                folder.mkdir(parents=True, exist_ok=True)

    def fail(folder: Path, _: Any) -> None:
        writer = threading.Thread(target=write_late, args=(folder / "w",))
        writer.start()
        writers.append(writer)
        raise OSError(28, "No space left on device")

    writers: list[threading.Thread] = []
    monkeypatch.setattr(checkpoint, "_start", fail)
    with pytest.raises(WriteError, match="no space left"):
        saved(tmp_path, 2)
    writers[0].join()
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_created_is_a_write_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(WriteError, match="step 1 was not saved"):
            saved(root, 1)
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "holiday.jpg").touch()
    with pytest.raises(WriteError, match="1 exists and is not a checkpoint"):
        saved(tmp_path, 1)
    assert names(tmp_path / "1") == ["holiday.jpg"]


# ---- killed

CHILD = """
import os, shutil, signal, sys
from pathlib import Path
sys.path.insert(0, {here!r})
import test_checkpoint as t
from spanax.train.store import checkpoint, manifest

where, root = sys.argv[1], Path(sys.argv[2])
t.saved(root, 1)

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def before(last):
    rename = os.rename
    return lambda name, new, **folders: die() if new == last else rename(name, new, **folders)

start = checkpoint._start
patch = {{
    "while Orbax writes": (checkpoint, "_start", lambda *a: (start(*a), die())),
    "before the manifest": (os, "rename", before("manifest.json")),
    "while the old step goes": (shutil, "rmtree", die),
    "before the new step has its number": (os, "rename", before("1")),
}}[where]
setattr(*patch)
step = 1 if "step" in where else 2
checkpoint.save(root, step, t.values(2), plan_json="{{}}", meta={{"step": 2}})
signal.pause()
"""
# where the child dies, whether the second save counts
DEATHS = {
    "while Orbax writes": False,
    "before the manifest": False,
    "while the old step goes": True,
    "before the new step has its number": True,
}


@pytest.fixture(scope="module")
def graves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder of each child, all run at once: starting Python and JAX takes most of their time."""
    root = tmp_path_factory.mktemp("graves")
    code = CHILD.format(here=str(Path(__file__).parent))
    children = {
        where: subprocess.Popen([sys.executable, "-c", code, where, str(root / where)], stderr=subprocess.PIPE)
        for where in DEATHS
    }
    for where, child in children.items():
        _, stderr = child.communicate(timeout=240)
        assert child.returncode == -signal.SIGKILL, (where, stderr.decode())
    return root
