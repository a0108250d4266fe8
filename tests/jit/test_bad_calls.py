"""Each bad call of a function of `spanax.jit` is one error, and leaves the objects as they were."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import errors, nnx

import spanax
from spanax.errors import SpanaxError

X = np.ones((8, 16), np.float32)
CAPTURED = nnx.Linear(16, 32, rngs=nnx.Rngs(0))


def update(model: Any, x: Any) -> Any:
    model.bias[...] += 1
    return model(x).sum()


def as_float(model: Any, x: Any) -> float:
    return float(update(model, x))


def averaged(model: Any, x: Any) -> Any:
    return jax.lax.pmean(update(model, x), "data")


def captured(model: Any, x: Any) -> Any:
    CAPTURED.bias[...] += 1
    return update(model, x)


def model() -> nnx.Linear:
    return nnx.Linear(16, 32, rngs=nnx.Rngs(0))


def elsewhere() -> nnx.Linear:
    result = model()
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    result.kernel[...] = jax.device_put(result.kernel[...], jax.NamedSharding(mesh, jax.P(None, "x")))
    return result


def hijax() -> nnx.Linear:
    with nnx.var_defaults(hijax=True):
        return model()


def planned() -> spanax.Plan:
    plan = spanax.jit(update, mesh="fsdp=8").prepare(nnx.eval_shape(model), jax.ShapeDtypeStruct((8, 16), "float32"))
    assert isinstance(plan, spanax.Plan)
    return plan


FLOAT = r"function as_float at .*test_bad_calls.py:\d+ (.|\n)*the arguments model.bias, model.kernel, and x\."
CASES = {
    "a float of a traced value": (as_float, "data=8", model, (X,), jax.errors.ConcretizationTypeError, FLOAT),
    "a mapped axis": (averaged, "data=8", model, (X,), SpanaxError, "name of a mapped axis(.|\n)*delete the line"),
    "a captured object": (captured, "data=8", model, (X,), errors.TraceContextError, "different trace level"),
    "an odd batch": (update, "data=8", model, (X[:6],), SpanaxError, "'batch' of size 6 is not divisible by 8"),
    "another mesh": (update, "data=8", elsewhere, (X,), SpanaxError, "`kernel` is already sharded over another mesh"),
    "too few devices": (update, "data=16", model, (np.ones((16, 16)),), SpanaxError, "data=16 needs 16 devices"),
    "six of eight devices": (update, "data=3,model=2", model, (X,), SpanaxError, "6 devices, and the cluster has 8"),
    "an unknown axis": (update, "bogus=8", model, (X,), SpanaxError, "mesh axis 'bogus' has no default meaning"),
    "a string": (update, "data=8", model, ("x",), SpanaxError, "`x` is a str, neither an NNX object nor an array"),
    "hijax": (update, "data=8", hijax, (X,), SpanaxError, "`bias` is a HijaxVariable, which spanax.jit does not"),
    "shapes": (update, "data=8", lambda: nnx.eval_shape(model), (X,), SpanaxError, "is a shape without a value"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_bad_call_is_one_error(name: str) -> None:
    function, mesh, make, arguments, kind, message = CASES[name]
    objects = make()
    before = [leaf for _, leaf in nnx.to_flat_state(nnx.state(objects))]
    with pytest.raises(kind, match=message) as caught:
        spanax.jit(function, mesh=mesh)(objects, *arguments)
    notes = "".join(getattr(caught.value, "__notes__", ()))
    assert ("pass it as an argument" in notes) == (function is captured)
    assert ("`as_float` is traced once" in notes) == (function is as_float)
    after = [leaf for _, leaf in nnx.to_flat_state(nnx.state(objects))]
    assert all(old.get_raw_value() is new.get_raw_value() for old, new in zip(before, after, strict=True))


def if_large(model: Any, batch: Any) -> Any:
    return model(batch["x"]).mean() if batch["x"].sum() > 2 else 0.0


def step_with(value: Any) -> Any:
    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        return value(model, batch)

    return train_step


def mean(model: Any, batch: Any) -> Any:
    return model(batch["x"]).mean()


@pytest.mark.parametrize("mesh", [None, "explicit"])
def test_errors_of_traced_functions_name_them_and_their_arguments(mesh: str | None) -> None:
    options = {"build": model, "optimizer": optax.sgd(0.1), "batch": {"x": jax.ShapeDtypeStruct(X.shape, "float32")}}
    context = nullcontext() if mesh is None else jax.set_mesh(jax.make_mesh((8,), ("data",)))
    traced = [
        ("if_large", lambda: spanax.trace(loss=if_large, **options)),
        ("if_large", lambda: spanax.trace(loss=if_large, compute_dtype="bfloat16", **options)),
        ("train_step", lambda: spanax.trace(train_step=step_with(if_large), **options)),
        ("if_large", lambda: spanax.trace(loss=mean, evaluate=if_large, **options)),
        ("if_large", lambda: spanax.jit(partial(if_large), mesh="data=8")(model(), {"x": X})),
    ]
    with context:
        for name, call in traced:
            with pytest.raises(
                jax.errors.TracerBoolConversionError, match=f"function {name} at (.|\n)* argument"
            ) as error:
                call()
            assert "argument batch.x." in str(error.value) and "jnp.where" in error.value.__notes__[-1]
        for average in ({"loss": averaged}, {"train_step": step_with(averaged)}, {"loss": mean, "evaluate": averaged}):
            with pytest.raises(SpanaxError, match="name of a mapped axis(.|\n)*delete the line"):
                spanax.trace(**options | {"batch": options["batch"]["x"]} | average)


def test_a_call_that_raises_leaves_the_objects_unchanged() -> None:
    step, first, second = spanax.jit(update, mesh="fsdp=8"), model(), nnx.Linear(16, 64, rngs=nnx.Rngs(0))
    step(first, X)
    step(second, X)
    with pytest.raises(SpanaxError, match="not divisible by 8"):
        step(first, X[:6])
    assert float(first.bias[0]) == float(second.bias[0]) == 1
    first.kernel.set_raw_value(np.ones((16, 64), np.float32))
    with pytest.raises((TypeError, ValueError)):  # as under nnx.jit: the bias has 32 elements
        step(first, X)
    assert float(first.bias[0]) == 1


def test_a_mesh_of_six_of_eight_devices_runs_on_request() -> None:
    six = jax.make_mesh((3, 2), ("data", "model"), devices=jax.devices()[:6])
    requests: tuple[dict[str, Any], ...] = (
        {"mesh": six},
        {"mesh": "data=3,model=2", "on": spanax.local(six.devices.flat)},
    )
    for request in requests:
        objects = model()
        spanax.jit(update, **request)(objects, X[:6])
        assert len(objects.kernel.sharding.device_set) == 6


def test_a_keyword_may_have_any_name() -> None:
    step = spanax.jit(lambda model, self: model(self).sum(), mesh="data=8")
    assert step.prepare(model(), self=X) == step.prepare(model(), X)
    np.testing.assert_allclose(step(model(), self=X), model()(X).sum(), rtol=1e-5)


def test_the_fix_of_a_function_without_a_batch_works() -> None:
    target = model()
    step = spanax.jit(update, mesh="fsdp=8")
    step(target, X)

    def halve(model: Any) -> None:
        model.kernel[...] *= 0.5

    with pytest.raises(
        SpanaxError, match=r"'fsdp' \(8\) has nothing to shard(.|\n)*fix: spanax.jit\(function, like=train_step\)"
    ):
        spanax.jit(halve, mesh="fsdp=8")(target)
    before = float(target.kernel[0, 0])
    spanax.jit(halve, like=step)(target)
    assert float(target.kernel[0, 0]) == before / 2


def test_names_of_layouts_and_keywords_are_checked_before_any_call() -> None:
    with pytest.raises(SpanaxError, match="unknown layout 'fspd'(.|\n)*did you mean 'fsdp'"):
        spanax.jit(update, layout="fspd")
    with pytest.raises(SpanaxError, match="mesh axis 'fspd' has no default meaning"):
        spanax.jit(update, mesh="fspd=8")
    assert spanax.jit(update, donate_argnums=0, keep_unused=False).donate
    assert not spanax.jit(update, donate_argnames=()).donate
    options = {"xla_backend_optimization_level": 1}
    assert spanax.jit(update, mesh="data=8", compiler_options=options)(model(), X).shape == ()
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_none_such"):
        spanax.jit(update, mesh="data=8", compiler_options={"xla_none_such": 1})(model(), X)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"like": spanax.jit(update), "mesh": "data=8"}, "`mesh` does not apply"),
        ({"plan": planned(), "layout": "fsdp"}, "`layout` does not apply"),
        ({"remat": "bogus"}, "unknown remat policy 'bogus'"),
        ({"attention": "bogus"}, "unknown attention 'bogus'"),
        ({"remat": "dots"}, "the function has none"),
        ({"microbatches": 2}, "the function has none"),
        ({"loss_chunks": 2}, "the function has none"),
        ({"mesh": "pipe=2,data=4"}, "no loop over equal layers"),
        ({"donate_argnums": 0, "donate": False}, "contradicts donate_argnums"),
        ({"out_shardings": jax.P("data")}, "`out_shardings` of nnx.jit does not apply"),
        ({"donate_argnum": 0}, "no argument `donate_argnum`(.|\\n)*did you mean"),
    ],
)
def test_bad_options_are_one_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpanaxError, match=message):
        spanax.jit(update, **options)(model(), X)


def test_a_function_without_objects_raises() -> None:
    with pytest.raises(SpanaxError, match=r"`model` has no objects and no arrays to shard(.|\n)*spanax.init"):
        spanax.jit(model, mesh="fsdp=8")()
    with pytest.raises(
        SpanaxError, match=r"no NNX objects: fsdp would shard nothing(.|\n)*an nnx.Module or an nnx.State"
    ):
        spanax.jit(lambda weights, x: x @ weights["kernel"], mesh="fsdp=8")({"kernel": X.T}, X)


@pytest.mark.filterwarnings("ignore:Using .Module.sow:DeprecationWarning")
def test_values_that_a_function_records_are_one_error() -> None:
    def record(model: Any, x: Any) -> Any:
        y = model(x)
        model.sow(nnx.Intermediate, "y", y)
        return y

    step, target = spanax.jit(record, mesh="data=8"), model()
    with pytest.raises(SpanaxError, match=r"nnx.pop\(model, nnx.Intermediate\)"):
        for _ in range(2):
            step(target, X)


def test_a_function_without_a_call_has_no_plan() -> None:
    with pytest.raises(SpanaxError, match="`update` has no plan before it is called"):
        _ = spanax.jit(update).plan
