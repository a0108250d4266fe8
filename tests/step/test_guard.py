"""Guard: what counts as a bad step, and a compiled step that changes nothing where its numbers are bad."""

import functools
import json
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from pipelines import planned
from programs import Net
from sampling import sampled
from spanax.step.guard import History
from spanax.trace.program import Program
from spanax.train.run import Run

NAN = math.nan


# What is bad


def bad_steps(guard: spanax.Guard, values: Sequence[float], name: str = "loss") -> dict[int, str]:
    """The bad steps among those that returned these values, and why."""
    history, result = History(), {}
    for step, value in enumerate(values, 1):
        reason = guard.reason(history, step, {name: value})
        history = guard.seen(history, step, {name: value})
        if reason is not None:
            result[step] = reason
    return result


WAVERING = [0.1 * math.sin(1.7 * step) for step in range(40)]

# what happens: spike, window, values, the steps that are bad
SPIKES: dict[str, tuple[float | None, int, list[float], list[int]]] = {
    "nothing": (3, 8, [2.0] * 20, []),
    "a NaN": (None, 8, [2.0, NAN, 2.0], [2]),
    "infinities, up and down": (None, 8, [2.0, math.inf, -math.inf], [2, 3]),
    "a NaN in the first step": (3, 8, [NAN, 2.0], [1]),
    "too large for 32 bits": (None, 8, [2.0, 1e39], [2]),
    "a spike nobody asked about": (None, 8, [2.0] * 10 + [1e6], []),
    "a spike": (3, 8, [2.0] * 10 + [6.1, 2.0], [11]),
    "just none": (3, 8, [2.0] * 10 + [6.0, 2.0], []),
    "downwards is no spike": (3, 8, [2.0] * 10 + [0.001, -5.0], []),
    "first steps, while nothing is known": (3, 8, [2.0, 2.0, 90.0], []),
    "the first limit": (3, 8, [2.0, 2.0, 2.0, 90.0], [4]),
    "a spike does not raise the limit": (3, 8, [2.0] * 10 + [9.0] * 6, [11, 12, 13, 14, 15, 16]),
    "a loss that falls fast": (2, 8, [10 * 0.8**step for step in range(30)], []),
    "a loss that grows slowly": (2, 8, [1.05**step for step in range(60)], []),
    "a negative loss": (2, 8, [-5.0] * 10 + [-0.5, 0.5], [12]),
    "a negative loss that jumps": (2, 8, [-5.0] * 10 + [30.0], [11]),
    "a loss about zero that wavers": (2, 16, WAVERING, []),
    "a loss about zero that jumps": (2, 16, [*WAVERING, 2.0], [41]),
    "a loss of zero": (2, 8, [0.0] * 10 + [1e-6], []),
    "a level that changes slowly is followed": (2, 8, [1.0] * 10 + [1.9] * 10 + [3.7], []),
}


@pytest.mark.parametrize("name", SPIKES)
def test_spikes_are_distinguished_from_noise(name: str) -> None:
    spike, window, values, expected = SPIKES[name]
    assert list(bad_steps(spanax.Guard(spike=spike, window=window), values)) == expected


def test_the_reason_names_the_value_and_its_limit() -> None:
    assert bad_steps(spanax.Guard(spike=3, window=4), [2.0, 2.0, 2.0, 7.5], "grad_norm") == {
        4: "grad_norm is 7.5, over its limit of 6"
    }


def test_the_metrics_of_the_last_step_may_be_pending() -> None:
    """With or without the value of the step before, the limit is the same."""
    guard = spanax.Guard(spike=3, window=4)
    history = functools.reduce(lambda seen, step: guard.seen(seen, step, {"loss": float(step)}), range(1, 9), History())
    early = History(history.good[:-1])
    assert guard.limit(history, 9, "loss") == guard.limit(early, 9, "loss") < math.inf
    assert guard.limit(history, 10, "loss") != guard.limit(early, 10, "loss")


def test_a_restored_history_decides_as_before() -> None:
    guard = spanax.Guard(spike=2, window=16)
    history, values = History(), np.random.default_rng(0).normal(3, 1, 40).tolist()
    for step, value in enumerate(values, 1):
        history = guard.seen(history, step, {"loss": value, "grad_norm": abs(value)})
    again = History.of(json.loads(json.dumps(history.record())), 40)
    assert again == history
    assert History.of(None, 7).last_good_step == 7
    for bad in (7, [[1]], [["a", {}]], [[1, {"loss": "much"}]], {"loss": 1}):
        with pytest.raises(spanax.DataError, match="not a valid history of good steps"):
            History.of(bad, 7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"policy": "stop"}, "unknown policy 'stop'"),
        ({"spike": 1.0}, "greater than 1"),
        ({"metrics": "loss"}, "must be a tuple of names"),
    ],
)
def test_an_invalid_guard_raises(options: dict[str, Any], says: str) -> None:
    with pytest.raises(spanax.SpanaxError, match=says):
        spanax.Guard(**options)


# In a loop without a Run


def test_a_watch_decides_like_a_run() -> None:
    guard = spanax.Guard("skip", spike=3, window=8, patience=6)
    values = [2.0] * 10 + [9.0, 2.0, NAN, 2.0]
    watch = guard.watch()
    reasons = {step: why for step, value in enumerate(values, 1) if (why := watch.judge(step, {"loss": value}))}
    assert reasons == bad_steps(guard, values) and sorted(reasons) == [11, 13]


@pytest.mark.parametrize(
    "array", [float, np.float32, jnp.float32, jnp.bfloat16, np.array, lambda value: jnp.full((), value, jnp.float16)]
)
def test_a_watch_reads_any_scalar(array: Any) -> None:
    watch = spanax.Guard("skip", metrics=("d_loss", "g_loss")).watch()
    for value, reason in ((2.0, None), (NAN, "g_loss is nan")):
        metrics = {"g_loss": array(value), "d_loss": array(1.0), "count": 3, "by_class": jnp.ones(3)}
        assert watch.judge(1, metrics) == reason


@pytest.mark.parametrize("metrics", [{}, {"accuracy": 1.0}, {"loss": 3}, {"loss": jnp.ones(2)}, {"loss": None}])
def test_a_watch_without_a_metric_to_check_raises(metrics: dict[str, Any]) -> None:
    with pytest.raises(spanax.SpanaxError, match="step 4 has no metric that the guard checks"):
        spanax.Guard().watch().judge(4, metrics)


def test_a_watch_follows_its_policy() -> None:
    with pytest.raises(spanax.NumbersError, match="step 1 is bad: loss is inf"):
        spanax.Guard("halt").watch().judge(1, {"loss": math.inf})
    watch = spanax.Guard("rollback", patience=2).watch()
    for step in (1, 2, 3):
        assert watch.judge(step, {"loss": 1.0}) is None
    state = watch.state()
    for _ in range(2):  # a loop that goes back to step 1 and is bad again, after steps that it has taken before
        assert watch.judge(4, {"loss": NAN})
        watch.restore(state[:1])
        assert watch.judge(2, {"loss": 1.0}) is None and watch.judge(3, {"loss": 1.0}) is None
    with pytest.raises(spanax.NumbersError, match="bad steps after step 3: 3"):
        watch.judge(4, {"loss": NAN})
    assert watch.judge(4, {"loss": 1.0}) is None and watch.num_bad == 0


def test_the_compiled_step_checks_the_metrics_of_the_guard() -> None:
    def step(model: nnx.Module, optimizer: nnx.Optimizer[Any], batch: Any) -> dict[str, jax.Array]:
        loss, grads = nnx.value_and_grad(mean_square)(model, batch)
        optimizer.update(model, grads)
        return {"mine": loss, "parts": jnp.ones(2)}

    program = spanax.trace(build=Net, optimizer=optax.sgd(0.1), batch=rows(0), train_step=step)
    plan = spanax.plan(program, spanax.cluster("cpu:1"), mesh="data=1")
    run = spanax.start(program, plan, guard=spanax.Guard("skip", metrics=("mine",)))
    before = np.asarray(run.params()["up.kernel"])
    metrics = run.step(rows(0) | {"y": np.full((16, 8), NAN, np.float32)})
    assert not metrics["step_ok"] and np.array_equal(before, run.params()["up.kernel"])
    assert run.judge(1, jax.tree.map(lambda value: np.asarray(value).tolist(), metrics)) == "mine is nan"
    with pytest.raises(spanax.SpanaxError, match="the step returns no scalar 'parts', which the guard checks"):
        spanax.start(program, plan, guard=spanax.Guard("skip", metrics=("parts",))).step(rows(0))


# Skipping, in the compiled step


def mean_square(model: nnx.Module, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.square(model(batch["x"]) - batch["y"]).mean()


def rows(index: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(index)
    return {"x": random.normal(size=(16, 8)).astype(np.float32), "y": random.normal(size=(16, 8)).astype(np.float32)}


@functools.cache
def net() -> Program:
    return spanax.trace(build=Net, optimizer=optax.adamw(1e-2), batch=rows(0), loss=mean_square)


class Layers(nnx.Module):
    """A stack that stages can share, and that they need not divide."""

    def __init__(self, rngs: nnx.Rngs, num_layers: int):
        self.blocks = nnx.split_rngs(splits=num_layers)(nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs)))(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        graph, state = nnx.split(self.blocks)
        return jax.lax.scan(lambda x, layer: (jnp.tanh(nnx.merge(graph, layer)(x)), None), x, state)[0]


@functools.cache
def layers(num_layers: int) -> Program:
    build = lambda rngs: Layers(rngs, num_layers)  # noqa: E731
    optimizer = optax.adamw(1e-2)
    return spanax.trace(build=build, optimizer=optimizer, batch=rows(0), loss=mean_square, microbatches=4)


def spoilt(batch: dict[str, np.ndarray], value: float = NAN) -> dict[str, np.ndarray]:
    """A batch with one other number in it."""
    result = {key: of.copy() for key, of in batch.items()}
    next(iter(result.values())).flat[0] = value
    return result


def bits(run: Run) -> dict[str, bytes]:
    is_key = lambda array: jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)  # noqa: E731
    return {
        path: np.asarray(jax.random.key_data(array) if is_key(array) else array).tobytes()
        for path, array in run.arrays().items()
    }


def on(program: Program, mesh: str) -> spanax.Plan:
    return spanax.plan(program, spanax.cluster("cpu", spanax.MeshShape.of(mesh).size), mesh=mesh)


PLACES: dict[str, tuple[Any, Any]] = {
    "one device": (net, lambda: on(net(), "data=1")),
    "fsdp": (net, lambda: on(net(), "fsdp=8")),
    "fsdp+tensor": (net, lambda: on(net(), "fsdp=4,model=2")),
    "pipeline": (lambda: layers(4), lambda: planned(layers(4), "pipe=2,fsdp=2", "1f1b")),
    "padded pipeline": (lambda: layers(5), lambda: planned(layers(5), "pipe=2", "interleaved")),
}


@pytest.mark.parametrize("place", sampled(PLACES, ["one device", "fsdp+tensor", "padded pipeline"]))
def test_a_skipped_batch_changes_no_state(place: str) -> None:
    """Parameters, moments, statistics, counts and keys: the bits of a run that did not have the batch."""
    program, plan = (make() for make in PLACES[place])
    begin = lambda: spanax.start(program, plan, guard=spanax.Guard("skip", spike=50))  # noqa: E731
    run = begin()
    losses = [float(run.step(rows(index))["loss"]) for index in range(3)]
    expected = bits(run)
    run.go_back(begin)
    assert run.history == History() and run.num_steps == 0
    results = [run.step(rows(index)) for index in range(2)]
    before = bits(run)
    bad = run.step(spoilt(rows(3)))
    assert not bool(bad["step_ok"]) and math.isnan(float(bad["loss"]))
    assert bits(run) == before
    results.append(run.step(rows(2)))
    assert [float(item["loss"]) for item in results] == losses and all(bool(item["step_ok"]) for item in results)
    assert bits(run) == expected and run.num_steps == 4
    assert run.unsound() == []
    assert run.judge(5, {"loss": NAN}) == "loss is nan" and [step for step, _ in run.history.good] == [1, 2, 4]


@pytest.mark.parametrize("mesh", sampled(["data=1", "fsdp=8"], ["fsdp=8"]))
def test_without_bad_steps_the_guard_changes_no_number(mesh: str) -> None:
    """Bit-equal on jax 0.10.2; the compiler of 0.12 rounds once in a while where it joins other operations."""
    runs = [spanax.start(net(), on(net(), mesh), guard=guard) for guard in (None, spanax.Guard("skip", spike=50))]
    for index in range(3):
        plain, guarded = (float(run.step(rows(index))["loss"]) for run in runs)
        assert abs(plain - guarded) <= 1e-6 * plain
    for path, array in runs[0].arrays("param").items():
        np.testing.assert_allclose(array, runs[1].arrays("param")[path], rtol=1e-5, atol=1e-7, err_msg=path)


def test_a_spike_is_skipped_by_the_limit_of_its_step() -> None:
    guard = spanax.Guard("skip", spike=20, window=4)
    run = spanax.start(net(), on(net(), "fsdp=8"), guard=guard)
    for index in range(4):
        assert bool(run.step(rows(index))["step_ok"])
    before = bits(run)
    bad = run.step({**rows(4), "y": 100 * rows(4)["y"]})
    assert not bool(bad["step_ok"]) and bits(run) == before
    values = {name: float(bad[name]) for name in ("loss", "grad_norm")}
    limit = guard.limit(run.history, 5, "loss")
    assert run.judge(5, values) == f"loss is {values['loss']:.6g}, over its limit of {limit:.6g}"


def test_a_state_may_contain_intended_infinities() -> None:
    """A mask is no number that went wrong; a NaN is one anywhere."""

    class Masked(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.linear, self.mask = nnx.Linear(8, 8, rngs=rngs), nnx.Variable(jnp.array([0.0] * 7 + [-jnp.inf]))

        def __call__(self, x: jax.Array) -> jax.Array:
            return jax.nn.softmax(self.linear(x) + self.mask[...])

    program = spanax.trace(build=Masked, optimizer=optax.sgd(0.1), batch=rows(0), loss=mean_square)
    run = spanax.start(program, on(program, "data=1"))
    assert run.unsound() == []
    index = [leaf.path for leaf in program.leaves].index("mask")
    run.state[index] = run.state[index].at[0].set(NAN)
    assert run.unsound() == ["mask"]


# Steps of one's own, which return no gradient norm


class Plain(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (8, 8)))


def own_step(model: Plain, optimizer: nnx.Optimizer, batch: dict[str, jax.Array]) -> jax.Array:
    """A NaN gradient with a finite loss: the gradient of the root is infinite at zero, times zero."""

    def loss(model: Plain) -> jax.Array:
        kernel = model.kernel[...]
        root = jnp.sqrt(jnp.square(kernel).sum() * jnp.abs(batch["x"][0, 0]))
        return jnp.square(batch["x"] @ kernel - batch["y"]).mean() + 0 * root

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_bad_gradient_with_a_finite_loss_is_detected_in_its_step(policy: str) -> None:
    program = spanax.trace(build=Plain, optimizer=optax.adamw(1e-2), batch=rows(0), train_step=own_step)
    run = spanax.start(program, on(program, "fsdp=8"), guard=spanax.Guard(policy))
    assert bool(run.step(rows(0))["step_ok"])
    before = bits(run)
    bad = run.step(spoilt(rows(1), 0.0))
    assert math.isfinite(float(bad["loss"])) and not bool(bad["step_ok"])
    assert run.judge(2, {name: value.tolist() for name, value in bad.items()}) == "a parameter is not finite"
    assert (bits(run) == before) == (policy == "skip") == (run.unsound() == [])


def test_a_step_that_only_halts_is_the_step_without_a_guard() -> None:
    """If the step returns the gradient norm, nothing is added to the compiled program."""
    plan = on(net(), "fsdp=8")
    texts = [spanax.start(net(), plan, guard=guard).lower().as_text() for guard in (None, spanax.Guard("rollback"))]
    assert texts[0] == texts[1] != spanax.start(net(), plan, guard=spanax.Guard("skip")).lower().as_text()
