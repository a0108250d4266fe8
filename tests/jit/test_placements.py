"""Functions of one placement: which shardings they share, what they donate, and what remains after one failed."""

import copy
import threading
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
from spanax.check.hlo.collectives import collectives, totals
from spanax.errors import LostStateError, SpanaxError
from spanax.step import donation

MESH = "fsdp=4,model=2"
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)
X = np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32)


class Model(nnx.Module):
    """Layers with a raw array, statistics and random keys."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.up, self.norm = nnx.Linear(16, 64, rngs=rngs), nnx.BatchNorm(64, rngs=rngs)
        self.dropout, self.down = nnx.Dropout(0.1, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)
        self.decay = nnx.data(jnp.ones(16))

    def __call__(self, x: Any) -> Any:
        return self.down(self.dropout(nnx.relu(self.norm(self.up(x))))) * self.decay


def objects_of(transformation: optax.GradientTransformation | None = None) -> tuple[Model, nnx.Optimizer[Any]]:
    model = Model()
    return model, nnx.Optimizer(model, transformation or optax.adam(1e-2), wrt=nnx.Param)


def loss(model: Any, x: Any) -> Any:
    return ((model(x) - x[:, ::-1]) ** 2).mean()


def train_step(model: Any, optimizer: Any, x: Any) -> Any:
    value, gradients = nnx.value_and_grad(loss)(model, x)
    optimizer.update(model, gradients)
    model.decay = model.decay * 0.9
    return value


def gradients_of(model: Any, x: Any) -> Any:
    return nnx.grad(loss)(model, x)


def update(model: Any, optimizer: Any, gradients: Any) -> None:
    optimizer.update(model, gradients)


def moved_bytes(function: Any) -> Any:
    """The bytes of the collectives in the program of the last call, by mesh axes."""
    program = function.lower().compile().runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    return totals(collectives(program, function.plan.mesh))


def assert_as_planned(function: Any, *objects: Any) -> None:
    for placement, array in zip(function.plan.leaves, jax.tree.leaves(nnx.state(objects)), strict=False):
        sharding = placement.sharding(function.placement.mesh)
        assert array.sharding.is_equivalent_to(sharding, array.ndim), placement.path


@pytest.mark.parametrize("first", ["gradients", "update", "prepare"])
@pytest.mark.parametrize("mesh", [MESH, "data=8"])
def test_an_update_without_a_batch_moves_nothing(first: str, mesh: str) -> None:
    (model, optimizer), expected = objects_of(), objects_of()
    compute = spanax.jit(gradients_of, mesh=mesh)
    apply = spanax.jit(update, like=compute)
    zeros = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
    if first == "update":
        for function, objects in ((apply, (model, optimizer)), (nnx.jit(update), expected)):
            function(*objects, zeros)
    elif first == "prepare":
        compute.prepare(model, X)
        plan = apply.prepare(model, optimizer, zeros)
        assert plan["up.kernel"].spec == compute.plan["up.kernel"].spec
    for _ in range(2):
        apply(model, optimizer, compute(model, X))
        nnx.jit(update)(*expected, nnx.jit(gradients_of)(expected[0], X))
    assert moved_bytes(apply) == {}
    assert_as_planned(apply, model, optimizer)
    assert_as_planned(compute, model)
    for layer in ("up", "down"):
        weight, moment = getattr(model, layer).kernel, optimizer.opt_state[0].mu[layer].kernel
        assert moment.sharding.spec == weight.sharding.spec
        assert mesh == "data=8" or weight.sharding.spec != jax.P()
    np.testing.assert_allclose(model.up.kernel, expected[0].up.kernel, rtol=1e-4, atol=1e-6)


def test_arrays_that_are_on_the_mesh_keep_their_sharding() -> None:
    model, optimizer = objects_of()
    step = spanax.jit(train_step, mesh=MESH)
    evaluate = spanax.jit(loss, like=step)
    sharding = jax.NamedSharding(spanax.MeshShape.of(MESH).build(), jax.P("model", "fsdp"))
    model.up.kernel[...] = jax.device_put(model.up.kernel[...], sharding)
    np.testing.assert_allclose(step(model, optimizer, X), nnx.jit(train_step)(*objects_of(), X), rtol=1e-5)
    evaluate(model, X)
    for function, objects in ((step, (model, optimizer)), (evaluate, (model,))):
        assert_as_planned(function, *objects)
        assert function.plan["up.kernel"].partition_spec == jax.P("model", "fsdp")
        assert "as it was sharded before" in function.explain("up.kernel")
        assert spanax.Plan.from_json(function.plan.to_json()) == function.plan
    assert optimizer.opt_state[0].mu.up.kernel.sharding.spec == jax.P("model", "fsdp")
    assert step.check(level=2).compiled.state_bytes == step.plan.state_bytes()
    # A plan of the user decides instead.
    plan = spanax.jit(train_step, mesh=MESH).prepare(*objects_of(), X)
    spanax.jit(train_step, plan=plan)(model, optimizer, X)
    assert model.up.kernel.sharding.spec == plan["up.kernel"].partition_spec == jax.P(None, ("fsdp", "model"))


@pytest.mark.parametrize(("on", "is_other"), [("h100:8", True), ("v5e:8", True), ("cpu:8", False), (None, False)])
def test_a_call_on_other_devices_than_it_is_planned_for_warns(on: str | None, is_other: bool) -> None:
    model = nnx.Linear(16, 32, rngs=nnx.Rngs(0))
    step = spanax.jit(lambda model, x: model(x).sum(), on=on, layout="fsdp")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step.prepare(model, X)
        assert not caught
        step(model, X)
    messages = [str(warning.message) for warning in caught]
    assert any("and runs on 8 devices of kind 'cpu'" in each for each in messages) == is_other


def test_a_function_describes_its_last_call() -> None:
    step, model = spanax.jit(loss, mesh="data=8"), Model()
    for size in (16, 32, 16):
        step(model, X[:size])
        assert step.plan.batch[0].shape == (size, 16) == step.program.batch[0].shape
        assert f"f32[{size // 8},16]" in step.lower().compile().as_text()
    assert step.num_compilations == 2


HOLDERS: dict[str, Callable[[Model], Any]] = {
    "a clone": nnx.clone,
    "a state": lambda model: nnx.to_pure_dict(nnx.state(model)),
    "a raw array": lambda model: [model.decay],
    "a leaf": lambda model: {"kernel": model.up.kernel[...]},
    "a NumPy view": lambda model: [np.asarray(model.up.kernel[...])],
}


def values(objects: Any) -> list[Any]:
    leaves = jax.tree.leaves(objects)
    keys = [jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    return [np.array(jax.random.key_data(leaf) if key else leaf) for leaf, key in zip(leaves, keys, strict=True)]


@pytest.mark.parametrize("mesh", ["data=1", MESH])
def test_arrays_that_others_hold_are_not_donated(mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Any] = []
    original = donation.private_copy
    monkeypatch.setattr(donation, "private_copy", lambda array: copies.append(array) or original(array))
    model, optimizer = objects_of()
    step = spanax.jit(train_step, mesh=mesh)
    assert step.prepare(model, optimizer, X) and step.lower().compile().memory_analysis().alias_size_in_bytes > 0
    clone = nnx.clone(model)
    expected = values(clone)
    for _ in range(3):
        step(model, optimizer, X)
    assert not copies, "only the objects held the arrays"
    for before, after in zip(expected, values(clone), strict=True):
        np.testing.assert_array_equal(before, after)
    for name, hold in HOLDERS.items():
        holder = hold(model)
        expected = values(holder)
        step(model, optimizer, X)
        for before, after in zip(expected, values(holder), strict=True):
            np.testing.assert_array_equal(before, after, err_msg=name)
    # One array twice, in two objects of the same call, is donated once.
    nnx.update(model, nnx.state(clone))
    both = spanax.jit(
        lambda left, right, x: (
            [nnx.update(each, jax.tree.map(jnp.cos, nnx.state(each, nnx.Param))) for each in (left, right)] and x
        ),
        like=step,
    )
    both(model, clone, X)
    np.testing.assert_array_equal(model.up.kernel, clone.up.kernel)


def fail(value: Any) -> Any:
    raise RuntimeError("a callback raised")


def failing(model: Any, optimizer: Any, x: Any, is_failing: bool = False) -> Any:
    value = train_step(model, optimizer, x)
    return jax.pure_callback(fail, SCALAR, value) if is_failing else value


@pytest.mark.parametrize("mesh", ["data=1", "data=8"])
@pytest.mark.parametrize("donate", [True, False])
def test_after_a_failed_step_objects_are_as_before_or_one_error_says_so(mesh: str, donate: bool, tmp_path: Any) -> None:
    model, optimizer = objects_of()
    step = spanax.jit(failing, mesh=mesh, donate=donate, static_argnames="is_failing")
    evaluate = spanax.jit(loss, like=step)

    def run_failing() -> None:
        with pytest.raises(jax.errors.JaxRuntimeError, match="callback"):
            jax.block_until_ready(step(model, optimizer, X, is_failing=True))

    before = values(nnx.state((model, optimizer)))
    run_failing()  # the first call donates copies
    for old, new in zip(before, values(nnx.state((model, optimizer))), strict=True):
        np.testing.assert_array_equal(old, new)
    first = float(step(model, optimizer, X))
    run_failing()
    if not donate:
        assert float(step(model, optimizer, X)) < first
        return
    uses = {
        "the step": lambda: step(model, optimizer, X),
        "another function": lambda: evaluate(model, X),
        "resharding": lambda: spanax.reshard(model, like=evaluate),
        "saving": lambda: spanax.Checkpoints(tmp_path).save(1, {"model": model}),
    }
    evaluate.prepare(model, X)
    for use in uses.values():
        with pytest.raises(LostStateError, match="was lost in a step that failed"):
            use()
    model, optimizer = objects_of()
    assert float(step(model, optimizer, X)) == first


def test_a_failed_step_of_a_run_is_one_error() -> None:
    program = spanax.trace(
        build=lambda rngs: nnx.Linear(16, 16, rngs=rngs), optimizer=optax.sgd(0.1), batch=X,
        loss=lambda model, x: loss(model, x) + jax.pure_callback(check_first, SCALAR, x[0, 0]),
    )  # fmt: skip
    run = spanax.start(program, spanax.plan(program, spanax.cluster("cpu:8"), layout="fsdp"))
    run.step(np.ones_like(X))
    with pytest.raises(jax.errors.JaxRuntimeError):
        jax.block_until_ready(run.step(np.zeros_like(X)))
    for use in (lambda: run.step(X), lambda: run.evaluate(X), run.params):
        with pytest.raises(LostStateError):
            use()


def check_first(value: Any) -> Any:
    if value == 0:
        raise RuntimeError("a callback raised")
    return np.float32(0)


def test_threads_take_turns() -> None:
    model, optimizer = objects_of(optax.sgd(1e-3))
    step = spanax.jit(train_step, mesh="fsdp=8")
    evaluate, errors = spanax.jit(loss, like=step), list[BaseException]()

    def work(function: Callable[..., Any], *objects: Any) -> None:
        try:
            for _ in range(20):
                function(*objects, X)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=each) for each in ((step, model, optimizer),) * 2 + ((evaluate, model),)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert not errors and not any(thread.is_alive() for thread in threads)
    assert int(optimizer.step[...]) == 40
    assert copy.deepcopy(spanax.jit(train_step, mesh="fsdp=8"))(model, optimizer, X).shape == ()


@pytest.mark.parametrize("mesh", ["data=1", "data=8"])
def test_a_call_in_a_callback_or_a_trace_does_not_wait_for_itself(mesh: str) -> None:
    other, model = Model(), Model()
    other.eval()
    inner = spanax.jit(loss, mesh=mesh)
    expected = float(inner(other, X))

    def outer(model: Any, x: Any) -> Any:
        constant = inner(other, X)  # while the outer function is traced
        called = jax.pure_callback(lambda value: np.float32(inner(other, X)), SCALAR, x[0])
        return loss(model, x) * 0 + constant + called

    step = spanax.jit(outer, like=inner)
    try:  # JAX runs callbacks of one device in the thread of the call, or in another
        assert float(step(model, X)) == pytest.approx(2 * expected, rel=1e-5)
    except jax.errors.JaxRuntimeError as error:
        assert "a callback of a running function calls a function of spanax.jit" in str(error)


def test_objects_are_resharded_in_place() -> None:
    model, optimizer = objects_of()
    before = values(nnx.state((model, optimizer)))
    on_two, on_all = spanax.jit(train_step, mesh="fsdp=2"), spanax.jit(train_step, mesh=MESH)
    on_two(*objects_of(), X)
    spanax.reshard((model, optimizer), like=on_two)
    with pytest.raises(SpanaxError, match="already sharded over another mesh") as error:
        on_all(model, optimizer, X)
    assert "fix: spanax.reshard(objects, like=function), or jax.device_put" in str(error.value)
    held = model.up.kernel[...]
    expected = np.array(held)
    for like in (on_all.prepare(model, optimizer, X), on_all, on_all.prepare(*nnx.eval_shape(objects_of), X)):
        spanax.reshard((model, optimizer), like=like)
        assert_as_planned(on_all, model, optimizer)
    for old, new in zip(before, values(nnx.state((model, optimizer))), strict=True):
        np.testing.assert_array_equal(old, new)
    on_all(model, optimizer, X)
    np.testing.assert_array_equal(held, expected)  # the copy is donated, not the array on the other mesh
    for objects, like in ((model, train_step), (X, on_all)):
        with pytest.raises(SpanaxError, match="`like`|not NNX objects"):
            spanax.reshard(objects, like=like)  # type: ignore[arg-type]
