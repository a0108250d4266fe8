"""Evaluation of graphs, with operations and bodies computed otherwise."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from spanax.trace.jaxpr.graph import CALLS, INLINED, Body, Graph, Op, from_jaxpr
from spanax.trace.jaxpr.interpret import evaluate, rebuilt, with_bodies

X = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
ROW = np.arange(4, dtype=np.float32)


@jax.custom_vjp
def tripled(x: Any) -> Any:
    return jnp.sin(x)


tripled.defvjp(lambda x: (tripled(x), x), lambda x, g: (3 * g,))


def scanned(x: Any) -> Any:
    return lax.scan(lambda c, row: (jnp.sin(c) + row, c * ROW), x[0], x, reverse=True)


def repeated(x: Any) -> Any:
    return lax.while_loop(lambda c: (c[0] < 3) & (x.sum() < 99), lambda c: (c[0] + 1, jnp.sin(c[1]) * x), (0, x))[1]


def branched(x: Any) -> Any:
    return lax.cond(x.sum() > 0, jnp.sin, lambda y: jnp.sin(y) * 2, x)


def rematted_layer(x: Any) -> Any:
    return jax.checkpoint(lambda y: jnp.sin(y @ y.T) * ROW, policy=jax.checkpoint_policies.dots_saveable)(x)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "scan": scanned,
    "while": repeated,
    "cond": branched,
    "remat": rematted_layer,
    "differentiated remat": jax.grad(lambda x: rematted_layer(x).sum()),
    "custom jvp": jax.nn.silu,
    "custom vjp": tripled,
    "jit": lambda x: jax.jit(lambda y: jnp.sin(y) + ROW)(x),
    "nested": lambda x: lax.scan(lambda c, _: (jax.checkpoint(lambda y: branched(y))(c), None), x, None, 2)[0],
    "constants": lambda x: (x + ROW, ROW, 2.0),
}
INLINING = {"all": INLINED, "plain calls": CALLS, "none": frozenset[str]()}


def assert_same(results: Sequence[Any], expected: Any) -> None:
    for result, leaf in zip(results, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(result, leaf, rtol=1e-5, atol=1e-5)


def graph_of(function: Callable[..., Any], inlined: frozenset[str] = CALLS) -> Graph:
    return from_jaxpr(jax.make_jaxpr(function)(X), inlined, as_traced=True)


def of_cosines(graph: Graph, args: Sequence[Any]) -> list[Any]:
    """Evaluates a graph with cosines in place of sines, in bodies too."""

    def override(op: Op, ins: Sequence[Any]) -> Sequence[Any] | None:
        if op.name == "sin":
            return [jnp.cos(*ins)]
        return with_bodies(op, ins, partial(inner, graph)) if op.bodies else None

    def inner(graph: Graph, body: Body, args: Sequence[Any]) -> list[Any]:
        return of_cosines(graph.within(body), args)

    return evaluate(graph, args, override)


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("inlining", INLINING)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_graph_has_the_results_and_gradients_of_its_function(name: str, inlining: str) -> None:
    function = FUNCTIONS[name]
    graph = graph_of(function, INLINING[inlining])
    assert_same(evaluate(graph, [X]), function(X))
    if name != "while" and inlining != "all":  # a loop without a fixed length has no reverse-mode derivative
        total = lambda run: jax.grad(lambda x: sum(jnp.sum(y) for y in jax.tree.leaves(run(x))))  # noqa: E731
        assert_same([total(lambda x: evaluate(graph, [x]))(X)], total(function)(X))


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("name", ["scan", "while", "cond", "remat", "nested"])
def test_an_override_reaches_bodies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = jax.jit(partial(of_cosines, graph_of(FUNCTIONS[name])))([X])
    monkeypatch.setattr(jnp, "sin", jnp.cos)
    assert_same(results, FUNCTIONS[name](X))


@pytest.mark.usefixtures("devices")
def test_an_override_reaches_the_backward_pass_of_a_remat() -> None:
    graph = graph_of(FUNCTIONS["differentiated remat"], INLINED)
    (remat,) = (op for op in graph.ops() if op.bodies)
    assert remat.params["differentiated"] and "cos" in [op.name for op in graph.within(remat.bodies[0]).ops()]

    def override(op: Op, ins: Sequence[Any]) -> Sequence[Any] | None:
        if op.name == "cos":
            return [jnp.zeros_like(*ins)]
        inner = lambda body, args: evaluate(graph.within(body), args, override)  # noqa: E731
        return with_bodies(op, ins, inner) if op.bodies else None

    assert np.any(evaluate(graph, [X])[0]) and not np.any(evaluate(graph, [X], override)[0])


@pytest.mark.parametrize("name", ["scan", "cond", "remat", "nested"])
def test_bodies_record_their_operation_and_its_parameters(name: str) -> None:
    graph = graph_of(FUNCTIONS[name])
    again = from_jaxpr(jax.make_jaxpr(lambda x: of_cosines(graph, [x]))(X), CALLS, as_traced=True)
    before, after = ([op for op in each.ops() if op.bodies] for each in (graph, again))
    assert [op.name for op in before] == [op.name for op in after] != []
    for op, other in zip(before, after, strict=True):
        for key in op.params.keys() & {"length", "reverse", "policy", "prevent_cse", "differentiated"}:
            assert op.params[key] == other.params[key]


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("name", ["scan", "while", "cond", "remat"])
def test_rebuilt_bodies_may_close_over_tracers(name: str) -> None:
    graph = graph_of(FUNCTIONS[name])

    def shifted(x: Any, shift: Any) -> list[Any]:
        def inner(body: Body, *args: Any) -> list[Any]:
            override = lambda op, ins: [jnp.sin(*ins) + shift] if op.name == "sin" else None  # noqa: E731
            return evaluate(graph.within(body), args, override)

        def override(op: Op, ins: Sequence[Any]) -> list[Any] | None:
            return rebuilt(graph, op, ins, [partial(inner, body) for body in op.bodies]) if op.bodies else None

        return evaluate(graph, [x], override)

    assert_same(jax.jit(shifted)(X, 0.0), FUNCTIONS[name](X))
    assert not np.allclose(jax.jit(shifted)(X, 1.0)[0], jax.tree.leaves(FUNCTIONS[name](X))[0])


def test_operations_are_traced_with_their_source() -> None:
    def function(x: Any) -> Any:
        with jax.named_scope("layer"):
            return jnp.sin(x)

    graph = graph_of(function)
    before, after = (next(each.ops()) for each in (graph, traced_again(graph)))
    assert str(before.eqn.source_info.name_stack) == str(after.eqn.source_info.name_stack) == "layer"
    assert before.where == after.where != ""


def traced_again(graph: Graph) -> Graph:
    return from_jaxpr(jax.make_jaxpr(lambda x: evaluate(graph, [x]))(X))
