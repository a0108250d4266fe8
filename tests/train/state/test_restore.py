"""A run continues from a checkpoint: on any mesh, with equal values, at the same example."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import spanax
from zoo import ZOO

MESHES = ["data=2,model=4", "data=8,model=1", "fsdp=8", "fsdp=2,model=4", "data=1"]


@pytest.fixture(scope="module")
def program() -> spanax.Program:
    case = ZOO["dropout"]
    return spanax.trace(build=case.build, optimizer=case.optimizer, batch=case.batch(16), loss=case.loss)


def examples() -> list[dict[str, np.ndarray]]:
    batch = ZOO["dropout"].batch(64)
    return [{key: value[i] for key, value in batch.items()} for i in range(64)]


def plan_on(program: spanax.Program, mesh: str) -> spanax.Plan:
    size = spanax.MeshShape.of(mesh).size
    return spanax.plan(program, spanax.cluster("cpu", size), mesh=mesh)


@pytest.fixture(scope="module")
def saved(program: spanax.Program, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("saved")
    plan = plan_on(program, "data=4,model=2")
    run, data = spanax.start(program, plan, seed=3), spanax.batches(examples(), plan, seed=3, epochs=None)
    for _ in range(3):
        run.step(next(data))
    run.save(folder, data=data).wait()
    state = {path: host(array) for path, array in run.arrays().items()}
    following = {key: np.asarray(value) for key, value in next(data).items()}
    data.close()
    return {"folder": folder, "state": state, "following": following}


def host(array: jax.Array) -> np.ndarray:
    is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array)


@pytest.mark.parametrize("mesh", MESHES)
def test_another_mesh_has_the_same_bits_and_the_next_example(
    program: spanax.Program, saved: dict[str, Any], mesh: str
) -> None:
    plan = plan_on(program, mesh)
    run = spanax.restore(program, plan, saved["folder"])
    assert run.num_steps == 3
    for leaf, array in zip(plan.leaves, run.state, strict=True):
        np.testing.assert_array_equal(host(array), saved["state"][leaf.path], err_msg=leaf.path)
        assert array.sharding.shard_shape(array.shape) == leaf.local_shape
    data = spanax.batches(examples(), plan, seed=3, position=run.position, epochs=None)
    for key, value in next(data).items():
        np.testing.assert_array_equal(np.asarray(value), saved["following"][key])
    data.close()


def test_a_resumed_run_equals_an_uninterrupted_one(program: spanax.Program, tmp_path: Path) -> None:
    plan = plan_on(program, "fsdp=4,model=2")

    def steps(run: spanax.Run, data: spanax.Batches, count: int) -> None:
        for _ in range(count):
            run.step(next(data))

    whole, data = spanax.start(program, plan), spanax.batches(examples(), plan, epochs=None)
    steps(whole, data, 2)
    whole.save(tmp_path, data=data).wait()
    steps(whole, data, 3)
    resumed = spanax.restore(program, plan, tmp_path)
    steps(resumed, spanax.batches(examples(), plan, position=resumed.position, epochs=None), 3)
    for path, array in resumed.arrays().items():
        np.testing.assert_array_equal(host(array), host(whole.arrays()[path]), err_msg=path)
    moved = spanax.restore(program, plan, tmp_path)
    assert any((host(a) != host(b)).any() for a, b in zip(moved.state, whole.state, strict=True)), "nothing to compare"


def test_another_model_is_refused(program: spanax.Program, saved: dict[str, Any]) -> None:
    case = ZOO["mlp"]
    other = spanax.trace(build=case.build, optimizer=case.optimizer, batch=case.batch(16), loss=case.loss)
    with pytest.raises(spanax.DataError):
        spanax.restore(other, plan_on(other, "data=8"), saved["folder"])
    with pytest.raises(spanax.SpanaxError, match="another program"):
        spanax.restore(other, plan_on(program, "data=8"), saved["folder"])
