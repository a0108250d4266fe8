"""The dim with the examples of each array, decided from the program, and named by the user."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from spanax.errors import IdleAxisError, IndivisibleError, SpanaxError

pytestmark = pytest.mark.usefixtures("devices")  # they run functions of `spanax.jit`

D, H, C, B = 6, 32, 4, 16


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, width: int = H):
        self.up, self.down = nnx.Linear(D, width, rngs=rngs), nnx.Linear(width, C, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(nnx.relu(self.up(x)))


class Recurrent(nnx.Module):
    """Returns logits of the last step, or of each, of inputs [T, B, D]."""

    def __init__(self, rngs: nnx.Rngs, cell: Any = nnx.GRUCell, is_last: bool = True):
        self.rnn, self.down = nnx.RNN(cell(D, H, rngs=rngs), time_major=True), nnx.Linear(H, C, rngs=rngs)
        self.is_last = is_last

    def __call__(self, x: Any) -> Any:
        hidden = self.rnn(x)
        return self.down(hidden[-1] if self.is_last else hidden)


def entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def updated(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    loss, gradients = nnx.value_and_grad(lambda model: entropy(model(x), y))(model)
    optimizer.update(model, gradients)
    return loss


def accumulated(model: Any, optimizer: Any, xs: Any, ys: Any) -> None:
    graphdef, params = nnx.split(model)

    def body(total: Any, part: Any) -> Any:
        gradients = jax.grad(lambda params: entropy(nnx.merge(graphdef, params)(part[0]), part[1]))(params)
        return jax.tree.map(jnp.add, total, gradients), None

    gradients, _ = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), (xs, ys))
    optimizer.update(model, gradients)


def scanned(model: Any, optimizer: Any, xs: Any, ys: Any) -> Any:
    @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=(nnx.Carry, 0))
    def body(objects: Any, x: Any, y: Any) -> Any:
        return objects, updated(*objects, x, y)

    return body((model, optimizer), xs, ys)[1].mean()


def indexed_by_loop(model: Any, optimizer: Any, xs: Any, ys: Any) -> None:
    graphdef, state = nnx.split((model, optimizer))

    def body(index: Any, state: Any) -> Any:
        objects = nnx.merge(graphdef, state)
        updated(*objects, xs[index], ys[index])
        return nnx.state(objects)

    nnx.update((model, optimizer), jax.lax.fori_loop(0, xs.shape[0], body, state))


def unrolled(model: Any, optimizer: Any, xs: Any, ys: Any) -> None:
    for x, y in zip(xs, ys, strict=True):
        updated(model, optimizer, x, y)


def shuffled(model: Any, optimizer: Any, x: Any, y: Any, key: Any) -> Any:
    order = jax.random.permutation(key, x.shape[0])
    return scanned(model, optimizer, x[order].reshape(4, -1, D), y[order].reshape(4, -1))


def looked_up(model: Any, optimizer: Any, images: Any, labels: Any, rows: Any) -> Any:
    return updated(model, optimizer, images[rows], labels[rows])


def noisy(key: Any, model: Any, optimizer: Any, scale: Any, x: Any) -> Any:
    x = x + scale * jax.random.normal(key, x.shape)
    return updated(model, optimizer, x, jnp.zeros(x.shape[0], "int32"))


def per_example(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    graphdef, params = nnx.split(model)
    loss = lambda params, x, y: entropy(nnx.merge(graphdef, params)(x), y)  # noqa: E731
    gradients = jax.vmap(jax.grad(loss), (None, 0, 0))(params, x, y)
    optimizer.update(model, jax.tree.map(lambda leaf: jnp.clip(leaf, -1, 1).mean(0), gradients))


def of_views(encode: Callable[[Any, Any], Any]) -> Any:
    def step(model: Any, optimizer: Any, views: Any) -> None:
        def loss(model: Any) -> Any:
            first, second = encode(model, views)
            return entropy(first @ second.T, jnp.arange(first.shape[0]))

        optimizer.update(model, nnx.grad(loss)(model))

    return step


def rollout(model: Any, optimizer: Any, observed: Any, actions: Any, rewards: Any) -> None:
    """Advantages by a scan over time, and the network on merged dims."""

    def loss(model: Any) -> Any:
        logits = model(observed.reshape(-1, D))
        values = logits[:, 0].reshape(rewards.shape)
        advance = lambda carry, row: (row[0] + 0.9 * carry - row[1],) * 2  # noqa: E731
        _, advantages = jax.lax.scan(advance, jnp.zeros(B), (rewards, values), reverse=True)
        taken = jnp.take_along_axis(jax.nn.log_softmax(logits), actions.reshape(-1, 1), -1)[:, 0]
        return (taken * jax.lax.stop_gradient(advantages).reshape(-1)).mean() + jnp.square(advantages).mean()

    optimizer.update(model, nnx.grad(loss)(model))


def forward(weights: Any, x: Any) -> Any:
    return jax.nn.relu(x @ weights["up"] + weights["bias"]) @ weights["down"]


def descended(weights: Any, x: Any, y: Any) -> Any:
    gradients = jax.grad(lambda weights: entropy(forward(weights, x), y))(weights)
    return jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, weights, gradients)


def mapped(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    graphdef, params = nnx.split(model)
    loss = lambda params: entropy(jax.lax.map(nnx.merge(graphdef, params), x), y)  # noqa: E731
    optimizer.update(model, jax.grad(loss)(params))


def reals(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype("float32")


def labels(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).integers(0, C, shape).astype("int32")


WEIGHTS = {"bias": reals(H), "down": reals(H, C), "up": reals(D, H)}
PARTS, PLAIN, VIEWS = (reals(3, B, D), labels(3, B)), (reals(B, D), labels(B)), (reals(2, B, D),)
TIMED = reals(10, B, D)

# name: the model, the step, its arrays, the dims with the examples
FORMS: dict[str, tuple[Any, Callable[..., Any], tuple[Any, ...], tuple[int | None, ...]]] = {
    "plain": (Net, updated, PLAIN, (0, 0)),
    "accumulation in a scan": (Net, accumulated, PARTS, (1, 1)),
    "minibatches in a scan": (Net, scanned, PARTS, (1, 1)),
    "minibatches by an index": (Net, indexed_by_loop, PARTS, (1, 1)),
    "minibatches in a Python loop": (Net, unrolled, PARTS, (1, 1)),
    "shuffled minibatches": (Net, shuffled, (reals(4 * B, D), labels(4 * B), np.zeros(2, np.uint32)), (0, 0, None)),
    "rows of a data set": (Net, looked_up, (reals(999, D), labels(999), labels(B)), (None, None, 0)),
    "a key and a scalar first": (Net, noisy, (np.zeros(2, np.uint32), np.float32(0.1), reals(B, D)), (None, None, 0)),
    "gradients of examples": (Net, per_example, PLAIN, (0, 0)),
    "two views": (Net, of_views(lambda model, views: (model(views[0]), model(views[1]))), VIEWS, (1,)),
    "two views at once": (Net, of_views(lambda model, views: tuple(model(views))), VIEWS, (1,)),
    "two merged views": (Net, of_views(lambda model, views: jnp.split(model(views.reshape(-1, D)), 2)), VIEWS, (1,)),
    "time-major": (Recurrent, updated, (TIMED, labels(B)), (1, 0)),
    "time-major labels": (lambda rngs: Recurrent(rngs, is_last=False), updated, (TIMED, labels(10, B)), (1, 1)),
    "time-major LSTM": (lambda rngs: Recurrent(rngs, nnx.OptimizedLSTMCell), updated, (TIMED, labels(B)), (1, 0)),
    "agents": (lambda rngs: Recurrent(rngs, is_last=False), updated, (reals(10, B, 3, D), labels(10, B, 3)), (1, 1)),
    "advantages": (Net, rollout, (TIMED, labels(10, B), reals(10, B)), (1, 1, 1)),
    "weights as arrays": (None, descended, (WEIGHTS, *PLAIN), (None, None, None, 0, 0)),
    "frozen weights as arrays": (None, forward, (WEIGHTS, PLAIN[0]), (None, None, None, 0)),
}


def objects(build: Any) -> tuple[Any, ...]:
    if build is None:
        return ()
    model = build(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def arguments(name: str) -> tuple[Any, ...]:
    build, step, arrays, _ = FORMS[name]
    return (arrays[0], *objects(build), *arrays[1:]) if step is noisy else (*objects(build), *arrays)


@pytest.mark.parametrize("name", FORMS)
def test_the_program_shows_which_dim_has_the_examples(name: str) -> None:
    _, step, _, expected = FORMS[name]
    function = spanax.jit(step, mesh="data=1")
    function.prepare(*arguments(name))
    assert function.program.step.axes.examples == expected
    assert function.plan.setting.batch_size == function.program.batch_size == (64 if step is shuffled else B)


SHARDED = ("accumulation in a scan", "minibatches by an index", "time-major", "two merged views", "weights as arrays")


@pytest.mark.parametrize("name", SHARDED)
def test_the_work_of_a_loop_is_divided_with_the_numbers_of_one_device(name: str) -> None:
    _, step, _, _ = FORMS[name]
    results, flops = [], []
    for mesh in ("data=1", "data=8"):
        function, args = spanax.jit(step, mesh=mesh), arguments(name)
        returned = function(*args)
        params = nnx.state(args[0], nnx.Param) if isinstance(args[0], nnx.Module) else {}
        results.append(jax.tree.leaves((returned, params)))
        cost: Any = function.lower().compile().cost_analysis()
        flops.append((cost[0] if isinstance(cost, list) else cost)["flops"])
    assert flops[0] > 3.5 * flops[1]
    for expected, result in zip(*results, strict=True):
        np.testing.assert_allclose(result, expected, rtol=2e-5, atol=1e-6)


def test_a_mesh_axis_that_divides_no_work_is_refused() -> None:
    with pytest.raises(IdleAxisError, match=r"no matmul or convolution has batch \(16\)"):
        spanax.jit(mapped, mesh="data=8").prepare(*objects(lambda rngs: Net(rngs, 512)), *PLAIN)


def test_an_indivisible_size_asks_for_the_steps_of_its_array() -> None:
    with pytest.raises(IndivisibleError, match="does dim 0 of `x` count steps"):
        spanax.jit(updated, mesh="data=8").prepare(*objects(Net), reals(3, B, D), labels(3, B))


@pytest.mark.parametrize("axes", [1, (None, None, 1, 1), [0, 0, {"x": -2}, 1], (None, None, {"x": 1}, 1)])
def test_the_user_says_which_dim_has_the_examples(axes: Any) -> None:
    step = lambda model, optimizer, xs, ys: updated(model, optimizer, xs["x"], ys)  # noqa: E731
    function = spanax.jit(step, mesh="data=8", batch_axes=axes)
    function.prepare(*objects(Net), ys=PARTS[1], xs={"x": PARTS[0]})
    assert function.program.step.axes.examples == (1, 1)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ((None, None, 1), "an entry for each parameter, also for `y`"),
        ((None,) * 5, "one entry for each parameter"),
        ((None, None, {"a": 1}, 1), "a pytree prefix of `x`"),
        ((None, None, 3, 1), "batch_axes has 3 for `x`, which has 3 dims"),
        ((None, None, 0, 1), "batch_axes gives `x` 3 examples and `y` 16"),
        (True, "`batch_axes` is True, of type bool"),
    ],
)
def test_batch_axes_that_do_not_fit_name_the_argument(axes: Any, message: str) -> None:
    with pytest.raises(SpanaxError) as caught:
        spanax.jit(updated, mesh="data=8", batch_axes=axes).prepare(*objects(Net), *PARTS)
    assert message in str(caught.value)


@pytest.mark.parametrize("axes", ["auto", {"x": 1, "y": 0}])
def test_a_time_major_workload_trains_and_evaluates_like_one_device(axes: Any) -> None:
    rows = [{"x": reals(10, D) + index, "y": np.int32(index % C)} for index in range(40)]
    batch = {"x": jax.ShapeDtypeStruct((10, B, D), "float32"), "y": jax.ShapeDtypeStruct((B,), "int32")}
    workload = spanax.Workload(
        Recurrent, batch, lambda model, batch: entropy(model(batch["x"]), batch["y"]), batch_axes=axes
    )
    fewer = {"x": np.stack([row["x"] for row in rows[:6]], 1), "y": np.array([row["y"] for row in rows[:6]])}
    results = []
    for devices, microbatches in ((1, 1), (4, 2)):
        program = workload.trace(learning_rate=0.1, num_steps=2).variant(microbatches=microbatches)
        plan = spanax.plan(program, spanax.cluster(f"cpu:{devices}"), mesh=f"data={devices}")
        run = spanax.start(program, plan)
        data = spanax.batches(rows, plan, epochs=1, drop_remainder=False)
        losses = [float(run.step(batch)["loss"]) for _, batch in zip(range(2), data, strict=False)]
        results.append([*losses, float(run.evaluate(fewer)["loss"]), float(run.evaluate(next(data))["loss"])])
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5)
