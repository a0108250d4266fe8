"""Memory: the exact state, and the live values in addition, compared with computations by hand."""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
import zoo
from programs import array, small_gpt, zoo_program
from spanax.plan.cost.memory.state import state_of
from spanax.plan.cost.peak_memory import GROUPS, MemoryUse, Meshes, memory_use, walk
from spanax.plan.evaluate import evaluate
from spanax.plan.place import resolver_of
from spanax.plan.plan import Plan
from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.trace.program import Program

MESHES = [
    ("data", "data=8"),
    ("zero1", "fsdp=8"),
    ("zero2", "fsdp=8"),
    ("fsdp", "fsdp=8"),
    ("hsdp", "data=2,fsdp=4"),
    ("tensor", "model=8"),
    ("tensor+seq", "model=4"),
    ("data+tensor", "data=2,model=4"),
    ("fsdp+tensor", "fsdp=4,model=2"),
    ("fsdp+tensor+seq", "fsdp=2,model=4"),
    ("context", "data=4,context=2"),
]

VARIED = ["gpt-unrolled", "cnn", "dropout", "moe", "lora", "ssm", "multitask", "annotated", "mixed-dtype", "clip"]
"""Stacked or not, running means, random state, other optimizers (Adafactor, Adagrad), other dtypes, scalars."""


def by_group(memory: MemoryUse, index: int) -> dict[str, int]:
    return {name: int(values[index]) for name, values in memory.groups.items()}


def planned(program: Program, layout: str, mesh: str) -> Plan:
    return spanax.plan(program, spanax.cluster("cpu", spanax.MeshShape.of(mesh).size), layout=layout, mesh=mesh)


def groups(
    program: Program, layout: str = "data", mesh: str = "data=1", *, is_tpu: bool = False, **arguments: Any
) -> dict[str, int]:
    """Bytes by group of one candidate; a batch of `scale` times the traced one, by default without microbatches."""
    resolver = resolver_of(program, planned(program, layout, mesh))
    sizes = np.asarray([[size] for _, size in resolver.mesh.axes])
    numbers: dict[str, Any] = {"num_stages": 1, "num_microbatches": 1, "in_flight": 1, "scale": 1.0}
    arrays = {name: np.asarray([arguments.pop(name, default)]) for name, default in numbers.items()}
    result = memory_use(
        state_of(resolver),
        walk(ShardedProgram(resolver, program.step), is_tpu=is_tpu),
        Meshes(sizes, **arrays),
        **arguments,
    )
    assert result.peak_bytes[0] == pytest.approx(sum(values[0] for values in result.groups.values()))
    assert result.upper_bytes[0] >= result.peak_bytes[0]
    return by_group(result, 0)


def on_top(result: dict[str, int]) -> int:
    """Bytes in addition to state and batch."""
    return sum(result[name] for name in GROUPS)


# The state, exactly


def check_state(program: Program, layout: str, mesh: str) -> None:
    plan, result = planned(program, layout, mesh), groups(program, layout, mesh)
    named = {"param": "parameters", "optimizer": "optimizer", "other": "other state"}
    assert {kind: result[name] for kind, name in named.items()} == {kind: plan.state_bytes(kind) for kind in named}
    assert result["batch"] == sum(leaf.local_bytes for leaf in plan.batch)


@pytest.mark.parametrize(("layout", "mesh"), MESHES)
def test_state_bytes_of_a_gpt_are_the_plans(layout: str, mesh: str) -> None:
    check_state(zoo_program("gpt"), layout, mesh)


@pytest.mark.parametrize("name", VARIED)
def test_state_bytes_of_the_zoo_are_the_plans(name: str) -> None:
    for layout, mesh in (("zero1", "fsdp=8"), ("fsdp+tensor", "fsdp=4,model=2")):
        check_state(zoo_program(name), layout, mesh)


def squared(model: nnx.Module, x: jax.Array) -> jax.Array:
    return (model(x) ** 2).mean()


# Live values in addition


class TwoLayers(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(32, 128, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(128, 16, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.relu(self.up(x)))


@functools.cache
def two_layers(batch_size: int = 64) -> Program:
    return spanax.trace(build=TwoLayers, optimizer=optax.sgd(0.1), batch=array(batch_size, 32), loss=squared)


def test_the_peak_of_two_layers_by_hand() -> None:
    """On a TPU it is where the last gradient is made, of what went into `relu` and the gradient that came, masked on
    the way; where matmuls read what lies in memory, it is where that is masked.
    """
    result = groups(two_layers(), is_tpu=True)
    elsewhere = groups(two_layers())
    assert (elsewhere["activations"], elsewhere["gradients"]) == (4 * 3 * 64 * 128 + 4, 4 * 128 * 16)
    assert result == {
        "parameters": 4 * (32 * 128 + 128 * 16),
        "optimizer": result["optimizer"],
        "other state": 0,
        "batch": 4 * 64 * 32,
        "activations": 4 * 2 * 64 * 128 + 4,  # and the loss
        "gradients": 4 * (32 * 128 + 128 * 16),
        "gathered weights": 0,
    }


def test_the_peak_of_two_layers_on_eight_devices_by_hand() -> None:
    up, down = 4 * 32 * 128, 4 * 128 * 16
    result = groups(two_layers(), "data", "data=8", is_tpu=True)
    assert (result["activations"], result["gradients"]) == (4 * 2 * 8 * 128 + 4, down + up)
    elsewhere = groups(two_layers(), "data", "data=8")  # the masked value is in memory, and its operand is dead
    assert (elsewhere["activations"], elsewhere["gradients"]) == (4 * 8 * 128 + 4, down + up)
    # If stored sharded, the last sum is replicated before it is sharded, with its shard and that of the first.
    # Of 64 examples, the weights would stay, and the activations move.
    result = groups(two_layers(256), "fsdp", "fsdp=8", is_tpu=True)
    assert result["activations"] == 4 * 2 * 32 * 128 + 4
    assert (result["gradients"], result["gathered weights"]) == (up + up // 8 + down // 8, 0)
    # The hidden dim is split, and the 16 outputs are not: it is where their gradient goes back through `down`.
    result = groups(two_layers(), "tensor", "model=8", is_tpu=True)
    assert (result["activations"], result["gradients"]) == (4 * (2 * 64 * 128 // 8 + 64 * 16) + 4, down // 8)


def test_a_gathered_weight_is_live_while_it_is_used() -> None:
    """With few examples a device, yet too many to move their activations instead."""
    program = two_layers(256)
    stored, replicated = groups(program, "fsdp", "fsdp=8"), groups(program, "data", "data=8")
    assert stored["parameters"] == replicated["parameters"] // 8
    assert stored["gathered weights"] + stored["gradients"] >= 4 * 32 * 128
    assert replicated["gathered weights"] == 0


class Tied(nnx.Module):
    """Logits from the transposed table of an embedding."""

    def __init__(self, rngs: nnx.Rngs):
        self.first, self.table = nnx.Linear(64, 64, rngs=rngs), nnx.Embed(4096, 64, rngs=rngs)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        return self.table.attend(self.first(inputs))


def test_a_gathered_table_is_live_until_its_transposition_is_used() -> None:
    """The gradient of the logits is made by another matmul, after the loss."""
    program = spanax.trace(build=Tied, optimizer=optax.sgd(0.1), batch=array(16384, 64), loss=squared)
    result = groups(program, "fsdp", "fsdp=8", is_tpu=True)
    assert result["gathered weights"] >= 4 * 4096 * 64, result


def test_arrays_of_more_bytes_than_an_integer_has_bits_for_are_counted() -> None:
    program = spanax.trace(
        build=lambda rngs: nnx.Linear(64, 64, rngs=rngs),
        optimizer=optax.sgd(0.1),
        batch=jax.ShapeDtypeStruct((1 << 40, 1 << 20, 64), "float32"),
        loss=lambda model, x: jax.numpy.einsum("bsd,btd->bst", model(x), x).mean(),
    )
    plan = spanax.plan(program, spanax.cluster("cpu:8"), layout="context", mesh="context=8")
    scores = 4 * (1 << 40) * (1 << 20) ** 2 / 8
    assert evaluate(program, plan, spanax.cluster("cpu:8")).peak_bytes >= scores


def test_peak_grows_with_the_batch_and_the_state_does_not() -> None:
    result = [groups(small_gpt(), scale=scale) for scale in (0.5, 1.0, 2.0, 4.0)]
    activations = [each["activations"] for each in result]
    assert activations == sorted(set(activations))
    assert activations[3] == pytest.approx(2 * activations[2], rel=0.01)
    assert len({each["parameters"] for each in result}) == len({each["optimizer"] for each in result}) == 1
    assert [each["batch"] for each in result] == [scale * result[1]["batch"] for scale in (0.5, 1, 2, 4)]


def test_full_remat_stores_one_carry_per_layer() -> None:
    B, T, D, L = 16, zoo.GPT_SCAN.seq_len, zoo.GPT_SCAN.embed_dim, 24
    deep, shallow = (groups(small_gpt(remat=True, num_layers=layers))["activations"] for layers in (L, L // 2))
    assert deep - shallow == pytest.approx(L // 2 * 4 * B * T * D, rel=0.05)


def test_stages_divide_layers_and_store_activations_in_flight() -> None:
    each, four = (groups(small_gpt(num_layers=4), num_stages=stages) for stages in (1, 4))
    state = {leaf.path: leaf for leaf in small_gpt(num_layers=4).leaves}
    layers = sum(leaf.num_bytes for leaf in state.values() if "layers" in leaf.axes and leaf.kind == "param")
    assert each["parameters"] - four["parameters"] == layers * 3 // 4
    assert four["activations"] < each["activations"]
    busy = groups(small_gpt(num_layers=4), num_stages=4, in_flight=4, num_microbatches=4)
    assert busy["activations"] > 2 * four["activations"]
    assert busy["parameters"] == four["parameters"]


def test_microbatches_store_less_and_accumulate_gradients() -> None:
    """The accumulated gradients and those of one microbatch are live, as stored."""
    program = zoo_program("gpt")
    replicated, split = (
        groups(program, *position)["parameters"] for position in (("data", "data=8"), ("fsdp", "fsdp=8"))
    )
    for layout, mesh, added in (
        ("data", "data=8", replicated),
        ("zero1", "fsdp=8", replicated),
        ("zero2", "fsdp=8", split),
        ("fsdp", "fsdp=8", split),
    ):
        each = groups(program, layout, mesh)
        four = groups(program, layout, mesh, scale=0.25, num_microbatches=4)
        alone = groups(program, layout, mesh, scale=0.25)
        assert four["activations"] == alone["activations"] < each["activations"]
        assert four["gradients"] == alone["gradients"] + added
        assert four["batch"] == each["batch"]


def test_fused_attention_stores_no_scores() -> None:
    B, H, T, L = 16, 8, zoo.GPT_SCAN.seq_len, zoo.GPT_SCAN.num_layers
    plain, fused = (groups(small_gpt(), fused_attention=fused)["activations"] for fused in (False, True))
    assert plain - fused >= L * B * H * T * T * 4


def test_a_mask_is_live_where_matmuls_read_memory() -> None:
    """JAX makes it before the loop over layers; a TPU's compiler makes it again where it is read."""
    B, T = 16, zoo.GPT_SCAN.seq_len
    assert groups(small_gpt())["activations"] - groups(small_gpt(), is_tpu=True)["activations"] >= B * T * T
