"""Losses of fine-tuning: the formulas again in NumPy, and the same numbers in every layout, microbatch and chunk."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

import spanax
from sampling import sampled
from spanax import losses
from spanax.errors import SpanaxError
from spanax.models import gpt
from spanax.trace.program import Program
from spanax.trace.rewrites.chunked_loss import chunked_loss

SIZE, LENGTH, VOCAB, WIDTH, LIKELIEST = 8, 4, 12, 8, 3
LOGITS = SIZE * LENGTH * VOCAB


@contextlib.contextmanager
def float64() -> Iterator[None]:
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)


# ---- the formulas


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def picked(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    log_p = log_softmax(logits)
    return np.array([[log_p[i, j, targets[i, j]] for j in range(LENGTH)] for i in range(SIZE)])


def plain_log_probs(logits: np.ndarray, targets: np.ndarray, weights: np.ndarray, *, mean: bool = False) -> np.ndarray:
    rows = zip(picked(logits, targets), weights, strict=True)
    return np.array([(row * weight).sum() / (weight.sum() if mean else 1.0) for row, weight in rows])


def plain_sft(logits: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> tuple[Any, dict[str, Any]]:
    return -np.average(picked(logits, targets), weights=weights), {"tokens": weights.sum()}


def minus_log_sigmoid(x: np.ndarray) -> np.ndarray:
    return np.log(1 + np.exp(-x))


def plain_reward(chosen: np.ndarray, rejected: np.ndarray, *, margin: float = 0.0) -> tuple[Any, dict[str, Any]]:
    metrics = {"chosen_reward": chosen.mean(), "rejected_reward": rejected.mean()}
    metrics["accuracy"] = np.mean([a > b for a, b in zip(chosen, rejected, strict=True)])
    return minus_log_sigmoid(chosen - rejected - margin).mean(), metrics


def plain_dpo(
    chosen: np.ndarray,
    rejected: np.ndarray,
    first: np.ndarray,
    second: np.ndarray,
    *,
    beta: float,
    label_smoothing: float,
) -> tuple[Any, dict[str, Any]]:
    ratio = np.log(np.exp(chosen) / np.exp(first)) - np.log(np.exp(rejected) / np.exp(second))
    loss = (1 - label_smoothing) * minus_log_sigmoid(beta * ratio) + label_smoothing * minus_log_sigmoid(-beta * ratio)
    return loss.mean(), plain_reward(beta * (chosen - first), beta * (rejected - second))[1]


def plain_orpo(chosen: np.ndarray, rejected: np.ndarray, *, beta: float) -> tuple[Any, dict[str, Any]]:
    odds = [np.exp(x) / (1 - np.exp(x)) for x in (chosen, rejected)]
    ratio = np.log(odds[0] / odds[1])
    metrics = {"nll": -chosen.mean(), "log_odds_ratio": ratio.mean(), "accuracy": np.mean(odds[0] > odds[1])}
    return np.mean(-chosen + beta * minus_log_sigmoid(ratio)), metrics


def plain_kto(
    log_p: np.ndarray, reference: np.ndarray, desirable: np.ndarray, divergence: np.ndarray, *, beta: float,
    desirable_weight: float, undesirable_weight: float,
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    each = []
    for reward, good in zip(log_p - reference, desirable, strict=True):
        weight = desirable_weight if good else undesirable_weight
        gain = beta * (reward - divergence) * (1 if good else -1)
        each.append(weight - weight / (1 + np.exp(-gain)))
    return np.mean(each), {"reward": beta * (log_p - reference).mean(), "divergence": divergence}


def plain_divergence(log_p: np.ndarray, reference: np.ndarray) -> Any:
    return max(0.0, np.log(np.exp(log_p) / np.exp(reference)).mean())


def plain_distill(
    logits: np.ndarray, likeliest: np.ndarray, tokens: np.ndarray, weights: np.ndarray, *, temperature: float
) -> tuple[Any, dict[str, Any]]:
    teacher = np.exp(log_softmax(likeliest / temperature))
    student = np.take_along_axis(log_softmax(logits / temperature), tokens, -1)
    divergences = (teacher * (np.log(teacher) - student)).sum(-1)
    return np.average(divergences, weights=weights) * temperature**2, {"tokens": weights.sum()}


def numbers() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    names = ("chosen", "rejected", "first", "second")
    every = {name: -3 * random.random(SIZE) - 0.1 for name in names}
    return every | {
        "logits": random.normal(size=(SIZE, LENGTH, VOCAB)),
        "targets": random.integers(0, VOCAB, (SIZE, LENGTH)),
        "weights": random.random((SIZE, LENGTH)),
        "desirable": random.random(SIZE) < 0.5,
        "divergence": np.asarray(0.7),
        "likeliest": random.normal(size=(SIZE, LENGTH, LIKELIEST)),
        "tokens": random.integers(0, VOCAB, (SIZE, LENGTH, LIKELIEST)),
    }


FORMULAS: list[tuple[Callable[..., Any], Callable[..., Any], str, dict[str, Any]]] = [
    (losses.log_probs, plain_log_probs, "logits targets weights", {}),
    (losses.log_probs, plain_log_probs, "logits targets weights", {"mean": True}),
    (losses.sft, plain_sft, "logits targets weights", {}),
    (losses.dpo, plain_dpo, "chosen rejected first second", {"beta": 0.3, "label_smoothing": 0.0}),
    (losses.dpo, plain_dpo, "chosen rejected first second", {"beta": 0.3, "label_smoothing": 0.2}),
    (losses.reward, plain_reward, "chosen rejected", {"margin": 0.5}),
    (losses.orpo, plain_orpo, "chosen rejected", {"beta": 0.3}),
    (losses.kto, plain_kto, "chosen first desirable divergence",
     {"beta": 0.3, "desirable_weight": 2.0, "undesirable_weight": 1.5}),
    (losses.kto_divergence, plain_divergence, "chosen rejected", {}),
    (losses.kto_divergence, plain_divergence, "rejected chosen", {}),
    (losses.distill, plain_distill, "logits likeliest tokens weights", {"temperature": 2.0}),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "plain", "names", "options"), FORMULAS)
def test_a_loss_equals_its_formula(loss: Any, plain: Any, names: str, options: dict[str, Any]) -> None:
    arrays = [numbers()[name] for name in names.split()]
    with float64():
        result = loss(*map(jnp.asarray, arrays), **options)
    jax.tree.map(
        lambda actual, wanted: np.testing.assert_allclose(actual, wanted, rtol=1e-6), result, plain(*arrays, **options)
    )


def test_what_does_not_count_and_narrow_logits() -> None:
    logits, targets = jnp.asarray(numbers()["logits"], "bfloat16"), numbers()["targets"]
    nothing, everything = np.zeros((2, SIZE, LENGTH), "float32") + np.array([0, 1])[:, None, None]

    @jax.jit
    def computed(logits: jax.Array) -> Any:
        empty = jax.value_and_grad(lambda logits: losses.log_probs(logits, targets, nothing, mean=True).sum())(logits)
        sfts = [losses.sft(logits, targets, weights) for weights in (nothing, everything, everything[0], None)]
        return empty, sfts, losses.distill(logits, *jax.lax.top_k(logits, VOCAB))

    (empty, gradient), ((of_nothing, _), weighted, by_position, plain), (divergence, _) = computed(logits)
    assert empty.dtype == jnp.float32 and empty == 0 and not gradient.any()
    assert jnp.isnan(of_nothing) and abs(divergence) < 1e-6
    np.testing.assert_allclose(weighted[0], plain[0], rtol=1e-6)
    assert weighted == by_position and weighted[1] == plain[1]


# ---- the same numbers in every layout, in microbatches and in chunks


class Model(nnx.Module):
    """A language model with a reward head, in float64 under `jax_enable_x64`."""

    def __init__(self, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, param_dtype=float, rngs=rngs)
        self.embed = nnx.Embed(VOCAB, WIDTH, param_dtype=float, rngs=rngs)
        self.up, self.down = linear(WIDTH, 2 * WIDTH), linear(2 * WIDTH, WIDTH)
        self.head, self.value = linear(WIDTH, VOCAB), linear(WIDTH, 1)

    def hidden(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        return x + self.down(jnp.tanh(self.up(x)))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.head(self.hidden(tokens))


def completions(random: np.random.Generator) -> dict[str, np.ndarray]:
    wide = jax.dtypes.canonicalize_dtype(float)
    tokens = random.integers(0, VOCAB, (SIZE, LENGTH + 1)).astype(np.int32)
    counted = np.arange(LENGTH) <= random.integers(0, LENGTH, SIZE)[:, None]
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": counted.astype(wide)}


def batch() -> dict[str, Any]:
    random = np.random.default_rng(1)
    result: dict[str, Any] = {"chosen": completions(random), "rejected": completions(random)}
    result["desirable"] = random.integers(0, 2, SIZE)
    result["likeliest"] = random.normal(size=(SIZE, LENGTH, LIKELIEST)).astype(result["chosen"]["weights"].dtype)
    result["tokens"] = random.integers(0, VOCAB, (SIZE, LENGTH, LIKELIEST)).astype(np.int32)
    result["stored"] = random.normal(size=(SIZE, 2)).astype(result["likeliest"].dtype)
    return result


def log_p(model: Any, part: dict[str, Any], *, mean: bool = False) -> jax.Array:
    return losses.log_probs(model(part["inputs"]), part["targets"], part["weights"], mean=mean)


def pair(model: Any, batch: Any, *, mean: bool = False) -> tuple[jax.Array, jax.Array]:
    return log_p(model, batch["chosen"], mean=mean), log_p(model, batch["rejected"], mean=mean)


def at_once(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """As `pair`, in one pass of the model."""
    both = jax.tree.map(lambda *parts: jnp.concatenate(parts), batch["chosen"], batch["rejected"])
    first, second = jnp.split(log_p(model, both), 2)
    return first, second


def rewards(model: Any, part: dict[str, Any]) -> jax.Array:
    return model.value(model.hidden(part["inputs"]))[:, -1, 0]


def kto(model: Any, reference: Any, batch: Any) -> losses.Loss:
    completions, first = log_p(model, batch["chosen"]), log_p(reference, batch["chosen"])
    divergence = batch["divergence"] if "divergence" in batch else divergence_of(model, reference, batch)
    return losses.kto(completions, first, batch["desirable"], divergence, beta=0.5)


def divergence_of(model: Any, reference: Any, batch: Any) -> jax.Array:
    return losses.kto_divergence(log_p(model, batch["rejected"]), log_p(reference, batch["rejected"]))


def student(model: Any, batch: Any) -> jax.Array:
    return model(batch["chosen"]["inputs"])


def teacher(reference: Any, batch: Any) -> list[jax.Array]:
    return jax.lax.top_k(student(reference, batch), LIKELIEST)


LOSSES: dict[str, Callable[[Any, Any, Any], losses.Loss]] = {
    "sft": lambda m, r, b: losses.sft(student(m, b), b["chosen"]["targets"], b["chosen"]["weights"]),
    "sft of all": lambda m, r, b: losses.sft(student(m, b), b["chosen"]["targets"]),
    "dpo": lambda m, r, b: losses.dpo(*pair(m, b), *pair(r, b), label_smoothing=0.1),
    "dpo at once": lambda m, r, b: losses.dpo(*at_once(m, b), *at_once(r, b)),
    "dpo stored": lambda m, r, b: losses.dpo(*pair(m, b), b["stored"][:, 0], b["stored"][:, 1]),
    "orpo": lambda m, r, b: losses.orpo(*pair(m, b, mean=True)),
    "kto": kto,
    "kto of the whole batch": kto,
    "reward": lambda m, r, b: losses.reward(rewards(m, b["chosen"]), rewards(m, b["rejected"])),
    "distill": lambda m, r, b: losses.distill(student(m, b), *teacher(r, b), b["chosen"]["weights"], temperature=2.0),
    "distill stored": lambda m, r, b: losses.distill(
        student(m, b), b["likeliest"], b["tokens"], b["chosen"]["weights"]
    ),
}

LAYOUTS = {"fsdp": "fsdp=2", "tensor": "model=4", "2d": "fsdp=2,model=2"}
OPTIONS = {"whole": {}, "microbatches": {"microbatches": 4}, "both": {"microbatches": 2, "loss_chunks": 2}}
CELLS = [
    (name, layout, option)
    for name in LOSSES
    for layout in LAYOUTS
    for option in OPTIONS
    if name != "kto" or option == "whole"
]
COVERING = [
    ("sft", "tensor", "both"), ("sft of all", "fsdp", "microbatches"), ("dpo", "fsdp", "both"),
    ("dpo at once", "2d", "microbatches"), ("orpo", "tensor", "microbatches"),
    ("kto of the whole batch", "fsdp", "both"), ("reward", "2d", "microbatches"), ("distill", "2d", "both"),
]  # fmt: skip


def objects() -> tuple[Model, Model, nnx.Optimizer]:
    model, reference = Model(nnx.Rngs(0)), Model(nnx.Rngs(1))
    return model, reference, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def step_of(name: str, wrap: Callable[..., Any], gradient: Callable[..., Any]) -> Any:
    @wrap
    def step(model: Any, reference: Any, optimizer: Any, batch: Any) -> Any:
        if "whole" in name:
            batch = batch | {"divergence": divergence_of(model, reference, batch)}
        (loss, metrics), gradients = gradient(LOSSES[name], has_aux=True)(model, reference, batch)
        optimizer.update(model, gradients)
        return {"loss": loss} | metrics

    return step


def numbers_after(step: Any) -> dict[str, np.ndarray]:
    """Loss and metrics of a step, and the parameters after it."""
    model, reference, optimizer = objects()
    results = step(model, reference, optimizer, batch())
    results |= {
        ".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }
    return {name: np.asarray(value) for name, value in results.items()}


@functools.cache
def on_one_device(name: str) -> dict[str, np.ndarray]:
    return numbers_after(step_of(name, nnx.jit, nnx.value_and_grad))


@pytest.mark.parametrize(("name", "layout", "option"), sampled(CELLS, COVERING))
def test_a_loss_is_the_same_everywhere(name: str, layout: str, option: str) -> None:
    """In float64, which separates errors from rounding."""
    options = dict(OPTIONS[option])
    if name == "reward":
        options.pop("loss_chunks", None)  # it has no logits
    with float64():
        actual = numbers_after(step_of(name, spanax.jit(mesh=LAYOUTS[layout], **options), spanax.value_and_grad))
        wanted = on_one_device(name)
    assert actual.keys() == wanted.keys()
    for key, value in wanted.items():
        np.testing.assert_allclose(actual[key], value, rtol=1e-9, atol=1e-12, err_msg=key)


def test_kto_compares_each_example_with_the_batch() -> None:
    with pytest.raises(SpanaxError, match="microbatches would change the loss") as raised:
        numbers_after(step_of("kto", spanax.jit(mesh="fsdp=2", microbatches=2), spanax.value_and_grad))
    assert "test_losses.py:" in str(raised.value)


def largest(jaxpr: Any) -> int:
    """The most numbers of a value with the vocabulary."""
    inner = [each for eqn in jaxpr.eqns for each in jaxprs_in_params(eqn.params)]
    shapes = [value.aval.shape for eqn in jaxpr.eqns for value in eqn.outvars if VOCAB in value.aval.shape]
    return max([*map(largest, inner), *(int(np.prod(shape)) for shape in shapes)], default=0)


CHUNKED = [name for name in LOSSES if name != "reward"]


@pytest.mark.parametrize("name", sampled(CHUNKED, ["dpo", "kto", "distill"]))
def test_no_logits_are_stored_in_chunks(name: str) -> None:
    model, reference, _ = objects()
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    frozen = nnx.split(reference)

    def loss(params: Any, batch: Any) -> Any:
        return LOSSES[name](nnx.merge(graph, params, rest), nnx.merge(*frozen), batch)[0]

    whole, chunked = (jax.make_jaxpr(jax.grad(each))(params, batch()) for each in (loss, chunked_loss(loss, 4)))
    assert largest(whole.jaxpr) >= LOGITS
    assert largest(chunked.jaxpr) <= LOGITS // 2


@pytest.mark.slow
def test_a_pipeline_computes_pairs_at_once_with_a_stored_reference() -> None:
    config = gpt.GPTConfig(VOCAB, seq_len=LENGTH, num_layers=2, num_heads=2, embed_dim=WIDTH)

    def metrics(name: str, mesh: str) -> dict[str, Any]:
        passes = {"once": at_once, "twice": pair}[name]
        loss = lambda model, batch: losses.dpo(*passes(model, batch), *batch["stored"].T)  # noqa: E731
        build = functools.partial(gpt.GPT, config)
        traced = spanax.trace(build=build, optimizer=optax.sgd(0.1), batch=batch(), loss=loss)
        run = spanax.start(traced, spanax.plan(traced, spanax.cluster("cpu:2"), mesh=mesh))
        run.step(batch())
        return run.step(batch())

    staged, wanted = metrics("once", "pipe=2"), metrics("twice", "data=2")
    assert staged.keys() == wanted.keys()
    for key, value in wanted.items():
        np.testing.assert_allclose(staged[key], value, rtol=1e-5, err_msg=key)
    with pytest.raises(SpanaxError, match="partly from the layers"):
        metrics("twice", "pipe=2")


# ---- what is frozen


def test_a_reference_is_sharded_and_has_no_optimizer_state() -> None:
    step = step_of("dpo", spanax.jit(mesh="fsdp=4"), spanax.value_and_grad)
    model, reference, optimizer = objects()
    before = np.asarray(reference.up.kernel[...])
    step(model, reference, optimizer, batch())
    places = {leaf.path: leaf for leaf in step.plan.leaves}
    assert places["reference.up.kernel"].spec == places["up.kernel"].spec
    assert reference.up.kernel.sharding == model.up.kernel.sharding and "fsdp" in reference.up.kernel.sharding.spec
    assert not [path for path in places if path.startswith("optimizer") and "reference" in path]
    assert (np.asarray(reference.up.kernel[...]) == before).all()


class Frozen(nnx.Variable):
    """Not an `nnx.Param`: it has no gradient."""


class Pair(nnx.Module):
    """A model and the reference that it began as, for `spanax.trace` and `spanax train`."""

    def __init__(self, rngs: nnx.Rngs):
        self.policy = Model(rngs)
        graph, state = nnx.split(self.policy)
        frozen = jax.tree.map(
            lambda leaf: Frozen(leaf.get_value()), state, is_leaf=lambda x: isinstance(x, nnx.Variable)
        )
        self.reference = nnx.merge(graph, frozen)


def program(name: str) -> Program:
    loss = lambda model, batch: LOSSES[name](model.policy, model.reference, batch)  # noqa: E731
    return spanax.trace(build=Pair, optimizer=optax.adam(1e-3), batch=batch(), loss=loss)


def test_a_frozen_reference_within_one_module() -> None:
    plan = spanax.plan(program("dpo"), "cpu:4", mesh="fsdp=4")
    kinds = {leaf.path: leaf.kind for leaf in plan.leaves}
    assert kinds["policy.up.kernel"] == "param" and kinds["reference.up.kernel"] == "other"
    assert plan["reference.up.kernel"].spec == plan["policy.up.kernel"].spec
    assert plan.state_bytes("param") == sum(leaf.local_bytes for leaf in plan.leaves if leaf.path.startswith("policy"))
    assert {path.partition("policy.")[2] for path in kinds if ".mu." in path} == {
        path.removeprefix("policy.") for path in kinds if path.startswith("policy.")
    }
    assert not [path for path in kinds if path.startswith("optimizer") and "reference" in path]
