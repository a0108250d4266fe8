"""Lists of blocks and stacks on disk: a run continues from a checkpoint of the other, bit-equal."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from spanax.models.gpt import GPT, GPTConfig, example_batch, loss
from spanax.train.store.stacked_layers import Group, Regrouped, groups

CONFIG = GPTConfig(64, seq_len=8, num_layers=2, num_heads=2, embed_dim=16, dropout=0.1, scan_layers=False)


def listed(rngs: nnx.Rngs) -> GPT:
    return GPT(CONFIG, rngs)


@dataclass(frozen=True)
class Form:
    """A way to write the same model."""

    build: Any

    def program(self, optimizer: Any = None) -> spanax.Program:
        batch = example_batch(8, CONFIG.seq_len)
        return spanax.trace(build=self.build, optimizer=optimizer or optax.adamw(1e-2), batch=batch, loss=loss)


FORMS = {
    "list": Form(listed),
    "stacked": Form(lambda rngs: spanax.stack(listed(rngs))),
    "stack": Form(partial(GPT, replace(CONFIG, scan_layers=True))),
}
PROGRAMS: dict[str, spanax.Program] = {}


def program(form: str) -> spanax.Program:
    if form not in PROGRAMS:
        PROGRAMS[form] = FORMS[form].program()
    return PROGRAMS[form]


def planned(form: str, mesh: str, layout: str = "data") -> spanax.Plan:
    return spanax.plan(program(form), spanax.cluster("cpu", 8), mesh=mesh, layout=layout)


def host(array: jax.Array) -> np.ndarray:
    is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array)


def by_layer(run: spanax.Run) -> dict[str, np.ndarray]:
    """The state as arrays of single layers."""
    result = {}
    for path, array in run.arrays().items():
        before, is_block, rest = path.rpartition("blocks.")
        if not is_block or rest.split(".")[0].isdigit():
            result[path] = host(array)
        else:
            result |= {f"{before}blocks.{layer}.{rest}": host(array)[layer] for layer in range(CONFIG.num_layers)}
    return result


def assert_same_bits(first: spanax.Run, second: spanax.Run) -> None:
    ours, theirs = by_layer(first), by_layer(second)
    assert ours.keys() == theirs.keys()
    for path in ours:
        np.testing.assert_array_equal(ours[path], theirs[path], err_msg=path)


def noise(array: jax.Array, rng: np.random.Generator) -> jax.Array:
    """Other numbers in the same place, so that no two layers hold the same."""
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        return array
    drawn = rng.normal(size=array.shape) if array.dtype == "float32" else rng.integers(1, 99, array.shape)
    return jax.device_put(drawn.astype(array.dtype), array.sharding)


@pytest.mark.parametrize(
    "here, there, mesh",
    [
        pytest.param("list", "stacked", "fsdp=8", marks=pytest.mark.slow),  # also below, in training
        ("list", "stack", "data=2,fsdp=2,model=2"),
        pytest.param("stack", "list", "fsdp=4,model=2", marks=pytest.mark.slow),
    ],
)
def test_a_run_continues_in_the_other_form_and_back(here: str, there: str, mesh: str, tmp_path: Path) -> None:
    layout = "fsdp+tensor" if "model" in mesh else "fsdp"
    run, rng = spanax.start(program(here), planned(here, mesh, layout), seed=3), np.random.default_rng(0)
    run.state, run.num_steps = [noise(array, rng) for array in run.state], 7
    run.save(tmp_path / "a").wait()
    other = spanax.restore(program(there), planned(there, mesh, layout), tmp_path / "a")
    assert other.num_steps == 7
    assert_same_bits(run, other)
    for placement, array in zip(other.plan.leaves, other.state, strict=True):
        assert array.sharding.shard_shape(array.shape) == placement.local_shape
    counts = [path for path in by_layer(run) if path.endswith("rngs.count")]
    assert len(counts) > CONFIG.num_layers and any(".mu.blocks.1." in path for path in by_layer(run))

    other.save(tmp_path / "b").wait()
    back = spanax.restore(program(here), planned(here, "data=8", "data"), tmp_path / "b")
    assert_same_bits(run, back)


@pytest.mark.slow
def test_only_lists_and_stacks_are_the_same_program(tmp_path: Path) -> None:
    plan = planned("stack", "data=8")
    run = spanax.start(program("stack"), plan)
    run.save(tmp_path).wait()
    deeper = Form(partial(GPT, replace(CONFIG, num_layers=3))).program()
    with pytest.raises(spanax.DataError, match="of another model"):
        spanax.restore(deeper, spanax.plan(deeper, spanax.cluster("cpu", 8), mesh="data=8"), tmp_path)
    other = FORMS["list"].program(optax.sgd(0.1, momentum=0.9))
    with pytest.raises(spanax.DataError, match="of another model"):
        spanax.restore(other, spanax.plan(other, spanax.cluster("cpu", 8), mesh="data=8"), tmp_path)


def test_only_complete_sets_of_equal_layers_form_a_stack() -> None:
    single = {f"a.{i}.w": "float32[8,4]" for i in range(3)}
    stacks = [Group("a.w", (3,), ("a.0.w", "a.1.w", "a.2.w"))]
    assert groups({"a.w": "float32[3,8,4]"}, single) == stacks
    for stack in ("float32[2,8,4]", "float32[4,8,4]", "bfloat16[3,8,4]", "float32[3,4,8]", "float32[8,4]"):
        assert groups({"a.w": stack}, single) == []
    assert groups({"a.w": "float32[3,8,4]"}, single | {"a.1.w": "float32[8,5]"}) == []
    assert groups({"a.w": "float32[3,8,4]"}, single | {"a.3.w": "float32[8,4]"}) == []
    nested = {f"a.{i}.b.{j}.w": "key<fry>[]" for i in range(2) for j in range(11)}
    (group,) = groups({"a.b.w": "key<fry>[2,11]"}, nested)
    assert group.sizes == (2, 11) and group.layers[:3] == ("a.0.b.0.w", "a.0.b.1.w", "a.0.b.2.w")
    assert group.layers[10] == "a.0.b.10.w"
    either = {f"a.{i}.b.{j}.w": "float32[]" for i in range(2) for j in range(1)}
    assert groups({"a.b.0.w": "float32[2]"}, either) == [Group("a.b.0.w", (2,), ("a.0.b.0.w", "a.1.b.0.w"))]
    ambiguous = {"a.0.0.w": "float32[]", "a.0.1.w": "float32[]", "a.1.0.w": "float32[]"}
    assert groups({"a.0.w": "float32[2]"}, ambiguous) == []


def test_a_layer_of_a_stack_is_read_as_one_slice() -> None:
    mesh = spanax.MeshShape.of("fsdp=4,model=2").build()
    spec = {"a.w": jax.P("fsdp", None, "model"), "a.b": jax.P("fsdp", None)}
    shapes = {"a.w": (4, 8, 6), "a.b": (4, 3)}
    targets = {
        path: jax.ShapeDtypeStruct(shape, "float32", sharding=jax.NamedSharding(mesh, spec[path]))
        for path, shape in shapes.items()
    }
    saved = {f"a.{i}.w": "float32[8,6]" for i in range(4)} | {f"a.{i}.b": "float32[3]" for i in range(4)}
    reads = Regrouped.of(saved, targets).reads
    assert set(reads) == set(saved)
    assert reads["a.2.w"].sharding.shard_shape((8, 6)) == (2, 3)
    assert reads["a.2.b"].sharding.shard_shape((3,)) == (3,), "3 divide no 4 ways"
