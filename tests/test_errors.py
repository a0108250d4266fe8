"""Every error message equals golden/errors.txt (`make golden` updates it)."""

import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import golden_messages
import reading
import spanax
from machines import Device
from programs import array, small_gpt
from spanax.errors import DataError, NumbersError, SpanaxError, WriteError, nearest
from spanax.hardware.chip import Chip
from spanax.hardware.chips import chip_named, read_chip
from spanax.hardware.cluster import Cluster, cluster
from spanax.hardware.links import axis_link
from spanax.hardware.mesh import MeshShape
from spanax.hardware.probe import probe
from spanax.models.images import Digits
from spanax.plan.choose import plan
from spanax.plan.plan import Schedule
from spanax.processes.devices import simulate
from spanax.processes.processes import Hosts
from spanax.trace.initial_state import Eager
from spanax.trace.program import Program
from spanax.trace.rewrites.chunked_loss import chunked_loss
from spanax.trace.rewrites.pure_loss import with_extra
from spanax.trace.tracing import trace
from spanax.train.config import TrainConfig, check
from spanax.train.data.batches import batches
from spanax.train.data.source import Loader, Options
from spanax.train.state.start import start
from spanax.units import quantity

GOLDEN = Path(__file__).parent / "golden" / "errors.txt"


def misspelt() -> None:
    raise SpanaxError(f"unknown layout 'fdsp'; {nearest('fdsp', ['data', 'fsdp', 'tensor'])}")


def without_scikit_learn() -> None:
    with mock.patch("importlib.util.find_spec", return_value=None):
        Digits()


def in_dtype(dtype: str = "bfloat16") -> None:
    trace(
        build=reading.Masked, optimizer=optax.sgd(0.1), batch=jax.ShapeDtypeStruct((8, 1, 8, 8), "float32"),
        loss=lambda model, x: model(x).mean(), compute_dtype=dtype,
    )  # fmt: skip


def in_two(loss: Callable[..., Any]) -> Any:
    """A loss of a weight and a batch of nine tokens, in two chunks."""
    return chunked_loss(loss, 2)(np.ones((3, 5)), np.ones((9, 3)))


def named() -> nnx.Module:
    """A model with an array of text."""
    model = nnx.Module()
    model.names = np.array(["cat", "dog"])  # type: ignore[attr-defined]
    return model


def closed(rngs: nnx.Rngs) -> nnx.Module:
    """A model with an array in a closure."""
    model, scale = nnx.Sequential(nnx.Linear(4, 2, rngs=rngs)), jnp.ones(2)
    model.layers.append(lambda x: x * scale)
    return model


def traced(build: Callable[..., Any], **options: Any) -> Any:
    """A workload around a build."""
    squares = lambda model, x: (model(x) ** 2).mean()  # noqa: E731
    return trace(build=build, optimizer=optax.sgd(0.1), batch=np.ones((8, 4), "float32"), loss=squares, **options)


def under_explicit_axes(loss: Callable[..., Any]) -> Any:
    """A workload that is traced under a mesh with Explicit axes."""
    kinds = (AxisType.Explicit,) * 2
    with jax.sharding.use_abstract_mesh(AbstractMesh((4, 2), ("data", "model"), axis_types=kinds)):
        batch, optimizer = jax.ShapeDtypeStruct((8, 4), "float32"), optax.sgd(0.1)
        return trace(build=lambda rngs: nnx.Linear(4, 4, rngs=rngs), optimizer=optimizer, batch=batch, loss=loss)


def constrained(model: Any, x: Any) -> Any:
    """A loss that asserts a sharding that its batch does not have, and requires Explicit axes."""
    x = jax.lax.with_sharding_constraint(x, P("data"))
    return (model(jax.sharding.reshard(x, P("data"))) ** 2).mean()


def mapped(model: Any, x: Any) -> Any:
    """A loss that is mapped over eight devices."""
    by = P(("data", "model"))
    return (jax.shard_map(lambda x: x * 2, in_specs=by, out_specs=by)(jax.sharding.reshard(model(x), by)) ** 2).mean()


def built_on_no_cpu() -> None:
    with mock.patch("jax.local_devices", side_effect=RuntimeError), mock.patch.dict("os.environ", JAX_PLATFORMS="cuda"):
        Eager(reading.build).model()


def linear(**options: Any) -> Program:
    """One layer under SGD."""
    return spanax.trace(
        build=lambda rngs: nnx.Linear(8, 8, rngs=rngs), optimizer=optax.sgd(0.1), batch=array(8, 8),
        loss=lambda model, x: (model(x) ** 2).mean(), **options,
    )  # fmt: skip


def like(reference: Any, kernel: Any = lambda x, scale: x * scale) -> Any:
    """A kernel with a reference, on one row."""
    return spanax.partition_like(kernel, reference)(np.ones((1, 4), "float32"), np.ones(4, "float32"))


@jax.custom_vjp
def tripled(x: Any, scale: Any) -> Any:
    """A product whose gradient of the scale is three times as large."""
    return x * scale


tripled.defvjp(
    lambda x, scale: (x * scale, (x, scale)), lambda saved, grad: (grad * saved[1], 3 * (grad * saved[0]).sum(0))
)

TABLE = {"peak": {"bf16": "100 TFLOP/s"}, "memory": "80 GiB", "memory_rate": "1 TB/s"}

# What goes wrong -> the call that meets it. Add a line for every error a user can reach.
ERRORS: dict[str, Callable[[], Any]] = {
    "errors: a name nobody knows": misspelt,
    "mesh: a size of zero": lambda: MeshShape.of({"data": 0}),
    "mesh: a negative size in text": lambda: MeshShape.of("data=-2"),
    "mesh: a size that is not an integer": lambda: MeshShape.of({"data": 2.5}),  # type: ignore[dict-item]
    "mesh: a size that is a truth value": lambda: MeshShape.of({"data": True}),
    "mesh: an axis twice": lambda: MeshShape.of("data=4,data=2"),
    "mesh: no equals sign": lambda: MeshShape.of("data4"),
    "mesh: no name": lambda: MeshShape.of("=4"),
    "mesh: a size that is a word": lambda: MeshShape.of("data=4,model=two"),
    "unit: none": lambda: quantity("80", "bytes", key="memory", where="mine.toml"),
    "unit: of another kind": lambda: quantity("80 GB", "bytes per second", key="inside.rate", where="mine.toml"),
    "unit: an absurd value": lambda: quantity("80 TiB", "bytes", key="memory", where="mine.toml"),
    "unit: no number": lambda: quantity(["80 GiB"], "bytes", key="memory", where="mine.toml"),
    "chip: unknown": lambda: chip_named("h1000"),
    "chip: a dtype it has not": lambda: chip_named("v100").flops_per_second("bf16"),
    "chip file: a key too few": lambda: read_chip("mine", {"peak": {}, "memory": "80 GiB"}, "mine.toml", {}),
    "chip file: a key misspelt": lambda: read_chip("mine", {"memroy": "80 GiB"}, "mine.toml", {}),
    "chip file: like nothing known": lambda: read_chip("mine", {"like": "h1000"}, "mine.toml", {"h100": {}}),
    "chip file: a link without a rate": lambda: read_chip("mine", {**TABLE, "inside": {}}, "mine.toml", {}),
    "chip file: a link of no kind": lambda: read_chip("mine", {**TABLE, "inside": {"kind": "ring"}}, "mine.toml", {}),
    "chip file: no count": lambda: read_chip("mine", {**TABLE, "devices_per_host": 0}, "mine.toml", {}),
    "chip file: no shape": lambda: read_chip("mine", {**TABLE, "inside": {"shape": 8, "rate": "1 GB/s"}}, "m.toml", {}),
    "chip file: more usable than there is": lambda: read_chip("m", {**TABLE, "usable_memory": "81 GiB"}, "m.toml", {}),
    "hosts: no coordinator": lambda: Hosts.of({"SPANAX_NUM_HOSTS": "2"}),
    "hosts: joined too late": lambda: jax.devices() and Hosts(2, 1, coordinator="127.0.0.1:9911").join(),
    "cluster: an unknown chip": lambda: cluster("h1000:8"),
    "cluster: no devices": lambda: cluster("h100:0"),
    "cluster: no file": lambda: cluster("no-such.toml:8"),
    "cluster: part of a node": lambda: cluster("h100:12"),
    "cluster: too large a node": lambda: cluster("h100:2x16"),
    "cluster: slices of a switch": lambda: cluster("h100:2x8:2"),
    "cluster: no slice": lambda: cluster("v5e:512"),
    "cluster: too few dims": lambda: cluster("v5p:8x8"),
    "cluster: too large a slice": lambda: cluster("v6e:16x32"),
    "cluster: part of a host": lambda: cluster("v5p:3x2x1"),
    "cluster: part of a chip": lambda: cluster("v7:3"),
    "link: no such mesh axis": lambda: axis_link(cluster("h100:8"), MeshShape.of("data=8"), "date"),
    "link: a torus not filled": lambda: axis_link(cluster("v5p:4x4x4"), MeshShape.of("data=32"), "data"),
    "link: unknown": lambda: axis_link(Cluster(Chip("Quantum 9"), 8), MeshShape.of("data=8"), "data"),
    "probe: no time": lambda: probe([], seconds=0),
    "probe: an unknown chip of unknown memory": lambda: probe([Device("Quantum 9", limit=None)]),
    "mesh: too few devices": lambda: MeshShape.of("data=4,model=2").build(devices=[0, 1, 2, 3]),
    "chunks: no logits": lambda: in_two(lambda weight, batch: weight.sum() + batch.sum()),
    "chunks: tokens that they do not divide": lambda: in_two(lambda weight, batch: (batch @ weight).sum()),
    "batches: no epoch": lambda: batches([], None, epochs=0),  # type: ignore[arg-type]
    "batches: an iterator, twice": lambda: Loader(iter([{"x": 1}]), Options(epochs=2)),
    "loss: an operation without bfloat16": in_dtype,
    "loss: an integer": lambda: with_extra((np.int32(3), {"correct": np.int32(3)})),
    "init: partial without weights": lambda: start(None, None, partial=True),  # type: ignore[arg-type]
    "simulate: no devices": lambda: simulate(0),
    "simulate: after JAX has started": lambda: (jax.devices(), simulate(16)),
    "build: reads the value of a parameter": lambda: traced(reading.build),
    "build: an array in a closure": lambda: traced(closed),
    "build: eager without a CPU": built_on_no_cpu,
    "mesh: a batch without the sharding that the loss asserts": lambda: under_explicit_axes(constrained),
    "mesh: a shard_map over other devices": lambda: plan(under_explicit_axes(mapped), cluster("cpu:4"), layout="data"),
    "build: an array of text": lambda: traced(named),
    "plan: flash in a ring": lambda: spanax.plan(linear(), "h100:8", layout="ring", attention="flash"),
    "plan: a sequence to shard without a layout": lambda: spanax.plan(linear(), "cpu:8", sequence_parallel=True),
    "plan: another compute dtype": lambda: spanax.start(
        linear(compute_dtype="float32"),
        spanax.plan(linear(), "cpu:8", layout="data", schedule=Schedule(compute_dtype="bfloat16")),
    ),
    "search: mesh axes in another order": lambda: spanax.search(linear(), "a100:2x4", mesh="model=4,fsdp=2"),
    "search: a policy without layers": lambda: spanax.search(linear(), "cpu:8", remat=("full",)),
    "search: a partial policy without layers": lambda: spanax.search(linear(), "cpu:8", remat=("full:2",)),
    "trace: a partial policy without a number": lambda: linear().variant(remat="full:all"),
    "trace: a partial policy of another name": lambda: linear().variant(remat="full:2,none"),
    "trace: a partial policy of all layers": lambda: small_gpt().variant(remat="full:3"),
    "plan: a partial policy in stages": lambda: plan(
        small_gpt().variant(remat="full:1"), cluster("cpu:2"), mesh="pipe=2", layout="pipeline"
    ),
    "train: a plan and a dtype": lambda: check(TrainConfig(plan="p.json", dtype="bfloat16", remat="full")),
    "kernel: no reference": lambda: like("plain"),
    "kernel: a reference of fewer arguments": lambda: like(lambda x: x),
    "kernel: a reference of another shape": lambda: like(lambda x, scale: (x * scale)[0]),
    "kernel: a reference of another dtype": lambda: like(lambda x, scale: (x * scale).astype(int)),
    "kernel: a reference of another structure": lambda: like(lambda x, scale: [x * scale]),
    "kernel: another function": lambda: like(lambda x, scale: x + scale),
    "kernel: another gradient": lambda: like(lambda x, scale: x * scale, tripled),
    "kernel: an array around it": lambda: jax.jit(lambda y: like(lambda x, scale: x * y, lambda x, scale: x * y))(1.0),
    "pad: examples": lambda: spanax.plan(linear(), "cpu:3", layout="tensor", mesh="model=3", pad="batch"),
    "pad: an axis that no mesh axis shards": lambda: spanax.plan(linear(), "cpu:8", layout="data", pad="features"),
    "digits: no scikit-learn": without_scikit_learn,
    "digits: no such size": lambda: Digits(image_size=12),
}


def near(fix: str) -> str:
    """The name that a fix suggests."""
    return str(re.findall(r"did you mean '(.*?)'|^known: (\w+)", fix)[0][fix.startswith("known")])


def toml(fix: str) -> dict[str, Any]:
    """The lines of a cluster file that a fix suggests."""
    return tomllib.loads(re.split(",? or ", fix)[0])


def clusters(fix: str) -> None:
    """Builds each cluster that a fix names."""
    names = re.findall(r"\b[a-z]\w*:\d[\dx:]*", fix)
    assert names and all(cluster(name) for name in names)


def described(**keys: Any) -> Chip:
    """The chip of a file with these keys."""
    return read_chip("mine", TABLE | keys, "mine.toml", {"h100": TABLE})


def meshes(fix: str) -> None:
    MeshShape.of(fix.removeprefix("write it like "))


# The followed fix of an error, given its text; the other errors have none, or prose.
FOLLOWED: dict[str, Callable[[str], Any]] = {
    "mesh: no equals sign": meshes,
    "mesh: no name": meshes,
    "mesh: a size that is a word": meshes,
    "unit: none": lambda fix: quantity(toml(fix)["memory"], "bytes", key="memory"),
    "unit: of another kind": lambda fix: quantity(toml(fix)["inside"]["rate"], "bytes per second", key="rate"),
    "unit: an absurd value": lambda fix: quantity(toml(fix)["memory"], "bytes", key="memory"),
    "unit: no number": lambda fix: quantity(toml(fix)["memory"], "bytes", key="memory"),
    "chip: unknown": lambda fix: chip_named(near(fix)),
    "chip: a dtype it has not": lambda fix: chip_named("v100").flops_per_second(near(fix)),
    "chip file: a key too few": lambda fix: described(**toml(fix)),
    "chip file: a key misspelt": lambda fix: described(**{near(fix): "80 GiB"}),
    "chip file: like nothing known": lambda fix: described(like=near(fix)),
    "chip file: a link of no kind": lambda fix: described(inside={"kind": near(fix), "rate": "1 GB/s"}),
    "chip file: no count": lambda fix: described(**toml(fix)),
    "chip file: no shape": lambda fix: described(inside=toml(fix)["inside"] | {"kind": "torus", "rate": "1 GB/s"}),
    "cluster: an unknown chip": lambda fix: cluster(f"{near(fix)}:8"),
    **{f"cluster: {name}": clusters for name in (
        "no devices", "part of a node", "too large a node", "slices of a switch", "no slice", "too few dims",
        "too large a slice", "part of a host", "part of a chip",
    )},
    "link: no such mesh axis": lambda fix: axis_link(cluster("h100:8"), MeshShape.of("data=8"), near(fix)),
    "chunks: no logits": lambda fix: chunked_loss(lambda weight, batch: weight.sum(), int(fix[-1]))(*np.ones((2, 3))),
    "simulate: no devices": lambda fix: simulate(int(fix[-2])),
    "loss: an operation without bfloat16": lambda fix: in_dtype(re.findall("compute_dtype='(.*?)'", fix)[0]),
    "build: reads the value of a parameter": lambda fix: traced(reading.build, eager_build="eager_build=True" in fix),
    "build: an array in a closure": lambda fix: traced(closed, eager_build="eager_build=True" in fix),
    "plan: a sequence to shard without a layout": lambda fix: spanax.plan(
        small_gpt(), "cpu:8", layout=fix.split("'")[1], sequence_parallel=True
    ),
    "search: mesh axes in another order": lambda fix: spanax.search(linear(), "a100:2x4", mesh=fix),
    "search: a policy without layers": lambda fix: spanax.search(linear(), "cpu:8", remat=(fix.split("'")[1],)),
    "search: a partial policy without layers": lambda fix: spanax.search(linear(), "cpu:8", remat=(fix.split("'")[1],)),
    **{f"trace: a partial policy {name}": lambda fix: [small_gpt().variant(remat=each) for each in fix.split("'")[1::2]]
       for name in ("without a number", "of another name", "of all layers")},
    "plan: a partial policy in stages": lambda fix: plan(
        small_gpt().variant(remat=fix.split("'")[1]), cluster("cpu:2"), mesh="pipe=2", layout="pipeline"
    ),
    "train: a plan and a dtype": lambda fix: check(TrainConfig(plan="p.json")),
    "pad: examples": lambda fix: spanax.plan(
        linear(), "cpu:3", layout="tensor", mesh="model=3", pad=fix.removeprefix("known: ")
    ),
    "pad: an axis that no mesh axis shards": lambda fix: spanax.plan(
        linear(), "cpu:8", layout="data", pad=fix.split("'")[1]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_fix_works(name: str) -> None:
    FOLLOWED[name](golden_messages.sections(GOLDEN)[name].partition("  fix: ")[2])


def message(call: Callable[[], Any]) -> str:
    with pytest.raises(SpanaxError) as caught:
        call()
    return str(caught.value)


def test_messages_equal_the_golden_file() -> None:
    text = "".join(f"[{name}]\n{message(call)}\n\n" for name, call in ERRORS.items())
    if os.environ.get("SPANAX_GOLDEN") == "update":
        GOLDEN.write_text(text, newline="")
    assert text.encode() == GOLDEN.read_bytes(), "a message changed: `make golden`, then read the diff"


@pytest.mark.parametrize("name", ERRORS)
def test_a_message_is_short_and_complete(name: str) -> None:
    lines = message(ERRORS[name]).splitlines()
    assert 1 <= len(lines) <= 4
    assert all(line.strip() and line == line.rstrip() for line in lines)
    assert not any(sign in "".join(lines) for sign in ("<function", "object at 0x", "Traceback"))


def test_the_tree_of_errors() -> None:
    assert [kind.exit_code for kind in (SpanaxError, DataError, NumbersError, WriteError)] == [2, 65, 70, 73]
    assert all(issubclass(kind, SpanaxError) for kind in (DataError, NumbersError, WriteError))
    assert issubclass(SpanaxError, ValueError)
