"""`spanax.jit` does what `nnx.jit` does, on eight devices."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from spanax.errors import SpanaxError
from spanax.jit.objects import Objects
from spanax.models import gpt

X = np.linspace(-1, 1, 8 * 16, dtype=np.float32).reshape(8, 16)


def linear() -> nnx.Linear:
    return nnx.Linear(16, 32, rngs=nnx.Rngs(0))


class Block(nnx.Module):
    """A layer with statistics, random masks and a tied kernel."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.up, self.norm = nnx.Linear(16, 32, rngs=rngs), nnx.BatchNorm(32, rngs=rngs)
        self.dropout, self.down = nnx.Dropout(0.2, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)
        self.tied = self.up.kernel
        self.scale = nnx.data(jnp.ones(()))

    def __call__(self, x: Any) -> Any:
        return self.down(nnx.relu(self.dropout(self.norm(self.up(x))))) * self.scale + (x @ self.tied[...]).mean()


def train_step(model: Any, optimizer: Any, metrics: Any, batch: Any, *, scale: Any = 1.0) -> Any:
    def loss(model: Any) -> Any:
        logits = model(batch["x"]) * scale
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), logits

    (value, logits), grads = nnx.value_and_grad(loss, has_aux=True)(model)
    metrics.update(loss=value, logits=logits, labels=batch["y"])
    optimizer.update(model, grads)
    return value


def trained(transform: Callable[..., Any]) -> tuple[list[float], dict[str, np.ndarray]]:
    """The losses of a loop with an optimizer, metrics that are reset, and a keyword, and all arrays after it."""
    model = Block()
    optimizer = nnx.Optimizer(
        model, optax.adamw(1e-2, eps=0.1), wrt=nnx.Param
    )  # eps: a bias before a norm has only noise
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
    step, random, losses = transform(train_step), np.random.default_rng(0), []
    for index in range(6):
        batch = {"x": random.normal(size=(32, 16)).astype(np.float32), "y": random.integers(0, 8, 32)}
        losses.append(float(step(model, optimizer, metrics, batch, scale=2.0)))
        if index == 2:
            metrics.reset()
    assert model.tied is model.up.kernel
    arrays = nnx.to_flat_state(nnx.state((model, optimizer, metrics)))
    values = {str(path): getattr(leaf, "get_raw_value", lambda leaf=leaf: leaf)() for path, leaf in arrays}
    is_key = {path: jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key) for path, array in values.items()}
    return losses, {
        path: np.asarray(jax.random.key_data(a) if is_key[path] else a, np.float64) for path, a in values.items()
    }


@pytest.mark.parametrize("mesh", ["fsdp=4,model=2", "data=8"])
def test_a_loop_ends_with_the_objects_of_one_device(mesh: str) -> None:
    losses, arrays = trained(nnx.jit)
    sharded_losses, sharded_arrays = trained(spanax.jit(mesh=mesh))
    np.testing.assert_allclose(sharded_losses, losses, rtol=1e-5)
    assert sharded_arrays.keys() == arrays.keys()
    for path, array in arrays.items():
        np.testing.assert_allclose(sharded_arrays[path], array, rtol=1e-4, atol=1e-5, err_msg=path)


def test_objects_have_sharded_arrays_and_remain_usable() -> None:
    model = linear()
    before = np.asarray(model(X))

    @spanax.jit(mesh="fsdp=8")
    def double(model: Any, x: Any) -> Any:
        model.kernel[...] *= 2.0
        return model(x).sum()

    double(model, X)
    assert model.kernel.sharding.spec == jax.P(None, "fsdp") and len(model.kernel.sharding.device_set) == 8
    np.testing.assert_allclose(jax.jit(lambda model: model(X))(model), before * 2, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(nnx.jit(lambda model, x: model(x))(model, X), before * 2, rtol=1e-5, atol=1e-5)
    assert "kernel" in repr(model)


def test_functions_share_a_placement_whichever_runs_first() -> None:
    model = linear()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def loss(model: Any, x: Any) -> Any:
        return (model(x) ** 2).mean()

    @spanax.jit(mesh="fsdp=4,model=2")
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        value, grads = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, grads)
        return value

    evaluate = spanax.jit(loss, like=step)
    sample = spanax.jit(lambda model, rngs: model(rngs.params.normal((16,))), like=step)
    first = float(evaluate(model, X))
    np.testing.assert_allclose([float(step(model, optimizer, X)), float(loss(linear(), X))], first, rtol=1e-6)
    assert float(evaluate(model, X)) < first and evaluate.placement.mesh is step.placement.mesh
    expected = jax.P(None, ("fsdp", "model"))
    assert model.kernel.sharding.spec == optimizer.opt_state[0].mu.kernel.sharding.spec == expected
    # Metrics have nothing that fsdp could store sharded.
    metrics = nnx.metrics.Average("loss")
    spanax.jit(lambda metrics, losses: metrics.update(loss=losses), like=step)(metrics, np.ones(8, np.float32))
    assert float(metrics.compute()) == 1
    # A function without a batch has nothing to shard over fsdp; a batch that does not divide is computed replicated.
    assert sample(model, nnx.Rngs(params=0)).shape == (32,)
    with pytest.warns(UserWarning, match="'batch' of size 6 is not divisible by 4"):
        np.testing.assert_allclose(float(evaluate(model, X[:6])), float(loss(model, X[:6])), rtol=1e-5)


def test_returned_objects_are_the_arguments_or_new() -> None:
    @spanax.jit(mesh="fsdp=8")
    def function(model: Any, x: Any) -> Any:
        model.bias[...] += 1
        new = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        return {"model": model, "part": model.kernel, "new": new, "state": nnx.state(model), "none": None}

    model = linear()
    result = function(model, X)
    assert result["model"] is model and result["part"] is model.kernel and result["none"] is None
    assert isinstance(result["new"], nnx.Linear) and result["new"](np.ones((1, 4))).shape == (1, 4)
    assert (
        isinstance(result["state"], nnx.State) and float(result["state"]["bias"][...][0]) == float(model.bias[0]) == 1
    )


def test_variables_that_a_function_adds_are_on_the_object() -> None:
    class Penalized(nnx.Module):
        def __init__(self) -> None:
            self.layer = linear()

        def __call__(self, x: Any) -> Any:
            self.penalty = nnx.Variable((x**2).sum())
            return self.layer(x)

    model, step = Penalized(), spanax.jit(lambda model, x: model(x).sum(), mesh="data=8")
    for factor in (1, 2, 3):
        step(model, factor * X)
        np.testing.assert_allclose(model.penalty[...], (factor**2 * X**2).sum(), rtol=1e-6)
    assert step.num_compilations == 2


def test_arrays_that_the_user_replaces_are_used() -> None:
    model, step = linear(), spanax.jit(lambda model, x: model(x).sum(), mesh="fsdp=8")
    step(model, X)
    model.kernel[...] = jnp.ones((16, 32))
    model.bias = nnx.Param(jnp.full(32, 2.0))
    np.testing.assert_allclose(step(model, np.ones_like(X)), 8 * 32 * 18, rtol=1e-6)
    assert model.kernel.sharding.spec == jax.P(None, "fsdp")


def test_one_array_in_two_variables_is_donated_once() -> None:
    @spanax.jit(mesh="fsdp=8")
    def step(model: Any, average: Any, x: Any) -> Any:
        model.kernel[...] *= 0.5
        average.kernel[...] = 0.9 * average.kernel[...] + 0.1 * model.kernel[...]
        return model(x).sum()

    model, average = linear(), nnx.clone(linear())
    before = np.asarray(model.kernel[...])
    for _ in range(2):
        nnx.update(average, nnx.state(model))  # both now hold the same arrays
        step(model, average, X)
    np.testing.assert_allclose(model.kernel[...], before * 0.25, rtol=1e-6)
    np.testing.assert_allclose(average.kernel[...], before * 0.475, rtol=1e-6)


def test_under_a_mesh_of_the_user() -> None:
    model, step = linear(), spanax.jit(lambda model, x: model(x).sum(), mesh="fsdp=8")
    expected = float(model(X).sum())
    with jax.set_mesh(jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))):
        np.testing.assert_allclose([float(step(model, X)), float(step(model, X))], expected, rtol=1e-4)
        assert "all-gather" in step.lower().compile().as_text()


def test_static_arguments_methods_and_numbers() -> None:
    class Model(nnx.Module):
        def __init__(self) -> None:
            self.layer = linear()

        @spanax.jit(mesh="data=8", static_argnames="reduction", static_argnums=3)
        def __call__(self, x: Any, reduction: str, is_doubled: bool = False, *, factor: Any = 1.0) -> Any:
            return getattr(self.layer(x), reduction)() * factor * (2 if is_doubled else 1)

    model = Model()
    expected = float(model.layer(X).sum())
    np.testing.assert_allclose(model(X, "sum"), expected, rtol=1e-4)
    np.testing.assert_allclose(model(X, reduction="sum", factor=3), 3 * expected, rtol=1e-4)
    np.testing.assert_allclose(model(X, "sum", True), 2 * expected, rtol=1e-4)
    assert Model.__call__.num_compilations == 3

    # A Python number is weakly typed: it does not change the dtype of what it multiplies.
    scaled = spanax.jit(lambda x, factor: x * factor, mesh="data=8")
    assert scaled(jnp.ones(8, jnp.bfloat16), 2.0).dtype == jnp.bfloat16


def test_inside_another_transformation_it_is_traced_inline() -> None:
    model, step = linear(), spanax.jit(lambda model, x: (model(x) ** 2).mean(), mesh="data=8")
    expected = float(step(model, X))
    np.testing.assert_allclose(nnx.jit(lambda model, x: step(model, x) * 2)(model, X), 2 * expected, rtol=1e-6)
    assert nnx.grad(lambda model: step(model, X))(model)["kernel"].shape == (16, 32)


EDITS: dict[str, Callable[[Any], Any]] = {
    r"count float32\[\] -> float32\[16\]$": lambda model: setattr(model, "count", nnx.Variable(jnp.zeros(16))),
    r"count float32\[16\] -> bfloat16\[16\]$": lambda model: model.count.set_raw_value(jnp.zeros(16, "bfloat16")),
    "extra added$": lambda model: setattr(model, "extra", nnx.Linear(2, 2, rngs=nnx.Rngs(0))),
    "layers.0.rate 0.5 -> 0.25$": lambda model: setattr(model.layers[0], "rate", 0.25),
    "extra removed$": lambda model: delattr(model, "extra"),
    "layers.0.deterministic False -> True$": lambda model: model.eval(),
    "layers.1 Linear -> Dropout$": lambda model: model.layers.__setitem__(1, nnx.Dropout(0.0)),
    "tied added$": lambda model: setattr(model, "tied", model.layers),
    "optimizer.tx changed$": lambda model: None,
}


def test_a_recompilation_is_reported_with_what_changed_in_the_objects() -> None:
    def optimizer(rate: float) -> nnx.Optimizer[Any]:
        return nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), optax.sgd(rate), wrt=nnx.Param)

    model = nnx.Sequential(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), nnx.Linear(16, 16, rngs=nnx.Rngs(0)))
    model.count = nnx.Variable(jnp.zeros(()))
    step, used = spanax.jit(lambda model, optimizer, x: model(x).sum(), mesh="data=2"), optimizer(0.1)
    for size in (2, 4, 6, 8):
        step(model, used, np.ones((size, 16), np.float32))
    for expected, edit in EDITS.items():
        edit(model)
        used = used if "optimizer" not in expected else optimizer(0.2)
        with pytest.warns(UserWarning, match=f"time: {expected}"):
            step(model, used, np.ones((8, 16), np.float32))


def test_modes_recompile_and_many_compilations_are_reported() -> None:
    model, step = nnx.Dropout(0.5, rngs=nnx.Rngs(0)), spanax.jit(lambda model, x: model(x).sum(), mesh="data=2")
    for _ in range(2):
        model.train()
        step(model, X)
        model.eval()
        np.testing.assert_allclose(step(model, X), X.sum(), atol=1e-5)
    assert step.num_compilations == 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in (2, 4, 6):
            step(model, np.ones((size, 16), np.float32))
    assert [str(warning.message) for warning in caught] == [
        "`<lambda>` is compiled for the 5th time: x float32[4, 16] -> float32[6, 16]"
    ]


def test_functions_answer_like_the_command_line() -> None:
    step = spanax.jit(lambda model, x: (model(x) ** 2).mean(), layout="fsdp", mesh="fsdp=8")
    abstract = nnx.eval_shape(linear)
    assert step.prepare(abstract, jax.ShapeDtypeStruct((512, 16), "float32")) is step.plan
    assert [axis.name for axis in step.program.axes] and step.num_compilations == 0
    assert "layout fsdp on 8 devices" in step.explain() and "stored over fsdp" in step.explain("kernel")
    assert "all-gather" in step.explain("kernel")
    report = step.check(level=2)
    assert report.compiled.state_bytes == step.plan.state_bytes()
    assert "all-gather" in step.lower().compile().as_text()
    assert step.check("v5e:2x4", level=0).by == "static"


def test_without_a_mesh_the_layout_is_searched() -> None:
    model = linear()
    step = spanax.jit(lambda model, x: (model(x) ** 2).mean())
    np.testing.assert_allclose(step(model, X), (linear()(X) ** 2).mean(), rtol=1e-6)
    assert step.plan.why == spanax.plan(step.program, spanax.local()).why
    again = spanax.jit(lambda model, x: (model(x) ** 2).mean(), plan=step.plan)
    again(linear(), X)
    assert again.plan is step.plan


def test_the_structure_of_objects_is_noticed_when_it_changes() -> None:
    model = Block()
    objects = Objects.of((model,))
    assert objects.is_current() and len(objects.arrays()) == len(jax.tree.leaves(nnx.state(model)))
    model.scale = jnp.zeros(())
    assert not objects.is_current()
    objects = Objects.of((model,))
    objects.update(range(len(objects.slots)), objects.arrays())
    assert objects.is_current()
    model.up.kernel = nnx.Param(jnp.ones((16, 32)))
    assert not objects.is_current()


def padded_run(transform: Callable[..., Any], like: Callable[..., Any]) -> tuple[list[float], dict[str, np.ndarray]]:
    """Two losses of a GPT with 5 heads, a validation loss under `like`, and its parameters."""
    model = gpt.GPT(gpt.GPTConfig(101, seq_len=16, num_layers=2, num_heads=5, embed_dim=40), nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2, eps=1e-3), wrt=nnx.Param)

    @transform
    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        value, grads = nnx.value_and_grad(lambda model: gpt.loss(model, batch))(model)
        optimizer.update(model, grads)
        return value

    evaluate, random = like(step)(gpt.loss), np.random.default_rng(0)
    batches = [{name: random.integers(0, 101, (8, 16)) for name in ("inputs", "targets")} for _ in range(3)]
    losses = [float(step(model, optimizer, batch)) for batch in batches[:2]] + [float(evaluate(model, batches[2]))]
    if not isinstance(step, type(nnx.jit(gpt.loss))):
        for function in (step, evaluate):
            assert function.plan.schedule.padded == (("heads", 4), ("vocab", 4))
            assert "5 heads padded to 8 over model=4" in function.plan.why
    return losses, {str(path): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def test_padded_axes_change_no_numbers() -> None:
    jitted = spanax.jit(mesh="data=2,model=4", pad="heads,vocab")
    losses, params = padded_run(jitted, lambda step: spanax.jit(like=step))
    expected_losses, expected = padded_run(nnx.jit, lambda step: nnx.jit)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for path, array in expected.items():
        np.testing.assert_allclose(params[path], array, rtol=1e-5, atol=1e-5, err_msg=path)


def test_a_shared_placement_cannot_set_padding() -> None:
    step = spanax.jit(lambda model, x: model(x), mesh="data=8")
    with pytest.raises(SpanaxError, match="`pad` does not apply: `like` decides"):
        spanax.jit(lambda model, x: model(x), like=step, pad="heads")
