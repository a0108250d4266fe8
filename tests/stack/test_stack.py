"""Stack: the numbers and the state of the layers one after the other, in one scan, and back to single blocks."""

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
from sampling import sampled
from spanax.models.gpt import Block, GPTConfig

CONFIG = GPTConfig(vocab_size=64, seq_len=8, num_layers=3, num_heads=2, embed_dim=16, dropout=0.5)
X = np.random.default_rng(0).normal(size=(2, 8, 16)).astype(np.float32)


class Normed(nnx.Module):
    """A block that keeps statistics and draws numbers."""

    def __init__(self, rngs: nnx.Rngs):
        self.mix = nnx.Linear(16, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array, scale: Any = 1.0, *, shift: Any = 0.0) -> jax.Array:
        return x + self.drop(self.norm(jnp.tanh(self.mix(x)))) * scale + shift


class Telling(nnx.Module):
    """A block that returns a value in addition to x."""

    def __init__(self, rngs: nnx.Rngs):
        self.mix = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        x = jnp.tanh(self.mix(x))
        return x, {"mean": x.mean()}


def host(tree: Any) -> Any:
    is_key = lambda leaf: jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda leaf: np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf), tree)


def blocks_of(kind: Callable[[nnx.Rngs], nnx.Module], count: int = 3) -> list[nnx.Module]:
    return [kind(nnx.Rngs(seed)) for seed in range(count)]


def equal(first: Any, second: Any) -> None:
    for a, b in zip(jax.tree.leaves(host(first)), jax.tree.leaves(host(second)), strict=True):
        np.testing.assert_array_equal(a, b)


REMATS = [None, "none", "dots", "full", jax.checkpoint_policies.everything_saveable]


@pytest.mark.parametrize("kind", [functools.partial(Block, CONFIG), Normed], ids=["gpt", "normed"])
@pytest.mark.parametrize("remat", sampled(REMATS, [None, "dots"]))
def test_a_stack_of_blocks_is_the_blocks_in_turn(kind: Callable[[nnx.Rngs], nnx.Module], remat: Any) -> None:
    blocks = blocks_of(kind)
    stack = spanax.Stack.of(blocks, remat=remat)
    for number, block in enumerate(blocks):
        equal(nnx.state(stack[number]), nnx.state(block))
    for _ in range(2):  # a second time, from the counts and statistics that the first has left
        x = X
        for block in blocks:
            x = block(x)
        np.testing.assert_allclose(stack(X), x, rtol=1e-5, atol=1e-6)
    for number, block in enumerate(blocks):
        for (path, ours), (_, theirs) in zip(
            nnx.to_flat_state(nnx.state(stack[number])), nnx.to_flat_state(nnx.state(block)), strict=True
        ):
            np.testing.assert_allclose(host(ours[...]), host(theirs[...]), rtol=1e-5, atol=1e-6, err_msg=str(path))


def test_gradients_are_those_of_the_blocks() -> None:
    blocks = nnx.List(blocks_of(functools.partial(Block, CONFIG)))
    stacks = [spanax.Stack.of(blocks, remat=remat) for remat in (None, "full")]

    def listed(blocks: nnx.List) -> jax.Array:
        return (functools.reduce(lambda x, block: block(x), blocks, X) ** 2).mean()

    expected = nnx.grad(listed)(blocks)
    for stack in stacks:
        result = nnx.grad(lambda stack: (stack(X) ** 2).mean())(stack)
        for number in range(3):
            for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(expected[number]), strict=True):
                np.testing.assert_allclose(a[number], b, rtol=1e-4, atol=1e-7)


def test_every_layer_draws_different_numbers() -> None:
    stack = spanax.Stack(functools.partial(Block, CONFIG), 3, rngs=nnx.Rngs(0))
    for _, variable in nnx.to_flat_state(nnx.state(stack, nnx.Any(nnx.RngKey, nnx.PathContains("kernel")))):
        first, second, third = host(variable[...])
        assert (first != second).any() and (second != third).any() and (first != third).any()
    before = stack(X)
    assert not np.allclose(before, stack(X)), "the counts stand still"
    stack.eval()
    np.testing.assert_array_equal(stack(X), stack(X))
    stack.train()
    assert not np.allclose(stack(X), stack(X))


def test_additional_arguments_reach_every_layer() -> None:
    blocks = blocks_of(Normed)
    stack = spanax.Stack.of(blocks)
    scale, x = np.full((16,), 0.5, np.float32), X
    for block in blocks:
        x = block(x, scale, shift=0.25)
    np.testing.assert_allclose(stack(X, scale, shift=0.25), x, rtol=1e-5, atol=1e-6)


def test_additional_results_of_layers_are_stacked() -> None:
    blocks = blocks_of(Telling)
    x, reported = spanax.Stack.of(blocks, remat="full")(X)
    y, means = X, []
    for block in blocks:
        y, result = block(y)
        means.append(result["mean"])
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(reported["mean"], means, rtol=1e-4)


class Writing(Telling):
    """A block that writes a parameter, and sows."""

    def __call__(self, x: jax.Array) -> jax.Array:
        self.sow(nnx.Intermediate, "seen", x)
        self.mix.sow(nnx.Intermediate, "mean", x.mean())
        self.mix.kernel[...] = 0.5 * self.mix.kernel
        return x + self.mix(x)


def test_values_written_and_sown_by_layers_are_returned() -> None:
    blocks = blocks_of(Writing)
    stack, x = spanax.Stack.of(blocks, remat="full"), jnp.asarray(X)
    _, result = nnx.capture(stack, nnx.Intermediate)(x)
    expected = []
    for block in blocks:
        x, seen = nnx.capture(block, nnx.Intermediate)(x)
        expected.append(seen)
    np.testing.assert_array_equal(stack.mix.kernel, [block.mix.kernel[...] for block in blocks])
    for ours, theirs in zip(
        jax.tree.leaves(result),
        jax.tree.leaves(jax.tree.map(lambda *layers: jnp.stack(layers), *expected)),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    assert len(jax.tree.leaves(result)) == 2


def test_a_layer_is_an_independent_block() -> None:
    blocks = blocks_of(Normed, 4)
    stack = spanax.Stack.of(blocks)
    assert len(stack) == 4 and [type(layer) for layer in stack] == [Normed] * 4
    np.testing.assert_array_equal(stack[-1].mix.kernel, blocks[3].mix.kernel)
    assert nnx.graphdef(stack[2]) == nnx.graphdef(blocks[2])
    assert [layer.mix.bias.shape for layer in stack[1:3]] == [(16,), (16,)]
    stack[0].mix.kernel[...] = jnp.zeros((16, 16))
    np.testing.assert_array_equal(stack.mix.kernel[0], blocks[0].mix.kernel)
    equal(nnx.state(nnx.List(stack)), nnx.state(nnx.List(blocks)))


def test_a_stack_is_an_ordinary_nnx_module() -> None:
    make = lambda: spanax.Stack(Normed, 3, rngs=nnx.Rngs(0))  # noqa: E731
    stack, shapes = make(), nnx.state(nnx.eval_shape(make))
    assert jax.tree.map(jnp.shape, nnx.state(stack)) == jax.tree.map(jnp.shape, shapes)
    copy = nnx.merge(*nnx.split(stack), copy=True)
    assert len(copy) == 3
    np.testing.assert_array_equal(copy(X), nnx.clone(stack)(X))
    optimizer = nnx.Optimizer(stack, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(stack: spanax.Stack, optimizer: nnx.Optimizer) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda stack: ((stack(X) - 1) ** 2).mean())(stack)
        optimizer.update(stack, grads)
        return loss

    losses = [float(step(stack, optimizer)) for _ in range(30)]
    assert losses[-1] < 0.9 * losses[0] and int(stack.drop.rngs.count[0]) == 30


def test_names_of_dims_are_preserved() -> None:
    def block(rngs: nnx.Rngs) -> nnx.Linear:
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        with nnx.use_eager_sharding(False):
            return nnx.Linear(8, 8, kernel_init=init, rngs=rngs)

    for stack in (spanax.Stack(block, 3, rngs=nnx.Rngs(0)), spanax.Stack.of([block(nnx.Rngs(i)) for i in range(3)])):
        program = spanax.trace(
            build=lambda stack=stack: stack,
            optimizer=optax.sgd(0.1),
            batch=jax.ShapeDtypeStruct((4, 8), "float32"),
            loss=lambda model, x: (model(x) ** 2).mean(),
        )
        annotations = {leaf.path: leaf.annotation for leaf in program.leaves if leaf.kind == "param"}
        assert annotations["kernel"] == (None, "embed", "mlp")
        layer = nnx.state(stack[1])["kernel"].get_metadata()
        assert ("embed", "mlp") in layer.values() and (None, "embed", "mlp") not in layer.values()


def test_the_program_does_not_grow_with_depth() -> None:
    def size(num_layers: int) -> int:
        stack = spanax.Stack(Normed, num_layers, rngs=nnx.Rngs(0))
        graph, state = nnx.split(stack)
        return len(str(jax.make_jaxpr(lambda state: nnx.merge(graph, state, copy=True)(X))(state)).splitlines())

    assert size(2) == size(12)
