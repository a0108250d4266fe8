"""spanax.stack: a model's own loop over equal blocks runs as one scan, or an error says why it cannot."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import spanax
from spanax.stack.layer_loop import layers_of

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "stack_errors.txt"
X = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)


class Block(nnx.Module):
    """A block that keeps a count of its calls, and takes some arguments."""

    def __init__(self, rngs: nnx.Rngs, width: int = 8, rate: float = 1.0):
        self.mix = nnx.Linear(8, width, kernel_init=nnx.initializers.normal(0.1), rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros((), int))
        self.rate = rate

    def __call__(self, x: Any, *args: Any, scale: Any = 1.0) -> Any:
        self.calls[...] += 1
        return jax.tree.map(lambda x: x + self.rate * scale * jnp.tanh(self.mix(x)), x)


class Deep(nnx.Module):
    """Blocks, and a custom loop over them."""

    def __init__(self, forward: Callable[[Any, Any], Any], blocks: Any = None):
        self.blocks = nnx.List([Block(nnx.Rngs(seed)) for seed in range(4)]) if blocks is None else blocks
        self.forward = forward

    def __call__(self, x: Any) -> Any:
        return self.forward(self.blocks, x)


def plain(blocks: Any, x: Any) -> Any:
    for block in blocks:
        x = block(x)
    return x


def indexed(blocks: Any, x: Any) -> Any:
    for i in range(len(blocks)):
        x = blocks[i](x)
    return x


def halves(blocks: Any, x: Any) -> Any:
    for block in blocks[:2]:
        x = block(x)
    for block in blocks[2:]:
        x = block(x)
    return x


def asked(blocks: Any, x: Any) -> Any:
    scale = jnp.full((8,), 0.5)
    for block in blocks:
        assert isinstance(block, Block) and isinstance(x, jax.Array) and not isinstance(x, tuple)
        assert x.shape == (2, 8) and x.dtype == jnp.float32 and x.ndim == 2
        x = block(x, "same", 1, scale=scale)
    return x


def paired(blocks: Any, x: Any) -> Any:
    y = 2 * x
    for block in blocks:
        x, y = block((x, y))
    return x - y


def twice(blocks: Any, x: Any) -> Any:
    return plain(blocks, plain(blocks, x))


def reduced(blocks: Any, x: Any) -> Any:
    return functools.reduce(lambda x, block: block(x), blocks, x)


@pytest.mark.parametrize("forward", [plain, indexed, halves, asked, paired, reduced, twice])
@pytest.mark.parametrize("remat", [None, "full"])
def test_a_loop_that_passes_x_on_runs_as_one(forward: Callable[[Any, Any], Any], remat: str | None) -> None:
    listed, x = Deep(forward), jnp.asarray(X)
    stacked = spanax.stack(listed, x, remat=remat)
    # Eagerly, every operation of a list is a program of its own: only rounding differs.
    np.testing.assert_allclose(stacked(x), listed(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(stacked.blocks.calls, [block.calls[...] for block in listed.blocks])
    graph, state = nnx.split(stacked)
    program = str(jax.make_jaxpr(lambda state: nnx.merge(graph, state, copy=True)(x))(state))
    assert program.count("scan[") == (2 if forward is twice else 1) and program.count("dot_general") <= 2 + (
        forward in (paired, twice)
    )
    assert ("checkpoint" in program or "remat" in program) == (remat == "full")


def test_the_original_model_is_unchanged() -> None:
    listed = Deep(plain)
    stacked = spanax.stack(listed)
    assert isinstance(listed.blocks, nnx.List) and isinstance(stacked.blocks, spanax.Stack)
    stacked.blocks.mix.kernel[...] = jnp.zeros((4, 8, 8))
    assert (listed.blocks[0].mix.kernel[...] != 0).any()


class Tower(nnx.Module):
    """Lists of several kinds: of pairs of layers, of one block, of blocks that differ."""

    def __init__(self, rngs: nnx.Rngs):
        self.main = nnx.List([Deep(plain, nnx.List([Block(rngs), Block(rngs)])) for _ in range(3)])
        self.widths = nnx.List([nnx.Linear(8, width, rngs=rngs) for width in (8, 16)])
        self.held = nnx.Dict(pair=nnx.List([Block(rngs), Block(rngs)]))
        self.single = nnx.List([Block(rngs)])

    def __call__(self, x: Any) -> Any:
        x = plain(self.held["pair"], plain(self.single, plain(self.main, x)))
        return self.widths[1](self.widths[0](x))


def test_every_list_is_stacked_or_reported() -> None:
    listed = Tower(nnx.Rngs(0))
    with pytest.warns(UserWarning, match="`widths` remains a list: .*`bias` is float32\\[8\\] and float32\\[16\\]"):
        stacked = spanax.stack(listed, X)
    assert stacked.main.blocks[1].mix.kernel.shape == (3, 8, 8) and len(stacked.main) == 3
    assert isinstance(stacked.held["pair"], spanax.Stack) and isinstance(stacked.single, nnx.List)
    np.testing.assert_allclose(stacked(X), listed(X), rtol=1e-5, atol=1e-6)

    stacked = spanax.stack(listed, X, lists=["main", "main.*.blocks"])
    assert stacked.main.blocks.mix.kernel.shape == (3, 2, 8, 8) and isinstance(stacked.held["pair"], nnx.List)
    np.testing.assert_allclose(stacked(X), listed(X), rtol=1e-5, atol=1e-6)


def test_a_sequential_is_also_a_loop() -> None:
    listed = nnx.Sequential(*[Block(nnx.Rngs(seed)) for seed in range(3)])
    np.testing.assert_allclose(spanax.stack(listed, X)(X), listed(X), rtol=1e-5, atol=1e-6)


def test_a_stack_is_indexed_like_its_list() -> None:
    stack = spanax.stack(Deep(plain)).blocks
    assert stack[-1] is stack[3] is list(stack)[3] and len(layers_of(stack, Block, "blocks")) == 4


# ---- what cannot be stacked, and what a loop may not do


def residual(blocks: Any, x: Any) -> Any:
    for block in blocks:
        x = x + block(x)
    return x


def collected(blocks: Any, x: Any) -> Any:
    result = []
    for block in blocks:
        x = block(x)
        result.append(x)
    return jnp.stack(result)


def told_apart(blocks: Any, x: Any) -> Any:
    for block in blocks:
        x = block(x, scale=2.0 if block is blocks[-1] else 1.0)
    return x


def parallel(blocks: Any, x: Any) -> Any:
    return [block(x) for block in blocks]


def early(blocks: Any, x: Any) -> Any:
    for block in blocks[:3]:
        x = block(x)
    return x


def skipping(blocks: Any, x: Any) -> Any:
    for block in blocks[::2]:
        x = block(x)
    return x


def backwards(blocks: Any, x: Any) -> Any:
    return plain(list(reversed(blocks)), x)


def repeated(blocks: Any, x: Any) -> Any:
    for block in blocks:
        block(x)
        x = block(x)
    return x


def activated(blocks: Any, x: Any) -> Any:
    for block in blocks:
        x = jax.nn.relu(block(x))
    return x


def inside(blocks: Any, x: Any) -> Any:
    for block in blocks:
        x = x + block.mix(x)
    return x


def remated(blocks: Any, x: Any) -> Any:
    for block in blocks:
        x = nnx.remat(lambda block, x: block(x))(block, x)
    return x


def swapped(blocks: Any, x: Any) -> Any:
    y = 2 * x
    for block in blocks:
        y, x = block((x, y))
    return x - y


def normed(blocks: Any, x: Any) -> Any:
    for block in blocks:
        x = block(x)
        if isinstance(x, jax.Array):
            x = x / x.std()
    return x


def masked(blocks: Any, x: Any) -> Any:
    for block in blocks:
        x = block(x, scale=jnp.ones((8,)))
    return x


def branching(blocks: Any, x: Any) -> Any:
    for block in blocks:
        x = block(x)
        if (x > 0).any():
            x = 2 * x
    return x


def written(blocks: Any, x: Any) -> Any:
    for block in blocks:
        block.rate = 2.0
        x = block(x)
    return x


def by_class(blocks: Any, x: Any) -> Any:
    for block in blocks:
        x = block(x, scale=2.0) if type(block) is Block else block(x)
    return x


LOOPS = [
    residual, collected, told_apart, parallel, early, skipping, backwards, repeated, activated, inside, remated,
    swapped, normed, masked, branching, written,
]  # fmt: skip


class Growing(Block):
    """A block that returns another shape than it takes."""

    def __call__(self, x: Any, *args: Any, scale: Any = 1.0) -> Any:
        return jnp.concatenate([x, x], axis=0)


class Drawing(Block):
    """A block that draws from what it is given."""

    def __call__(self, x: Any, *args: Any, scale: Any = 1.0) -> Any:
        return x + args[0].normal(x.shape)


class Hidden(nnx.Module, pytree=False):
    """A block that is no pytree, and holds a plain list."""

    def __init__(self, rngs: nnx.Rngs):
        self.parts = [nnx.Linear(8, 8, rngs=rngs)]


def of(blocks: Any, *inputs: Any, **asked: Any) -> Callable[[], Any]:
    built = blocks() if callable(blocks) else blocks
    return lambda: spanax.stack(Deep(plain, nnx.List(built)), *inputs, **asked)


def shared() -> list[Block]:
    first, second = (Block(nnx.Rngs(seed)) for seed in range(2))
    second.mix.bias = first.mix.bias
    return [first, second]


def tied() -> Any:
    model = Deep(plain)
    model.head = model.blocks[2].mix
    return spanax.stack(model)


def two_rngs() -> list[nnx.Module]:
    rngs, blocks = nnx.Rngs(0), [Block(nnx.Rngs(seed)) for seed in range(2)]
    for block in blocks:
        block.rngs = rngs
    return blocks


def two() -> list[Block]:
    return [Block(nnx.Rngs(0)), Block(nnx.Rngs(1))]


ERRORS: dict[str, Callable[[], Any]] = {
    "stack: no layers": lambda: spanax.Stack(Block, 0, rngs=nnx.Rngs(0)),
    "stack: no such policy": lambda: spanax.Stack(Block, 2, rngs=nnx.Rngs(0), remat="dot"),
    "stack: no module": lambda: spanax.Stack(lambda rngs: jnp.tanh, 2, rngs=nnx.Rngs(0)),
    "stack: no such layer": lambda: spanax.Stack(Block, 2, rngs=nnx.Rngs(0))[2],
    "stack: a layer that grows": lambda: spanax.Stack(Growing, 2, rngs=nnx.Rngs(0))(X),
    "stack: random numbers of all": lambda: spanax.Stack(Drawing, 2, rngs=nnx.Rngs(0))(X, nnx.Rngs(0)),
    "stack: parts in a plain list": lambda: spanax.Stack(Hidden, 2, rngs=nnx.Rngs(0)),
    "list: parts in a plain list": of(lambda: [Hidden(nnx.Rngs(seed)) for seed in range(2)]),
    "stack: no blocks": lambda: spanax.Stack.of([]),
    "stack: a function among blocks": lambda: spanax.Stack.of([Block(nnx.Rngs(0)), jnp.tanh]),
    "list: another shape": of(lambda: [*two(), Block(nnx.Rngs(2), width=16)]),
    "list: another attribute": of(lambda: [*two(), Block(nnx.Rngs(2), rate=0.5)]),
    "list: another class": of(lambda: [*two(), Growing(nnx.Rngs(2))]),
    "list: one block": of(lambda: two()[:1]),
    "list: none": lambda: spanax.stack(nnx.Linear(4, 4, rngs=nnx.Rngs(0))),
    "list: no such": of(two, lists=["block"]),
    "list: a variable of two blocks": of(shared),
    "list: random numbers of two blocks": of(two_rngs),
    "list: a variable of the rest": tied,
    "list: nothing to pass": lambda: spanax.stack(Deep(lambda blocks, x: [block() for block in blocks]), X),
} | {f"loop: {loop.__name__}": functools.partial(spanax.stack, Deep(loop), X) for loop in [*LOOPS, by_class]}


def message(call: Callable[[], Any]) -> str:
    with pytest.raises(spanax.SpanaxError) as caught:
        call()
    return str(caught.value)


# The followed fix of an error, given a name in its text; the others change the code of the model.
FOLLOWED: dict[str, Callable[[str], Any]] = {
    "stack: no such policy": lambda name: spanax.Stack(Block, 2, rngs=nnx.Rngs(0), remat=name),
    "list: no such": lambda name: spanax.stack(Deep(plain), lists=[name]),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_fix_works(name: str) -> None:
    FOLLOWED[name](message(ERRORS[name]).partition("did you mean '")[2].partition("'")[0])


def test_messages_equal_the_golden_file() -> None:
    text = "".join(f"[{name}]\n{message(call)}\n\n" for name, call in ERRORS.items())
    if os.environ.get("SPANAX_GOLDEN") == "update":
        GOLDEN.write_text(text, newline="")
    assert text == GOLDEN.read_text(), "a message changed: `make golden`, then read the diff"
    blocks = text.strip().split("\n\n")
    assert all(len(block.splitlines()) <= 5 and "0x" not in block and "<function" not in block for block in blocks)
