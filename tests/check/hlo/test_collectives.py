"""Collectives out of programs: everything that a naive reader gets wrong, on programs of a few lines."""

import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import hlo_programs as text
import programs
import spanax
from spanax.check.hlo.collectives import Collective, collectives, totals, with_arrays
from spanax.check.hlo.module import OURS, Module, read_module, user_line
from spanax.check.hlo.replica_groups import axes_of, groups_of
from spanax.errors import DataError
from spanax.hardware.mesh import MeshShape


class Pair(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(64, 128, rngs=rngs)
        self.down = nnx.Linear(128, 32, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.up(x)))


FLAT, SQUARE = MeshShape.of("data=8"), MeshShape.of("data=2,model=4")


def of(program: str, mesh: MeshShape = FLAT) -> tuple[Collective, ...]:
    return collectives(text.read_text(program), mesh)


def compiled(function: Callable, mesh: MeshShape, *shapes: tuple[tuple[int, ...], PartitionSpec], out=None) -> Module:
    """A function compiled here, from shapes and how they are split."""
    there = mesh.build()
    ins = [jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(there, spec)) for shape, spec in shapes]
    jitted = jax.jit(function, out_shardings=None if out is None else NamedSharding(there, out))
    executable = jitted.lower(*ins).compile().runtime_executable()
    return read_module(executable.hlo_modules()[0].as_serialized_hlo_module_proto())


@pytest.mark.parametrize(
    "groups, axes, size",
    [
        ("{{0,4},{1,5},{2,6},{3,7}}", "data", 2),
        ("{{0,1,2,3},{4,5,6,7}}", "model", 4),
        ("{{0,1},{2,3},{4,5},{6,7}}", "~model", 2),
        ("{}", "data+model", 8),
        ("[2,4]<=[8]", "model", 4),
        ("[4,2]<=[2,4]T(1,0)", "data", 2),
        ("mesh['a'=2,'b'=4] {'b'}", "model", 4),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", "data", 2),
        ("mesh['a'=8] {'a':(2)4}", "model", 4),
        ("mesh['a'=2,'b'=4] {'a','b'}", "data+model", 8),
    ],
)
def test_replica_groups_in_every_encoding(groups: str, axes: str, size: int) -> None:
    [item] = of(text.all_reduce(groups), SQUARE)
    assert (item.kind, item.axes, item.group_size, item.num_bytes) == ("all-reduce", axes, size, 16)


def test_every_partition_is_in_one_group() -> None:
    for groups in ("[4,2]<=[2,4]T(1,0)", "mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", "mesh['a'=8] {'a':(2)4}"):
        [result] = [
            instruction
            for instruction in text.read_text(text.all_reduce(groups)).entry.instructions.values()
            if instruction.opcode == "all-reduce"
        ]
        assert sorted(device for group in groups_of(result) for device in group) == list(range(8))


def test_groups_of_one_device_communicate_nothing() -> None:
    assert of(text.all_reduce("[8,1]<=[8]")) == ()


KNOWN = ', backend_config={"known_trip_count":{"n":"7"}}'


@pytest.mark.parametrize(
    "start, go, step, config, runs",
    [
        ("zero, ten", "compare(i, n), direction=LT", "add(i, one)", "", 10),
        ("zero, ten", "compare(i, n), direction=LE", "add(i, two)", "", 6),
        ("ten, zero", "compare(i, n), direction=GT", "subtract(i, two)", "", 5),
        ("ten, ten", "compare(i, n), direction=NE", "add(i, one)", "", 0),
        ("zero, q", "compare(i, n), direction=LT", "add(i, one)", KNOWN, 7),
        ("zero, q", "compare(i, n), direction=LT", "add(i, one)", "", None),
    ],
)
def test_trip_counts_are_evaluated_or_annotated_and_unknown_ones_count_once(
    start: str, go: str, step: str, config: str, runs: int | None
) -> None:
    [item] = of(text.loop(start, go, step, config))
    times = 1 if runs is None else runs
    assert (item.runs, item.is_counted, item.num_bytes) == (times, runs is not None, 16 * times)


@pytest.mark.parametrize(
    "program, kind, num_bytes",
    [
        (text.STARTED, "all-gather", 64),
        (text.WRAPPED, "reduce-scatter", 16),
        (text.CLONED, "all-gather", 128),
        (text.VARIADIC, "all-reduce", 32),
        (text.sliced("table"), "reduce-scatter", 32),
        (text.sliced("same"), "all-reduce", 128),
        (text.windowed("ag"), "all-gather", 64),
        (text.windowed("rs"), "reduce-scatter", 16),
        (text.windowed("rs", is_conditional=True), "reduce-scatter", 16),
        (text.chained(adds=True), "reduce-scatter", 16),
    ],
    ids="started|wrapped|cloned|variadic|sliced|sliced elsewhere|gather loop|scatter loop|conditional|unrolled".split(
        "|"
    ),
)
def test_hidden_collectives_are_reported_by_kind(program: str, kind: str, num_bytes: int) -> None:
    [item] = of(program)
    assert (item.kind, item.num_bytes) == (kind, num_bytes)


def test_a_loop_of_permutes_is_that_of_its_ring() -> None:
    [item] = of(text.windowed("ag"), SQUARE)
    assert (item.axes, item.group_size, item.written) == ("model", 4, "permutes around a matmul")


def test_a_chain_of_permutes_without_sums_is_permutes() -> None:
    assert [item.kind for item in of(text.chained(adds=False), SQUARE)] == ["collective-permute"] * 5


def test_transfers_between_slices_use_the_major_axis() -> None:
    [item] = of(text.BETWEEN_SLICES, SQUARE)
    assert (item.kind, item.axes, item.num_bytes, item.group_size) == ("all-reduce", "data", 256, 2)


def test_a_scan_compiled_here_counts_its_body() -> None:
    def function(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    program = compiled(
        function,
        SQUARE,
        ((16, 32), PartitionSpec("data")),
        ((5, 32, 32), PartitionSpec(None, None, "model")),
        out=PartitionSpec("data"),
    )
    result = collectives(program, SQUARE)
    row = (16 // 2) * 32 * 4  # gathered in each round, and once more for the result
    assert sorted((item.runs, item.bytes_once) for item in result) == [(1, row), (5, row)]
    assert totals(result) == {"model": {"all-gather": 6 * row}}


@pytest.mark.usefixtures("devices")
def test_a_ragged_all_to_all_counts_the_rows_of_one_device() -> None:
    """Its other buffer has room for the rows of all."""
    shape = MeshShape.of("data=2,expert=4")

    def part(rows: jax.Array, sizes: jax.Array) -> jax.Array:
        room = jnp.zeros((32, 16))
        return jax.lax.ragged_all_to_all(rows, room, sizes, sizes, sizes, sizes, axis_name="expert")

    by_device = PartitionSpec(("data", "expert"))
    specs = by_device, PartitionSpec()
    mapped = jax.shard_map(part, mesh=shape.build(), in_specs=specs, out_specs=by_device, check_vma=False)
    lowered = jax.jit(mapped).lower(*(jax.ShapeDtypeStruct(*each) for each in (((64, 16), "float32"), ((4,), "int32"))))
    [move] = collectives(lowered.compiler_ir("hlo").as_serialized_hlo_module_proto(), shape)
    assert (move.kind, move.axes, move.num_bytes, move.group_size) == ("all-to-all", "expert", 8 * 16 * 4, 4)


def test_lines_of_libraries_are_ignored() -> None:
    flax, mine = "/x/site-packages/flax/nnx/nn/linear.py", "/home/me/model.py"
    assert user_line([(flax, 1), (mine, 2), ("/home/me/train.py", 3)]) == f"{mine}:2"
    assert user_line([(flax, 1), (str(OURS / "trace" / "step.py"), 2)]) == f"{flax}:1"
    assert user_line([(str(OURS / "models" / "gpt.py"), 4), (mine, 2)]).endswith("gpt.py:4")
    assert user_line([(str(OURS / "trace" / "rewrites" / "pure_loss.py"), 94)]) == ""
    for runner in ("step/replay/replay.py", "train/run.py", "check/compilers/lowered_step.py"):
        assert user_line([(str(OURS / runner), 9), ("/venv/bin/spanax", 8)]) == ""
    command = str(Path(sys.executable).parent / "spanax")
    assert user_line([(str(OURS / "trace" / "step.py"), 2), (command, 8)]) == ""


@pytest.mark.parametrize(
    "kind, axes, shape, path",
    [
        ("all-reduce", "data", "f32[64,32]", "up"),  # of a gradient, whose other dim is sharded over `model`
        ("all-gather", "model", "f32[64,128]", "up"),
        ("all-reduce", "data", "f32[64,128]", "up"),
        ("all-reduce", "data", "f32[64,64]", ""),
    ],
)
def test_collectives_have_the_arrays_of_their_shape(kind: str, axes: str, shape: str, path: str) -> None:
    program = spanax.trace(
        build=Pair, optimizer=optax.sgd(1e-2), batch=programs.array(8, 64), loss=lambda model, x: model(x).mean()
    )
    plan = spanax.plan(program, "cpu:8", mesh="data=2,model=4")
    move = Collective(kind, axes, "f32", shape, 4, 1, 2, "it", "", "")
    [result] = with_arrays([move], plan)
    assert [name.split(".")[0] for name in result.tensors] == [path] * bool(path)


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x0a\x7f", b"\x1b\x1b"])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(DataError, match="not a serialized program"):
        read_module(data)


def test_pairs_of_a_permute_that_is_not_a_ring() -> None:
    assert axes_of(((0, 1),), {"data": 8}) == "~data"


def test_a_collective_of_another_kind_on_the_channel_of_a_started_one_counts() -> None:
    reduced = (
        "r = f32[4] all-reduce(p), channel_id=7, use_global_device_ids=true, replica_groups=[1,8]<=[8], to_apply=add"
    )
    program = text.CLONED.replace(" a = (f32[32], u32[]) fusion", f" {reduced}\n a = (f32[32], u32[]) fusion")
    assert sorted((item.kind, item.num_bytes) for item in of(program)) == [("all-gather", 128), ("all-reduce", 16)]
