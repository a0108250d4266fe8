"""Program: what `trace` takes, what it keeps of a model and its optimizer, and what it refuses."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
import zoo
from programs import workload
from spanax.trace.program import Program

BATCH = {"x": jax.ShapeDtypeStruct((16, 32), "float32"), "y": jax.ShapeDtypeStruct((16, 16), "float32")}
LINEAR = {"x": jax.ShapeDtypeStruct((8, 4), "float32"), "y": jax.ShapeDtypeStruct((8, 2), "float32")}


def trace(build: Callable[..., Any] = zoo.MLP, **changes: Any) -> Program:
    options: dict[str, Any] = {"optimizer": optax.sgd(0.1), "batch": BATCH}
    if "train_step" not in changes:
        options["loss"] = zoo.squared_error
    return spanax.trace(build=build, **options | changes)


def linear(rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(4, 2, rngs=rngs)


def summary(program: Program) -> list[tuple[str, tuple[int, ...], str, str]]:
    return [(leaf.path, leaf.shape, str(leaf.dtype), leaf.kind) for leaf in program.leaves]


def written_anew(program: Program) -> set[str]:
    """The leaves that the step returns another value for."""
    body = program.step.graph.body
    pairs = zip(program.leaves, body.inputs, body.outputs, strict=False)
    return {leaf.path for leaf, before, after in pairs if before != after}


def primitives(program: Program) -> set[str]:
    return {op.name for op in program.step.graph.ops()}


def refused(match: str, **changes: Any) -> str:
    with pytest.raises(spanax.SpanaxError, match=match) as caught:
        trace(**changes)
    return str(caught.value)


# Residuals


def test_leaves_of_a_model_and_its_optimizer() -> None:
    program = trace(linear, batch=LINEAR, optimizer=optax.adam(1e-3))
    assert summary(program) == [
        ("bias", (2,), "float32", "param"),
        ("kernel", (4, 2), "float32", "param"),
        ("optimizer.opt_state.0.count", (), "int32", "optimizer"),
        ("optimizer.opt_state.0.mu.bias", (2,), "float32", "optimizer"),
        ("optimizer.opt_state.0.mu.kernel", (4, 2), "float32", "optimizer"),
        ("optimizer.opt_state.0.nu.bias", (2,), "float32", "optimizer"),
        ("optimizer.opt_state.0.nu.kernel", (4, 2), "float32", "optimizer"),
        ("optimizer.step", (), "uint32", "optimizer"),
    ]
    assert [(leaf.path, leaf.shape, leaf.kind) for leaf in program.batch] == [
        ("x", (8, 4), "batch"),
        ("y", (8, 2), "batch"),
    ]
    assert program.num_params == 10
    assert {leaf.path: leaf.num_bytes for leaf in program.leaves}["kernel"] == 32


def test_statistics_and_random_counts_are_updated_state() -> None:
    program = spanax.trace(build=zoo.CNN, optimizer=optax.sgd(0.1), batch=zoo.IMAGES(16), loss=zoo.cross_entropy)
    statistics = {leaf.path for leaf in program.leaves if leaf.kind == "other"}
    assert statistics == {f"{norm}.{name}" for norm in ("stem_norm", "depthwise_norm") for name in ("mean", "var")}
    assert statistics <= written_anew(program)

    dropout = trace(lambda rngs: zoo.MLP(rngs, rate=0.3))
    random = {leaf.path: str(leaf.dtype) for leaf in dropout.leaves if leaf.kind == "other"}
    assert random == {"drop.rngs.count": "uint32", "drop.rngs.key": "key<fry>"}
    assert written_anew(dropout) & set(random) == {"drop.rngs.count"}
    assert {leaf.path: leaf.num_bytes for leaf in dropout.leaves}["drop.rngs.key"] == 8


def test_an_evaluation_draws_nothing_and_returns_no_state() -> None:
    program = trace(lambda rngs: zoo.MLP(rngs, rate=0.3))
    assert program.evaluation is not None
    assert not any(op.name.startswith("random") for op in program.evaluation.graph.ops())
    assert len(program.evaluation.graph.body.outputs) == program.evaluation.num_results == 1


def test_frozen_parameters_are_stored_without_moments() -> None:
    case = zoo.ZOO["lora"]
    program = trace(case.build, optimizer=lambda model: nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.LoRAParam))
    moments = {leaf.path for leaf in program.leaves if leaf.kind == "optimizer" and ".mu." in leaf.path}
    assert moments and all(path.rpartition(".")[2] in ("lora_a", "lora_b") for path in moments)
    trained = {leaf.path for leaf in program.leaves if leaf.kind == "param"} & written_anew(program)
    assert {path.rpartition(".")[2] for path in trained} == {"lora_a", "lora_b"}
    assert "layers.0.kernel" in {leaf.path for leaf in program.leaves}


def test_a_fingerprint_is_of_paths_shapes_and_dtypes() -> None:
    first = trace(linear, batch=LINEAR)
    assert trace(lambda rngs: linear(rngs), batch=LINEAR, optimizer=optax.sgd(0.2)).fingerprint == first.fingerprint
    others = [
        trace(lambda rngs: nnx.Linear(4, 2, use_bias=False, rngs=rngs), batch=LINEAR),
        trace(lambda rngs: nnx.Linear(4, 2, param_dtype=jnp.bfloat16, rngs=rngs), batch=LINEAR),
        trace(linear, batch=jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((16, *leaf.shape[1:]), leaf.dtype), LINEAR)),
        trace(linear, batch=LINEAR, optimizer=optax.adam(0.1)),
    ]
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 5


# What `build` and `optimizer` may be


class Positional(nnx.Linear):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(32, 16, rngs=rngs)


class KeywordOnly(nnx.Linear):
    def __init__(self, *, width: int = 16, rngs: nnx.Rngs):
        super().__init__(32, width, rngs=rngs)


class Maker:
    def __call__(self, rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Linear(32, 16, rngs=rngs)


def seeded(seed: int = 0) -> nnx.Module:
    return nnx.Linear(32, 16, rngs=nnx.Rngs(seed))


BUILDS: dict[str, Callable[..., nnx.Module]] = {
    "no arguments": lambda: nnx.Linear(32, 16, rngs=nnx.Rngs(0)),
    "only defaults": seeded,
    "rngs by position": lambda rngs: nnx.Linear(32, 16, rngs=rngs),
    "rngs under another name": lambda r: nnx.Linear(32, 16, rngs=r),
    "rngs by keyword": lambda *, rngs: nnx.Linear(32, 16, rngs=rngs),
    "rngs with a default": lambda rngs=None: nnx.Linear(32, 16, rngs=rngs),
    "a class": Positional,
    "a class with keywords": KeywordOnly,
    "a partial": functools.partial(nnx.Linear, 32, 16),
    "an object": Maker(),
}


@pytest.mark.parametrize("name", BUILDS)
def test_forms_of_build(name: str) -> None:
    assert summary(trace(BUILDS[name]))[:2] == [
        ("bias", (16,), "float32", "param"),
        ("kernel", (32, 16), "float32", "param"),
    ]


# The step that Spanax writes


def test_microbatches_keep_the_axes_and_scan_over_them() -> None:
    full_batch, parts = trace(), trace(microbatches=4)
    assert summary(full_batch) == summary(parts)
    assert [leaf.axes for leaf in parts.leaves] == [leaf.axes for leaf in full_batch.leaves]
    (scan,) = (op for op in parts.step.graph.ops() if op.name == "scan")
    assert scan.params["length"] == 4 and "scan" not in primitives(full_batch)
    inner = {
        parts.step.axes.of(value)[:1] for value in scan.bodies[0].inputs if parts.step.graph.shape(value)[:1] == (4,)
    }
    assert inner == {("batch",)}


def test_microbatches_of_one_example_keep_the_axes() -> None:
    full_batch = workload("gpt-nano", batch_size=4)
    parts = full_batch.variant(microbatches=4)
    assert parts.step.axes.examples == full_batch.step.axes.examples
    assert set(full_batch.step.axes.names.values()) <= set(parts.step.axes.names.values())


def test_compute_dtype_is_what_the_loss_sees_and_nothing_else() -> None:
    program = trace(compute_dtype=jnp.bfloat16, optimizer=optax.adam(1e-3))
    assert {str(leaf.dtype) for leaf in program.leaves} == {"float32", "int32", "uint32"}
    graph = program.step.graph
    dots = [op for op in graph.ops() if op.name == "dot_general"]
    assert dots and {str(graph.avals[value].dtype) for op in dots for value in op.outputs} == {"bfloat16"}
    outputs = graph.body.outputs
    assert {str(graph.avals[value].dtype) for value in outputs} == {"float32", "int32", "uint32"}


def test_a_compute_dtype_does_not_cast_statistics() -> None:
    program = spanax.trace(
        build=zoo.CNN,
        optimizer=optax.sgd(0.1),
        batch=zoo.IMAGES(16),
        loss=zoo.cross_entropy,
        compute_dtype=jnp.bfloat16,
        microbatches=2,
        accumulate="mean",
    )
    assert {str(leaf.dtype) for leaf in program.leaves if leaf.kind == "other"} == {"float32"}


def test_metrics_are_the_loss_the_norm_and_those_of_the_loss() -> None:
    def loss(model: Any, batch: Any) -> Any:
        return zoo.squared_error(model, batch), {"mean": model(batch["x"]).mean()}

    names = ["grad_norm", "loss", "mean"]
    zeros = [0] * len(names)
    for microbatches in (1, 4):
        program = trace(loss=loss, microbatches=microbatches, clip_norm=1.0)
        assert sorted(jax.tree.unflatten(program.step.result, zeros)) == names
        assert program.evaluation is not None
        assert sorted(jax.tree.unflatten(program.evaluation.result, [0, 0])) == ["loss", "mean"]


def my_step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Any) -> dict[str, Any]:
    loss, grads = nnx.value_and_grad(zoo.squared_error)(model, batch)
    optimizer.update(model, grads)
    return {"loss": loss}


@pytest.mark.parametrize(
    ("returned", "names"),
    [(lambda loss: loss, {"loss"}), (lambda loss: None, set()), (lambda loss: {"a": loss}, {"a"})],
)
def test_a_custom_step_is_traced(returned: Callable[[Any], Any], names: set[str]) -> None:
    program = trace(train_step=lambda *args: returned(my_step(*args)["loss"]))
    assert summary(program) == summary(trace())
    assert set(jax.tree.unflatten(program.step.result, [0] * len(names))) == names
    assert program.evaluation is None
    assert [leaf.axes for leaf in program.leaves] == [leaf.axes for leaf in trace().leaves]


def test_an_intermediate_is_not_state() -> None:
    class Sowing(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.linear = nnx.Linear(32, 16, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            y = self.linear(x)
            self.activations = nnx.Intermediate(y)
            return y

    for step in ({}, {"train_step": my_step}):
        assert {leaf.path for leaf in trace(Sowing, **step).leaves} == {
            "linear.bias",
            "linear.kernel",
            "optimizer.step",
        }


# What is refused


def test_neither_loss_nor_step() -> None:
    assert "loss=" in refused("pass either `loss` or `train_step`", loss=None)
    refused("not both", loss=zoo.squared_error, train_step=my_step)


@pytest.mark.parametrize("option", [{"microbatches": 2}, {"compute_dtype": jnp.bfloat16}, {"clip_norm": 1.0}])
def test_options_of_a_loss_and_a_train_step_conflict(option: dict[str, Any]) -> None:
    name = next(iter(option))
    assert "leave" in refused(f"`{name}` requires `loss`", train_step=my_step, **option)


def test_microbatches_that_do_not_divide() -> None:
    assert "fix: microbatches=2" in refused("3 microbatches do not divide the batch of 16", microbatches=3)
    refused("microbatches=0", microbatches=0)


def test_a_loss_that_is_not_a_scalar_raises() -> None:
    assert ".mean()" in refused("not a scalar", loss=lambda model, batch: model(batch["x"]))


@pytest.mark.parametrize(
    ("loss", "dtype"),
    [
        (lambda model, batch: (model(batch["x"]) > 0).sum(), "int32"),
        (lambda model, batch: (model(batch["x"]) > 0).any(), "bool"),
        (lambda model, batch: (model(batch["x"]) + 1j).sum(), "complex64"),
        (lambda model, batch: ((model(batch["x"]) > 0).sum(), {"accuracy": 1.0}), "int32"),
    ],
)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_loss_without_a_gradient_dtype_is_refused(loss: Any, dtype: str, microbatches: int) -> None:
    text = refused(f"`loss` returned {dtype}", loss=loss, microbatches=microbatches)
    assert "floating" in text and "fix: " in text


def test_a_build_that_returns_no_module_raises() -> None:
    assert "return the model itself" in refused("returned a dict, not an nnx.Module", build=lambda: {"kernel": 1.0})


def test_invalid_batches_raise() -> None:
    assert "['x'] is a str" in refused("not an array", batch={"x": "text"})
    assert "['x'] is a ndarray of <U1" in refused("not an array", batch={"x": np.array(["a"])})
    refused("no arrays", batch={})


def test_a_step_that_adds_a_variable() -> None:
    def growing(model: Any, optimizer: Any, batch: Any) -> Any:
        model.memory = nnx.Param(jnp.zeros(3))
        return my_step(model, optimizer, batch)

    text = refused("changed the model's variables: memory", train_step=growing)
    assert "__init__" in text


@pytest.mark.parametrize("change", [lambda v: v.astype(jnp.bfloat16), lambda v: v[:1]])
def test_a_step_that_turns_a_variable_into_another(change: Callable[[Any], Any]) -> None:
    def turning(model: Any, optimizer: Any, batch: Any) -> None:
        model.up.bias.set_value(change(model.up.bias.get_value()))

    assert "keep the shape and dtype" in refused("the train step turned `up.bias` from float32", train_step=turning)


def test_a_loss_that_adds_a_variable() -> None:
    def growing(model: Any, batch: Any) -> Any:
        model.memory = nnx.Variable(jnp.zeros(3))
        return zoo.squared_error(model, batch)

    assert "__init__" in refused("`loss` changed the model's variables: memory", loss=growing)


@pytest.mark.parametrize(
    ("output", "inputs"),
    [
        ("`build` is a Linear instance", {"build": nnx.Linear.__new__(nnx.Linear)}),
        ("`build` requires config, but receives only an nnx.Rngs", {"build": lambda config, rngs: None}),
        ("`build` requires fan_in, fan_out,", {"build": lambda fan_in, fan_out: None}),
        ("`optimizer` is a float", {"optimizer": 0.1}),
        ("`optimizer` is optax.adam, which was not called", {"optimizer": optax.adam}),
        ("`optimizer` is <lambda>, which requires no argument", {"optimizer": lambda: optax.adam(0.1)}),
        ("`optimizer` is <lambda>, which requires model, rate", {"optimizer": lambda model, rate: optax.adam(rate)}),
        ("`optimizer` returned a float", {"optimizer": lambda model: 0.1}),
        (
            "`optimizer` is a Optimizer",
            {"optimizer": nnx.Optimizer.__new__(nnx.Optimizer)},
        ),
        ("`loss` returned list next to", {"loss": lambda model, batch: (zoo.squared_error(model, batch), [1.0])}),
        ("a str as its metric 'by.name'", {"loss": lambda *args: (zoo.squared_error(*args), {"by": {"name": "a"}})}),
        ("`train_step` returned a MLP as its metric", {"train_step": lambda model, optimizer, batch: (1.0, model)}),
    ],
)
def test_an_argument_of_the_wrong_type_raises(output: str, inputs: dict[str, Any]) -> None:
    refused(output, **inputs)


def test_values_after_the_loss_are_metrics() -> None:
    step = lambda *args: (my_step(*args)["loss"], {"more": {"ones": jnp.ones(3)}})  # noqa: E731
    assert jax.tree.unflatten(trace(train_step=step).step.result, (1, 2)) == {"loss": 1, "more": {"ones": 2}}


def test_an_optimizer_by_a_function_of_the_model() -> None:
    workload = spanax.Workload(
        build=linear, batch=LINEAR, loss=zoo.squared_error, optimizer=lambda model: optax.sgd(0.1, momentum=0.9)
    )
    paths = [leaf.path for leaf in workload.trace(learning_rate=1.0, num_steps=1).leaves]
    assert "optimizer.opt_state.0.trace.kernel" in paths


class Updating(nnx.Optimizer):
    """Trains what it was created over, given the gradients of the model."""

    def update(self, model: Any, grads: Any, **kwargs: Any) -> Any:
        return super().update(model.up, grads["up"], **kwargs)


class Held(nnx.Pytree):
    def __init__(self, model: nnx.Module):
        self.optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)


def optimized(part: Callable[[Any], Any], kind: Any = nnx.Optimizer, wrt: Any = nnx.Param) -> Any:
    return lambda model: kind(part(model), optax.adam(0.1), wrt=wrt)


@pytest.mark.parametrize(
    ("message", "optimizer"),
    [
        ("other parameters than its `wrt` selects", optimized(lambda model: model.up)),
        ("other parameters than its `wrt` selects", optimized(lambda model: linear(nnx.Rngs(0)))),
        ("ModelAndOptimizer, which a step around a `loss`", optimized(lambda model: model, nnx.ModelAndOptimizer)),
        ("dict, which a step around a `loss`", lambda model: {"one": optimized(lambda model: model)(model)}),
        ("Held, which a step around a `loss`", Held),
    ],
)
def test_an_optimizer_that_a_step_around_a_loss_cannot_update(message: str, optimizer: Any) -> None:
    assert "train_step= in place of loss=" in refused(message, optimizer=optimizer)


@pytest.mark.parametrize(
    "optimizer",
    [
        optimized(lambda model: model.up, Updating),
        optimized(lambda model: model, wrt=nnx.All(nnx.Param, nnx.PathContains("up"))),
    ],
)
def test_an_optimizer_of_a_part_trains_that_part(optimizer: Any) -> None:
    assert {path for path in written_anew(trace(optimizer=optimizer)) if "optimizer" not in path} == {
        "up.bias",
        "up.kernel",
    }
