"""Results that are added to each other and read by nothing else, and what that saves."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import spanax
import zoo
from programs import zoo_program
from spanax.plan.evaluate import evaluate
from spanax.plan.place import resolver_of
from spanax.plan.spmd.compiler import Compiler
from spanax.plan.spmd.count_terms import count_terms
from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.trace.program import Program

WIDTH, HIDDEN, BATCH = 32, 64, 16


def moved(program: Program, layout: str, mesh: str, **how: bool) -> dict[tuple[str, str], float]:
    plan = spanax.plan(program, spanax.cluster("cpu:8"), layout=layout, mesh=mesh)
    return count_terms(ShardedProgram(resolver_of(program, plan), program.step), **how).moved_bytes(plan.mesh)


GPU = Compiler(adds_first=True)
TPU = Compiler(adds_first=True, narrows_first=True)


@pytest.mark.parametrize(
    ("layout", "mesh", "compiler", "num_saved"),
    [
        ("tensor", "data=2,model=4", GPU, 2 + 1),
        ("tensor+seq", "data=2,model=4", GPU, 2 + 1),
        ("tensor+seq", "data=2,model=4", TPU, 2),
        ("context+tensor+seq", "context=2,model=4", TPU, 2 + 1),
    ],
)
def test_partial_sums_that_are_added_are_reduced_once(
    layout: str, mesh: str, compiler: Compiler, num_saved: int
) -> None:
    """Of query, key and value two are saved in each layer, of gate and up one; half of the tokens at a time.

    A TPU scatters the sums of gate and up by permutes, one by one. Source: Llama 3 8B for v5e:2x4, v5p:2x2x2, h100:8.
    """
    program, config = zoo_program("llama"), zoo.LLAMA
    item = 16 // 2 * config.seq_len * config.embed_dim * 4
    apart = moved(program, layout, mesh)
    joined = moved(program, layout, mesh, compiler=compiler)
    kind, ways = ("reduce-scatter", 4) if "seq" in layout else ("all-reduce", 1)
    saved = apart.pop((kind, "model")) - joined.pop((kind, "model"))
    assert saved == config.num_layers * num_saved * item // ways and apart == joined


def test_a_partial_sum_added_to_a_full_value_is_not_deferred() -> None:
    """The gradient through the second branch is no sum over devices: nothing is saved."""

    class Residual(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.first = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
            self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
            self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

        def __call__(self, x_BD: jax.Array) -> jax.Array:
            x_BD = jnp.tanh(self.first(x_BD))
            return x_BD + self.down(jnp.tanh(self.up(x_BD)))

    program = spanax.trace(
        build=Residual, optimizer=optax.sgd(0.1), batch=jax.ShapeDtypeStruct((BATCH, WIDTH), "float32"),
        loss=lambda model, x: (model(x) ** 2).mean(),
    )  # fmt: skip
    assert any(len(values) == 2 for meeting in program.step.gradient_sums for values, _ in meeting.occurrences)
    for layout, mesh in (("tensor", "model=8"), ("data", "data=8")):
        assert moved(program, layout, mesh) == moved(program, layout, mesh, compiler=Compiler(adds_first=True))


def test_the_deferred_sum_of_a_tied_weight_is_counted_once() -> None:
    """The shared matrix of a tied model is summed once, and it is what the step sums less."""

    class Tied(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.embed = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
            self.body = nnx.Linear(HIDDEN, HIDDEN, use_bias=False, rngs=rngs)

        def __call__(self, x_BD: jax.Array) -> jax.Array:
            return jnp.tanh(self.body(self.embed(x_BD))) @ self.embed.kernel.T

    program = spanax.trace(
        build=Tied, optimizer=optax.sgd(0.1), batch=jax.ShapeDtypeStruct((BATCH, WIDTH), "float32"),
        loss=lambda model, x: (model(x) ** 2).mean(),
    )  # fmt: skip
    plan = spanax.plan(program, spanax.cluster("cpu:8"), layout="data")
    laid = ShardedProgram(resolver_of(program, plan), program.step)
    size = WIDTH * HIDDEN * 4
    apart, joined = (
        count_terms(laid, compiler=Compiler(adds_first=adds)).moved_bytes(plan.mesh)["all-reduce", "data"]
        for adds in (False, True)
    )
    assert apart - joined == size
    for leaf, saved in (("embed.kernel", size), ("body.kernel", 0)):
        only = program.step.leaf_aliases([leaf.path for leaf in program.leaves].index(leaf))
        of_leaf = [
            count_terms(laid, only, compiler=Compiler(adds_first=adds)).moved_bytes(plan.mesh)["all-reduce", "data"]
            for adds in (False, True)
        ]
        assert of_leaf[0] - of_leaf[1] == saved and of_leaf[1] > 0


def test_a_sum_over_many_parameters_does_not_recurse() -> None:
    """As that of a clip by the global norm: one addition a parameter, each of the one before."""

    class Many(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.scales = nnx.List([nnx.Param(jnp.ones(())) for _ in range(1200)])

        def __call__(self, x_BD: jax.Array) -> jax.Array:
            return functools.reduce(jnp.add, (scale[...] for scale in self.scales)) * x_BD

    program = spanax.trace(
        build=Many, optimizer=optax.sgd(0.1), batch=jax.ShapeDtypeStruct((BATCH, WIDTH), "float32"),
        loss=lambda model, x: (model(x) ** 2).mean(),
    )  # fmt: skip
    assert (
        program.step.gradient_sums
        and moved(program, "data", "data=8", compiler=Compiler(adds_first=True))["all-reduce", "data"] > 0
    )


def test_a_deferred_sum_needs_no_extra_all_reduce() -> None:
    """Two parts of one gradient in two dtypes: one all-reduce and its cost remain."""

    class Halves(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.embed = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)

        def __call__(self, x_BD: jax.Array) -> jax.Array:
            narrow = (x_BD.astype("bfloat16") @ self.embed.kernel.astype("bfloat16")).astype("float32")
            return jnp.tanh(narrow) @ self.embed.kernel.T

    program = spanax.trace(
        build=Halves, optimizer=optax.sgd(0.1), batch=jax.ShapeDtypeStruct((BATCH, WIDTH), "float32"),
        loss=lambda model, x: (model(x) ** 2).mean(),
    )  # fmt: skip
    plan = spanax.plan(program, spanax.cluster("a100:8"), layout="data")
    moves = count_terms(
        ShardedProgram(resolver_of(program, plan), program.step), compiler=Compiler(adds_first=True)
    ).collectives
    assert (moves.runs > 0).all()
    assert evaluate(program, plan, spanax.cluster("a100:8")).candidate.step_seconds > 0
