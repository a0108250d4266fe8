"""State is initialized sharded, with equal values on every mesh, and never replicated on a device."""

import functools
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
import zoo
from sampling import sampled
from spanax.trace.program import Program
from spanax.train.run import Run

LAYOUTS = [
    ("gpt", "fsdp+tensor", "fsdp=4,model=2"),
    ("gpt", "hsdp", "data=2,fsdp=4"),
    ("cnn", "fsdp", "fsdp=8"),
    ("dropout", "tensor", "model=8"),
    ("nnx-attention", "fsdp", "fsdp=8"),
]


@functools.cache
def program(name: str) -> Program:
    case = zoo.ZOO[name]
    return spanax.trace(build=case.build, optimizer=case.optimizer, batch=case.batch(16), loss=case.loss)


def plan(name: str, layout: str, mesh: str) -> spanax.Plan:
    return spanax.plan(program(name), spanax.cluster("cpu", spanax.MeshShape.of(mesh).size), layout=layout, mesh=mesh)


def start(name: str, layout: str = "data", mesh: str = "data=1", seed: int = 0) -> Run:
    return spanax.start(program(name), plan(name, layout, mesh), seed=seed)


@functools.cache
def on_one_device(name: str, seed: int = 0) -> dict[str, np.ndarray]:
    return {path: host(array) for path, array in start(name, seed=seed).arrays().items()}


def host(array: Any) -> np.ndarray:
    is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array)


def unequal(result: dict[str, Any], expected: dict[str, np.ndarray]) -> list[str]:
    assert result.keys() == expected.keys()
    return [path for path, array in result.items() if not np.array_equal(host(array), expected[path])]


@pytest.mark.parametrize(("name", "layout", "mesh"), sampled(LAYOUTS, LAYOUTS[::3]))
def test_the_same_bits_on_every_mesh_each_in_its_shards(name: str, layout: str, mesh: str) -> None:
    run = start(name, layout, mesh)
    assert unequal(run.arrays(), on_one_device(name)) == []
    for placement, array in zip(run.plan.leaves, run.state, strict=True):
        assert array.sharding.is_equivalent_to(placement.sharding(run.mesh), len(placement.shape)), placement
        assert {shard.data.shape for shard in array.addressable_shards} == {placement.local_shape}, placement
        assert len(array.addressable_shards) == run.mesh.size


def test_a_seed_decides() -> None:
    first, again, other = on_one_device("mlp"), start("mlp").arrays(), start("mlp", seed=1).arrays()
    assert unequal(again, first) == []
    assert {"up.kernel", "mid.kernel", "down.kernel"} <= set(unequal(other, first))


@pytest.mark.parametrize("name", sampled(["mlp", "cnn", "dropout", "gpt"], ["cnn", "dropout"]))
def test_the_numbers_are_those_of_rngs_with_that_seed(name: str) -> None:
    """Compiled as one program they are the same to the last bit but for how XLA fuses a product into a sum."""
    state = nnx.state(jax.jit(lambda: nnx.split(zoo.ZOO[name].build(nnx.Rngs(3)))[1])())
    built = dict(zip([leaf.path for leaf in program(name).leaves], jax.tree.leaves(state), strict=False))
    result = on_one_device(name, seed=3)
    for path, array in built.items():
        np.testing.assert_allclose(result[path], host(array), rtol=1e-6, atol=1e-9, err_msg=path)


def test_plain_draws_are_those_of_rngs_bit_for_bit() -> None:
    class Plain(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.a = nnx.Param(jax.random.uniform(rngs.params(), (8, 8)))
            self.b = nnx.Param(jax.random.bits(rngs.params(), (8,)).astype(jnp.float32))
            self.rngs = rngs

    batch = jax.ShapeDtypeStruct((8, 8), "float32")
    program = spanax.trace(
        build=Plain, optimizer=optax.sgd(0.1), batch=batch, loss=lambda model, x: jnp.mean(x @ model.a) + model.b.sum()
    )
    run = spanax.start(program, spanax.plan(program, spanax.cluster("cpu:8"), layout="fsdp"), seed=7)
    built = jax.tree.leaves(nnx.state(Plain(nnx.Rngs(7))))
    for array, leaf in zip(run.state, built, strict=False):
        np.testing.assert_array_equal(host(array), host(leaf))


# What a device holds meanwhile


class Watched:
    """`jax.jit`, with the memory of every program it compiles."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.programs: list[Any] = []
        original = jax.jit

        def jit(function: Any, **options: Any) -> Any:
            jitted = original(function, **options)

            def lower(*args: Any) -> Any:
                lowered = jitted.lower(*args)
                self.programs.append(lowered.compile().memory_analysis())
                return lowered

            return SimpleNamespace(lower=lower)

        monkeypatch.setattr(jax, "jit", jit)

    @property
    def largest_bytes(self) -> int:
        """The most that any program takes on one device, temporaries and result together."""
        return max(p.temp_size_in_bytes + p.output_size_in_bytes for p in self.programs)


def wide() -> Program:
    return spanax.trace(
        build=lambda rngs: nnx.Linear(512, 1024, use_bias=False, rngs=rngs),
        optimizer=optax.adam(1e-3),
        batch=jax.ShapeDtypeStruct((16, 512), "float32"),
        loss=lambda model, x: jnp.mean(model(x) ** 2),
    )


def test_initialization_stores_only_shards_and_bounded_temporaries(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = 512 * 1024 * 4 // 8
    wide_program = wide()
    watched = Watched(monkeypatch)
    run = spanax.start(wide_program, spanax.plan(wide_program, spanax.cluster("cpu:8"), layout="fsdp"))
    assert watched.programs
    assert watched.largest_bytes <= 4.5 * shard  # the shard, and its random bits, counters and signs
    held: dict[Any, int] = dict.fromkeys(run.mesh.devices.flat, 0)
    for array in run.state:
        for shard in array.addressable_shards:
            held[shard.device] += math.prod(shard.data.shape) * shard.data.dtype.itemsize
    assert set(held.values()) == {run.plan.state_bytes()}


def test_arrays_with_equal_initializers_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built = program("gpt-unrolled")
    compiled = []
    original = jax.jit
    monkeypatch.setattr(jax, "jit", lambda f, **options: compiled.append(f) or original(f, **options))
    spanax.start(built, spanax.plan(built, spanax.cluster("cpu:8"), layout="fsdp"))
    blocks = sum(leaf.path.startswith("blocks.0.") for leaf in built.leaves)
    assert blocks > 10 and len(compiled) < blocks + 10
    assert len(compiled) < sum(bool(leaf.shape) for leaf in built.leaves) / 3


class Filled(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (16, 8)))
        self.half_8 = nnx.Param(jnp.full((8,), 0.5, jnp.bfloat16))
        self.ones_88 = nnx.Param(jnp.ones((64,), jnp.int8).reshape(8, 8).astype(jnp.float32))
        self.large = nnx.Param(jnp.full((1025, 1024), 3.0))


def test_small_constant_arrays_need_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    built = spanax.trace(
        build=Filled,
        optimizer=optax.sgd(0.1, momentum=0.9),
        batch=jax.ShapeDtypeStruct((8, 16), "float32"),
        loss=lambda model, x: jnp.mean((x @ model.kernel @ model.ones_88 * model.half_8) ** 2) + model.large.sum(),
    )
    watched = Watched(monkeypatch)
    run = spanax.start(built, spanax.plan(built, spanax.cluster("cpu:8"), layout="fsdp"))
    # The kernel, what is converted once it was filled, and the large parameter and its momentum, created alike.
    assert len(watched.programs) == 3, [program.output_size_in_bytes for program in watched.programs]
    params = run.params()
    assert params["half_8"].dtype == jnp.bfloat16 and host(params["half_8"]).tolist() == [0.5] * 8
    assert (host(params["ones_88"]) == 1).all() and (host(params["large"]) == 3).all()
    for leaf, array in zip(run.plan.leaves, run.state, strict=True):
        assert array.sharding == leaf.sharding(run.mesh), leaf.path


@pytest.mark.parametrize("kind", ["orthogonal", "scan", "cond"])
def test_initializers_with_loops_and_decompositions(kind: str) -> None:
    """Decompositions and loops in an initializer run as they were traced."""

    def kernel(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32, **_: Any) -> Any:
        if kind == "orthogonal":
            return jax.nn.initializers.orthogonal()(key, shape, dtype)
        drawn = jax.random.normal(key, shape, dtype)
        if kind == "cond":
            return jax.lax.cond(drawn[0, 0] > 0, lambda: drawn, lambda: -drawn)
        return jax.lax.scan(lambda c, row: (c + row, c), jnp.zeros(shape[1:], dtype), drawn)[1]

    program = spanax.trace(
        build=lambda rngs: nnx.Linear(16, 16, kernel_init=kernel, rngs=rngs),
        optimizer=optax.sgd(0.1),
        batch=jax.ShapeDtypeStruct((8, 16), "float32"),
        loss=lambda model, x: jnp.mean(model(x) ** 2),
    )
    run = spanax.start(program, spanax.plan(program, spanax.cluster("cpu:8"), layout="fsdp"), seed=5)
    built = nnx.Linear(16, 16, kernel_init=kernel, rngs=nnx.Rngs(5)).kernel[...]
    np.testing.assert_allclose(host(run.params()["kernel"]), host(built), rtol=1e-5, atol=1e-6)


def test_parameters_may_be_arrays() -> None:
    inputs = np.arange(64, dtype=np.float32).reshape(8, 8)

    class Given(nnx.Module):
        def __init__(self) -> None:
            self.a = nnx.Param(jnp.asarray(inputs))
            self.b = nnx.Param(jnp.asarray(inputs[::-1].copy()))

    program = spanax.trace(
        build=Given,
        optimizer=optax.sgd(0.1),
        batch=jax.ShapeDtypeStruct((8, 8), "float32"),
        loss=lambda model, x: jnp.mean(x @ model.a @ model.b),
    )
    run = spanax.start(program, spanax.plan(program, spanax.cluster("cpu:8"), layout="fsdp"))
    np.testing.assert_array_equal(host(run.params()["a"]), inputs)
    np.testing.assert_array_equal(host(run.params()["b"]), inputs[::-1])
