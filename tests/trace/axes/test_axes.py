"""Axes: all models of the zoo at a prime size, the names in the main models, and requests of users."""

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import spanax
import zoo
from sampling import sampled
from spanax.models import gpt, llama
from spanax.trace.analysis.step_analysis import StepAnalysis
from spanax.trace.axes.axes import discover
from spanax.trace.jaxpr.dim_maps.registry import TABLE
from spanax.trace.program import Program

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "axes"
MAIN = ("cnn", "gpt", "gqa", "llama", "mixtral", "mlp", "moe", "resnet", "vit", "vit-scan")
QUICK = (*MAIN, "indexed-moe", "lora", "multitask", "rnn", "seq2seq", "ssm", "unet", "vae")
"""Of the zoo, the kinds of models; `slow` is all of it."""


@functools.cache
def program(name: str, size: int) -> Program:
    case = zoo.ZOO[name]
    optimizer: Any = case.optimizer
    if case.wrt is not nnx.Param:
        optimizer = lambda model: nnx.Optimizer(model, case.optimizer, wrt=case.wrt)  # noqa: E731
    return spanax.trace(build=case.build, optimizer=optimizer, batch=case.batch(size), loss=case.loss)


def misnamed(traced: StepAnalysis, name: str, size: int) -> list[str]:
    """Dims divisible by a size that are not called by this name, and others that are."""
    makers = {value: op.name for op in traced.graph.ops() for value in op.outputs}
    result = []
    for value in range(len(traced.graph.avals)):
        shape, names = traced.graph.shape(value), traced.axes.of(value)
        for dim, length in enumerate(shape):
            if (length > 0 and length % size == 0) != (names[dim] == name):
                result.append(f"{makers.get(value, 'input')} {shape}[{dim}] is {names[dim]}")
    return sorted(set(result))


# 11 divides nothing in the models; but a scan over 24 steps by halves meets 11, and not 13.
@pytest.mark.parametrize("name", sampled(zoo.ZOO, QUICK))
def test_exactly_the_dims_divisible_by_a_prime_batch_are_batch(name: str) -> None:
    size = 13 if name == "ssm" else 11
    traced = program(name, size)
    assert misnamed(traced.step, "batch", size) == []
    assert traced.evaluation is not None and misnamed(traced.evaluation, "batch", size) == []


@pytest.mark.parametrize("name", sampled(zoo.ZOO, QUICK))
def test_the_zoo_is_understood(name: str) -> None:
    axes = program(name, 13 if name == "ssm" else 11).step.axes
    assert not axes.unknown and not axes.opaque
    assert axes.coverage == 1.0


SEQUENCES: dict[str, tuple[Any, Any, Any]] = {
    "scanned": (gpt.GPT, zoo.GPT_SCAN, gpt.loss),
    "unrolled": (gpt.GPT, dataclasses.replace(zoo.GPT_SCAN, scan_layers=False), gpt.loss),
    "grouped queries": (llama.Llama, zoo.LLAMA, llama.loss),
}


@pytest.mark.parametrize("name", sampled(SEQUENCES, ["scanned", "grouped queries"]))
def test_exactly_the_dims_of_a_prime_length_are_seq(name: str) -> None:
    model, config, loss = SEQUENCES[name]
    config = dataclasses.replace(config, seq_len=11)
    ids = jax.ShapeDtypeStruct((4, 11), "int32")
    batch = {"inputs": ids, "targets": ids}
    traced = spanax.trace(build=lambda rngs: model(config, rngs), optimizer=zoo.ADAMW, batch=batch, loss=loss)
    assert misnamed(traced.step, "seq", 11) == []


@pytest.mark.parametrize(("field", "name"), [("vocab_size", "vocab"), ("num_layers", "layers")])
def test_other_axes_by_a_prime_size(field: str, name: str) -> None:
    config = dataclasses.replace(zoo.GPT_SCAN, **{field: 11})
    ids = jax.ShapeDtypeStruct((4, 32), "int32")
    batch = {"inputs": ids, "targets": ids}
    traced = spanax.trace(build=lambda rngs: gpt.GPT(config, rngs), optimizer=zoo.ADAMW, batch=batch, loss=gpt.loss)
    leaves = [leaf for leaf in traced.leaves for size, axis in zip(leaf.shape, leaf.axes, strict=True) if axis == name]
    expected = [leaf for leaf in traced.leaves for size in leaf.shape if size == 11]
    assert leaves == expected and expected


def test_a_missing_rule_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(TABLE, "dot_general")
    case = zoo.ZOO["mlp"]
    with pytest.warns(UserWarning, match="no rule for the primitives 'dot_general'"):
        traced = spanax.trace(build=case.build, optimizer=case.optimizer, batch=case.batch(11), loss=case.loss)
    assert misnamed(traced.step, "batch", 11)
    assert traced.step.axes.unknown["dot_general"] > 0
    # Newly created arrays are recognized by their growth, which compensates for much of it.
    assert discover(traced.step.graph, traced.leaves, traced.batch).coverage < 1


def table(traced: Program) -> str:
    rows = [
        (leaf.path, leaf.kind, str(leaf.dtype), " ".join(map(str, leaf.shape)), " ".join(map(str, leaf.axes)))
        for leaf in (*traced.leaves, *traced.batch)
        if leaf.kind != "optimizer"
    ]
    axes = [(axis.name, *map(str, (axis.sizes, axis.ways, axis.num_classes, len(axis.leaves)))) for axis in traced.axes]
    return "\n".join(["  ".join(row) for row in rows] + [""] + ["  ".join(row) for row in axes]) + "\n"


@pytest.mark.parametrize("name", MAIN)
def test_names_equal_the_golden_file(name: str) -> None:
    result, golden = table(program(name, 11)), GOLDEN / f"{name}.txt"
    if os.environ.get("SPANAX_GOLDEN") == "update":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(result)
    assert result == golden.read_text()


@pytest.mark.parametrize("name", sampled(zoo.ZOO, QUICK))
def test_an_optimizer_array_has_the_axes_of_its_parameter(name: str) -> None:
    traced = program(name, 13 if name == "ssm" else 11)
    params = {leaf.path: leaf for leaf in traced.leaves if leaf.kind == "param"}
    for leaf in traced.leaves:
        path = next((p for p in params if leaf.path.endswith(f".{p}")), None)
        if leaf.kind == "optimizer" and path and params[path].shape == leaf.shape:
            assert leaf.axes == params[path].axes, leaf.path


@pytest.mark.parametrize("name", sampled(zoo.ZOO, QUICK))
def test_evaluation_numbers_the_classes_of_the_model_like_the_step(name: str) -> None:
    """The resolver knows classes by number, and the evaluation is another graph."""
    traced = program(name, 13 if name == "ssm" else 11)
    assert traced.evaluation is not None
    for index, leaf in enumerate((*traced.leaves, *traced.batch)):
        if leaf.kind != "optimizer":
            step, evaluation = (
                part.axes.classes[part.graph.body.inputs[index]] for part in (traced.step, traced.evaluation)
            )
            assert step == evaluation, leaf.path


def test_an_annotation_names_the_axes_of_values_it_does_not_reach() -> None:
    traced = program("annotated", 11)
    axes = {leaf.path: leaf.axes for leaf in traced.leaves}
    assert axes["layers.0.kernel"] == ("embed", "mlp") and axes["layers.2.kernel"] == ("mlp", "embed")
    assert axes["layers.0.bias"] == ("mlp",)  # not annotated
    assert {leaf.path: leaf.annotation for leaf in traced.leaves}["layers.0.kernel"] == ("embed", "mlp")


@pytest.mark.parametrize("rules", [(("wide", "model"),), {"wide": "model"}])
def test_logical_rules_in_a_model_are_applied(rules: Any) -> None:
    def build(rngs: nnx.Rngs) -> nnx.Module:
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("narrow", "wide"), sharding_rules=rules)
        return nnx.Linear(8, 16, kernel_init=init, rngs=rngs)

    traced = spanax.trace(
        build=build,
        optimizer=optax.sgd(0.1),
        batch=jax.ShapeDtypeStruct((4, 8), "float32"),
        loss=lambda model, x: jnp.sum(model(x)),
    )
    assert {leaf.path: leaf.annotation for leaf in traced.leaves}["kernel"] == ("narrow", "model")


def test_rename() -> None:
    before = program("gpt", 11)
    after = before.rename({"embed": "width", "hidden": "qkv"})
    assert {axis.name for axis in after.axes} == {axis.name for axis in before.axes} - {"embed", "hidden"} | {
        "width",
        "qkv",
    }
    assert {leaf.path: leaf.axes for leaf in after.leaves}["embed"] == ("vocab", "width")
    assert after.evaluation is not None and "width" in after.evaluation.axes.names.values()
    assert {leaf.path: leaf.axes for leaf in before.leaves}["embed"] == ("vocab", "embed")
    assert after.fingerprint == before.fingerprint


@pytest.mark.parametrize("name", ["batch", "seq", "layers"])
def test_names_used_by_layouts_cannot_be_renamed(name: str) -> None:
    with pytest.raises(spanax.SpanaxError, match=f"'{name}' cannot be renamed"):
        program("gpt", 11).rename({name: "other"})


def test_rename_of_an_unknown_axis() -> None:
    with pytest.raises(spanax.SpanaxError, match="no axis 'embd' to rename") as caught:
        program("gpt", 11).rename({"embd": "width"})
    assert "did you mean 'embed'?" in str(caught.value)


WITHOUT_A_DEVICE = """
import jax, pytest, spanax, zoo
for name in {names!r}:
    case = zoo.ZOO[name]
    traced = spanax.trace(build=case.build, optimizer=case.optimizer, batch=case.batch(11), loss=case.loss)
    assert traced.leaves and traced.axes
try:
    jax.devices()
except RuntimeError:
    print("no device")
"""


def test_tracing_needs_no_device_and_allocates_nothing() -> None:
    names = ("cnn", "dropout", "gpt", "nnx-attention")
    path = os.pathsep.join([str(Path(zoo.__file__).parent), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_A_DEVICE.format(names=names)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "JAX_PLATFORMS": "none_such", "PYTHONPATH": path},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "no device"
