"""Remat: what the backward pass keeps and what it computes again, read off the traced step; no device needed."""

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import lax

import spanax
import zoo
from sampling import sampled
from spanax.errors import RangeError
from spanax.models import gpt
from spanax.trace.jaxpr.graph import Body, Graph, from_jaxpr
from spanax.trace.jaxpr.remat_policies import POLICIES
from spanax.trace.program import Program
from spanax.trace.rewrites.remat import rematerialized

L, T, D = zoo.GPT_SCAN.num_layers, zoo.GPT_SCAN.seq_len, zoo.GPT_SCAN.embed_dim
B, F = 16, 4 * D
FORWARD, HEAD = 6, 1
"""Matmuls of a block going forward (qkv, scores, mixture, out, up, down), and behind the blocks (logits)."""


def traced(build: Callable[..., Any], loss: Any = zoo.squared_error, batch: Any = None, **options: Any) -> Program:
    batch = zoo.VECTORS(B) if batch is None else batch
    return spanax.trace(build=build, optimizer=optax.sgd(0.1), batch=batch, loss=loss, **options)


@functools.cache
def scanned(own_remat: bool = False, **options: Any) -> Program:
    config = dataclasses.replace(zoo.GPT_SCAN, remat=own_remat)
    return traced(functools.partial(gpt.GPT, config), gpt.loss, zoo.GPT_TEXT(B), **options)


@functools.cache
def unrolled() -> Program:
    config = dataclasses.replace(zoo.GPT_LIST, remat=True)
    return traced(functools.partial(gpt.GPT, config), gpt.loss, zoo.GPT_TEXT(B))


def count(graph: Graph, *names: str) -> int:
    """How often these operations run in a step: those in a loop as often as it turns."""

    def of(body: Body) -> int:
        turns = lambda op: op.params["length"] if op.name == "scan" else 1  # noqa: E731
        return sum((op.name in names) + turns(op) * sum(map(of, op.bodies)) for op in body.ops)

    return of(graph.body)


def remats(graph: Graph) -> int:
    return sum(op.name in ("remat2", "checkpoint") for op in graph.ops())


def stored_shapes(program: Program) -> list[tuple[int, ...]]:
    """The shapes that the forward loop over the layers stacks up for the way back."""
    graph = program.step.graph
    scan = next(op for op in graph.body.ops if op.name == "scan" and op.bodies)
    outputs = graph.wires(scan).outputs
    return [graph.shape(outer) for outer, inner in outputs if len(graph.shape(outer)) > len(graph.shape(inner))]


def kept_bytes(program: Program) -> int:
    return sum(4 * math.prod(shape) for shape in stored_shapes(program))


# Residuals, and their cost


@pytest.mark.parametrize("remat", [False, True])
def test_a_policy_selects_the_residuals_of_a_scanned_layer(remat: bool) -> None:
    """Also where the model has a remat of its own, which each policy takes the place of."""
    full, dots, none = (scanned(remat).variant(remat=policy) for policy in ("full", "dots", "none"))
    carried = (L, B, T, D)
    assert stored_shapes(full) == [carried]
    qkv, up = (L, B, T, 3, zoo.GPT_SCAN.num_heads, D // zoo.GPT_SCAN.num_heads), (L, B, T, F)
    assert sorted(stored_shapes(dots)) == sorted(
        [carried, qkv, carried, up]
    )  # what enters, and three of the four dense layers
    assert kept_bytes(none) > 3 * kept_bytes(dots) > 20 * kept_bytes(full)
    assert stored_shapes(scanned(remat)) == stored_shapes(full if remat else none)


@pytest.mark.parametrize("remat", [False, True])
def test_exactly_the_values_that_are_not_stored_are_recomputed(remat: bool) -> None:
    result = {name: count(scanned(remat).variant(remat=name).step.graph, "dot_general") for name in POLICIES}
    once = 3 * (L * FORWARD + HEAD)  # a matmul forward has two on the way back
    # The last of a block, `down`, is only added to what enters the next one: no gradient asks for it.
    assert result == {
        "none": once,
        "dots": once + L * 2,  # scores and mixture, which have batch dims
        "full": once + L * (FORWARD - 1),
    }
    assert count(scanned(remat).variant(remat=DOTS_ON_HOST).step.graph, "dot_general") == once + L * 2


DOTS_ON_HOST = "dot_general.1@host+dot_general.4-5@host"
"""What `dots` saves of a layer, in host memory."""

PARTIAL = {"dots:1": 2, "full:1,dots": FORWARD - 1 + 2 * (L - 1)}
"""Partial policies, each with the matmuls that the backward pass recomputes."""


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("policy", PARTIAL)
def test_a_partial_policy_recomputes_the_first_layers(policy: str, remat: bool) -> None:
    partial = scanned(remat).variant(remat=policy)
    assert count(partial.step.graph, "dot_general") == 3 * (L * FORWARD + HEAD) + PARTIAL[policy]
    assert partial.remat == policy and partial.step.layer_carry[1] == scanned().step.layer_carry[1] == L
    loops = [op for op in partial.step.graph.body.ops if op.name == "scan"]
    first = int(policy[5])
    assert [op.params["length"] for op in loops] == [first, L - first, L - first, first]
    policies = [policy.split(":")[0]] + ["dots"] * (policy[6:] == ",dots")
    assert remats(partial.step.graph) == len(policies)


def test_none_of_a_model_without_remat_is_the_same_step_traced_once() -> None:
    program = scanned(False)
    same = program.variant(remat="none")
    assert same.remat == "none" and same.step is program.step and same.variant(remat=None) is program
    assert (
        same.variant(remat="none", microbatches=2).remat == "none"
        and scanned(True).variant(remat="none").step is not scanned(True).step
    )


def test_a_remat_outside_of_loops_takes_the_policy() -> None:
    """A partial policy counts remats as layers."""
    policies = ("none", "dots", "full", "full:1,dots")
    graphs = [unrolled().variant(remat=policy).step.graph for policy in policies]
    matmuls = [count(graph, "dot_general") for graph in graphs]
    once = 3 * (2 * FORWARD + HEAD)
    assert matmuls == [once, once + 2 * 2, once + 2 * (FORWARD - 1), once + FORWARD - 1 + 2]
    assert [remats(graph) for graph in graphs] == [0, 2, 2, 2]
    assert count(unrolled().step.graph, "dot_general") == matmuls[2]


def test_a_model_without_layers_is_one_layer_for_dots() -> None:
    program = traced(zoo.MLP)
    dots = program.variant(remat="dots").step.graph
    assert remats(program.step.graph) == 0 and remats(dots) == 1
    assert count(dots, "dot_general") == count(program.step.graph, "dot_general")
    assert count(dots, "logistic") == count(program.step.graph, "logistic") + 1  # silu, once more
    assert count(traced(zoo.MLP, remat="none").step.graph, "logistic") == count(program.step.graph, "logistic")


def test_dots_stores_convolutions() -> None:
    case = zoo.ZOO["cnn"]
    program = traced(case.build, case.loss, case.batch(B))
    graphs = [each.step.graph for each in (program, program.variant(remat="dots"))]
    assert count(graphs[0], "rsqrt") < count(graphs[1], "rsqrt")
    assert len({count(graph, "conv_general_dilated") for graph in graphs}) == 1


def test_microbatches_are_not_layers() -> None:
    once, twice = (scanned(remat="full", microbatches=n) for n in (1, 2))
    assert count(twice.step.graph, "dot_general") == 2 * count(once.step.graph, "dot_general")
    with pytest.raises(spanax.SpanaxError, match="no layer to rematerialize"):
        traced(zoo.MLP, remat="full", microbatches=2)


# Where layers are looked for


W, X = jax.ShapeDtypeStruct((3, 8, 8), "float32"), jax.ShapeDtypeStruct((4, 8), "float32")


def block(x: Any, w: Any) -> tuple[Any, None]:
    return jnp.sin(x @ w), None


def run(w: Any, x: Any) -> Any:
    return lax.scan(block, x, w)[0].sum()


@jax.custom_vjp
def tripled(w: Any, x: Any) -> Any:
    return run(w, x)


tripled.defvjp(lambda w, x: (tripled(w, x), (w, x)), lambda retained, g: (3 * g * retained[0], g * retained[1]))

PLACES: dict[str, tuple[Callable[..., Any], int]] = {
    "in a call": (jax.jit(jax.jit(run)), 1),
    "in branches": (lambda w, x: lax.cond(x[0, 0] > 0, run, lambda w, x: 2 * run(w, x), w, x), 2),
    "in a loop that does nothing else": (
        lambda w, x: lax.scan(lambda c, _: (c + 1, lax.cond(c > 1, run, run, w, x)), 0, None, 2)[1].sum(), 1),
    "two, one after the other": (lambda w, x: run(w, x) + run(2 * w, x), 2),
    "one in another": (lambda w, x: lax.scan(lambda c, _: (c + run(w, x * c), None), 1.0, None, 2)[0], 1),
    "a gradient inside the loss": (lambda w, x: jax.grad(run)(w, x).sum() + run(w, x), 3),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_layers_are_detected(place: str) -> None:
    function, expected = PLACES[place]
    assert remats(from_jaxpr(jax.make_jaxpr(function)(W, X))) == 0
    assert remats(from_jaxpr(jax.make_jaxpr(rematerialized(function, "full"))(W, X))) == expected


def backward_loops(function: Callable[..., Any], policy: str) -> list[tuple[int, int]]:
    """The length of every loop of the gradient, and its number of remats."""
    graph = from_jaxpr(jax.make_jaxpr(jax.grad(rematerialized(function, policy), argnums=(0, 1)))(W, X))
    inside = lambda op: sum(inner.name in ("remat2", "checkpoint") for inner in op.bodies[0].ops)  # noqa: E731
    return [(op.params["length"], inside(op)) for op in graph.ops() if op.name == "scan"]


def test_a_partial_policy_counts_layers_in_the_order_of_their_loops() -> None:
    two = PLACES["two, one after the other"][0]
    assert backward_loops(two, "full:1") == [(1, 0), (2, 0), (3, 0), (3, 0), (2, 0), (1, 1)]
    assert backward_loops(two, "full:3") == [(3, 0), (3, 0), (3, 0), (3, 1)]
    assert backward_loops(two, "full:4") == [(3, 0), (1, 0), (2, 0), (2, 0), (1, 1), (3, 1)]
    assert backward_loops(jax.jit(jax.jit(run)), "full:1") == [(1, 0), (2, 0), (2, 0), (1, 1)]


def test_a_value_that_no_layer_computes_is_an_error() -> None:
    assert len(remat_names(run, "sin.1+attention.1")) == 1  # of fused attention, which this trace does not have
    with pytest.raises(RangeError, match=r"remat 'sin.1\+mul.9': the layers compute no 'mul.9'") as caught:
        remat_names(run, "sin.1+mul.9")
    assert str(caught.value).endswith("fix: values up to input.1, dot_general.1, sin.1")


def remat_names(function: Callable[..., Any], policy: str) -> set[str]:
    jaxpr = jax.make_jaxpr(rematerialized(function, policy))(W, X)
    return set(re.findall(r"name=(spanax:saved:[a-z_.0-9]+)", str(jaxpr)))


def test_remat_inside_a_layer_is_preserved() -> None:
    """As attention in chunks has it: forgotten with the layer, and on the way back chunk by chunk."""

    def chunked(w: Any, x: Any) -> Any:
        inner = jax.checkpoint(lambda x, w: (x + block(x, w)[0], None), policy=jax.checkpoint_policies.dots_saveable)
        return lax.scan(lambda x, _: (jnp.sin(lax.scan(inner, x, w)[0] @ w[0]), None), x, None, 2)[0].sum()

    for policy, expected in (("none", []), ("full", [2, 1]), ("dots", [2, 1])):
        graph = from_jaxpr(jax.make_jaxpr(rematerialized(chunked, policy))(W, X))
        results = [op.params["policy"] for op in graph.ops() if op.bodies and op.name != "scan"]
        assert len(results) == len(expected)
        assert jax.checkpoint_policies.dots_saveable not in results


def test_remat_of_a_gradient_inside_the_loss_is_preserved() -> None:
    """Its residuals are not those of the loss's gradient, and its policy cannot be changed from outside."""
    gradient = jax.grad(jax.checkpoint(run, policy=jax.checkpoint_policies.dots_saveable))
    for policy in ("none", "full"):
        graph = from_jaxpr(jax.make_jaxpr(rematerialized(lambda w, x: gradient(w, x).sum() + run(w, x), policy))(W, X))
        back = [op for op in graph.ops() if op.params.get("differentiated")]
        assert [op.params["policy"] for op in back] == [jax.checkpoint_policies.dots_saveable]


def test_a_loop_without_a_matmul_is_not_a_layer() -> None:
    def summed(w: Any, x: Any) -> Any:
        return (lax.scan(lambda c, y: (jnp.sin(c + y), None), x[0], x)[0] @ w[0]).sum()

    with pytest.raises(spanax.SpanaxError, match="no layer to rematerialize"):
        jax.make_jaxpr(rematerialized(summed, "full"))(W, X)
    assert remats(from_jaxpr(jax.make_jaxpr(rematerialized(summed, "dots"))(W, X))) == 1  # around all of it


def test_a_custom_derivative_is_preserved() -> None:
    """The loop inside it is not on the way back, and so is no layer; around it there may be one."""
    with pytest.raises(spanax.SpanaxError, match="no layer to rematerialize"):
        jax.make_jaxpr(rematerialized(tripled, "full"))(W, X)

    def layers(w: Any, x: Any) -> Any:
        return lax.scan(lambda c, _: (tripled(w, x + c), None), 0.0, None, 2)[0]

    gradient = from_jaxpr(jax.make_jaxpr(jax.value_and_grad(rematerialized(layers, "full")))(W, X))
    threes = [value for value in gradient.constants.values() if getattr(value, "shape", None) == () and value == 3]
    assert remats(gradient) == 1 and threes and count(gradient, "dot_general") == 2 * 3  # none on the way back


# Unchanged code


@pytest.mark.parametrize("policy", ["full:1,dots"])
def test_axes_are_the_same(policy: str) -> None:
    for program in (scanned(), unrolled()):
        other = program.variant(remat=policy)
        assert [leaf.axes for leaf in other.leaves] == [leaf.axes for leaf in program.leaves]
        assert other.step.axes.unknown == {} and other.step.axes.coverage == 1.0
        assert other.fingerprint == program.fingerprint and other.num_params == program.num_params


QUICK = ("cnn", "moe", "rnn", "ssm", "vae")


@pytest.mark.parametrize("name", sampled(zoo.ZOO, QUICK))
def test_every_model_takes_dots(name: str) -> None:
    case = zoo.ZOO[name]
    optimizer: Any = lambda model: nnx.Optimizer(model, case.optimizer, wrt=case.wrt)  # noqa: E731
    program = spanax.trace(build=case.build, optimizer=optimizer, batch=case.batch(B), loss=case.loss)
    dots = program.variant(remat="dots")
    assert remats(dots.step.graph) > 0
    assert [leaf.axes for leaf in dots.leaves] == [leaf.axes for leaf in program.leaves]
    assert [leaf.axes for leaf in dots.batch] == [leaf.axes for leaf in program.batch]


def test_offloaded_activations_have_the_axes_of_their_source() -> None:
    program = scanned().variant(remat=DOTS_ON_HOST + "+input.1@host")
    step = program.step
    moves = [op for op in step.graph.ops() if op.name == "device_put"]
    assert Counter(step.graph.is_on_host(op.outputs[0]) for op in moves) == {True: 4, False: 4}  # there, and back
    assert stored_shapes(program).count((L, B, T, D)) == 2  # what enters and `out`: neither is also on the device
    for op in moves:
        assert step.axes.of(op.inputs[0]) == step.axes.of(op.outputs[0])
        assert {"batch", "seq"} <= set(step.axes.of(op.outputs[0]))


# Programs and their policies


def test_an_evaluation_has_no_remat() -> None:
    program = scanned().variant(remat="full")
    assert program.evaluation is not None and remats(program.evaluation.graph) == 0
    names = program.evaluation.axes.of(program.evaluation.graph.body.inputs[0])
    assert names == program.step.axes.of(program.step.graph.body.inputs[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"remat": "ful"}, "unknown remat policy 'ful'"),
        ({"remat": "named"}, "unknown remat policy 'named'"),  # which only a search traces
        ({"remat": "as written"}, "unknown remat policy 'as written'"),
        ({"remat": "full"}, "remat 'full' has no layer to rematerialize"),
        ({"remat": "dots:2"}, "remat 'dots:2' has no layer to rematerialize"),
        ({"remat": "dots:0"}, "remat 'dots:0' has no number of layers"),
        ({"remat": "dots:two"}, "remat 'dots:two' has no number of layers"),
        ({"remat": "dots,full"}, "remat 'dots,full' has no number of layers"),
        ({"remat": "none:2"}, "remat 'none:2' is the same as 'none'"),
        ({"remat": "full:2,full"}, "remat 'full:2,full' is the same as 'full'"),
        ({"remat": "full:2,none"}, "remat 'full:2,none' is the same as 'full:2'"),
        ({"remat": "ful:2"}, "unknown remat policy 'ful'"),
        ({"remat": "full:2,dot"}, "unknown remat policy 'dot'"),
        ({"remat": "mul.1"}, "remat 'mul.1' has no layer to rematerialize"),
        ({"remat": "mul.1+add.0"}, "remat 'mul.1+add.0' lists 'add.0', which names no values"),
        ({"remat": "full:2,mul.3-1"}, "remat 'mul.3-1' lists 'mul.3-1', which names no values"),
        ({"remat": "dots", "loss": None, "train_step": lambda *_: {}}, "`remat` requires `loss`"),
    ],
)
def test_an_invalid_value_raises(options: dict[str, Any], message: str) -> None:
    with pytest.raises(spanax.SpanaxError) as caught:
        traced(zoo.MLP, **options)
    assert str(caught.value).startswith(message) and "fix: " in str(caught.value)


@pytest.mark.parametrize("policy", [f"full:{L}", "full:99", "full:99,dots"])
def test_more_layers_than_there_are_are_refused(policy: str) -> None:
    with pytest.raises(RangeError) as caught:
        scanned().variant(remat=policy)
    near = policy.replace(policy[5:7].rstrip(","), str(L - 1))
    assert str(caught.value).endswith(f"fix: 'full' for all layers, or '{near}'")
    with pytest.raises(RangeError) as caught:
        jax.make_jaxpr(rematerialized(jax.checkpoint(run), "full:1"))(W, X)
    assert str(caught.value).endswith("fix: 'full' for all layers")


def test_a_workload_passes_the_policy_on() -> None:
    workload = spanax.Workload(build=zoo.MLP, batch=zoo.VECTORS(B), loss=zoo.squared_error)
    assert workload.trace(learning_rate=0.1, num_steps=2, remat="dots").remat == "dots"


# What JAX is about to call it


@pytest.mark.usefixtures("devices")
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="an older jax_remat3 keeps no matmuls")
@pytest.mark.parametrize("name", ["scanned", "unrolled"])
def test_the_coming_remat_is_the_same(name: str) -> None:
    """Under every policy, the same number of matmuls as with the current primitive, and equal results."""

    def traced_with(is_new: bool) -> list[Program]:
        jax.config.update("jax_remat3", is_new)
        try:
            written = scanned.__wrapped__(True) if name == "scanned" else unrolled.__wrapped__()
            return [written, *(written.variant(remat=policy) for policy in ("none", "dots", "full"))]
        finally:
            jax.config.update("jax_remat3", False)

    today, coming = traced_with(False), traced_with(True)
    assert not coming[0].step.axes.unknown
    matmuls = [[count(program.step.graph, "dot_general") for program in group] for group in (today, coming)]
    assert matmuls[0] == matmuls[1] and matmuls[0][1] < matmuls[0][3]
    assert [program.remat for program in coming] == [program.remat for program in today]
    batch = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), zoo.GPT_TEXT(B))
    losses = []
    for program in (today[0], coming[0]):
        run = spanax.start(program, spanax.plan(program, spanax.cluster("cpu:2"), layout="fsdp"))
        losses.append([float(run.step(batch)["loss"]) for _ in range(2)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.usefixtures("devices")
def test_complex_contractions_are_recomputed() -> None:
    """JAX cannot save a complex value across a remat."""

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.abs(lax.scan(lambda x, w: (jnp.exp(1j * (x @ w)), None), x, weights)[0]).sum()

    key = jax.random.key(0)
    weights = jax.random.normal(key, (3, 4, 4), "complex64") / 4
    x = jax.random.normal(key, (2, 4), "complex64")
    gradient = jax.jit(jax.grad(rematerialized(loss, "dots")))(weights, x)
    assert jnp.allclose(gradient, jax.grad(loss)(weights, x), rtol=1e-5)


def perplexity(model: nnx.Module, batch: Any) -> jax.Array:
    return jnp.exp(gpt.loss(model, batch))


@pytest.mark.parametrize("policy", ["none", "full:1,dots"])
def test_loss_chunks_are_not_layers(policy: str) -> None:
    program = traced(functools.partial(gpt.GPT, zoo.GPT_SCAN), perplexity, zoo.GPT_TEXT(B), remat=policy)
    once, chunked = (program.variant(loss_chunks=chunks).step for chunks in (1, 4))
    assert chunked.layer_carry[1] == L and remats(chunked.graph) == remats(once.graph) + 1  # of its own
    with pytest.raises(RangeError, match=f"the loss has {L}"):
        program.variant(loss_chunks=4, remat=f"full:{L}")
