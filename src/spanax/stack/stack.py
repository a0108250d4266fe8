"""Equal layers stacked along a leading dim and run in one loop: compile time does not grow with depth."""

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from flax.errors import TraceContextError

from spanax.errors import SpanaxError, nearest
from spanax.stack.block_equality import difference
from spanax.stack.layer_loop import layers_of

ANNOTATIONS = ("out_sharding", "sharding_names", "sharding_metadata", "sharding")
"""What NNX has called the author's names of a variable's dims; a stacked one has one dim more."""


def _keeps_matmuls(primitive: Any, *avals: Any, **params: Any) -> Any:
    """`dots` as `spanax.trace` knows it: a convolution counts as the matmul it is."""
    dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return primitive.name == "conv_general_dilated" or dots(primitive, *avals, **params)


_POLICIES = {"none": None, "dots": _keeps_matmuls, "full": jax.checkpoint_policies.nothing_saveable}


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What a stack knows beyond its layers.

    `in_loop` says that somebody's loop over a list goes through it, and `path` where that is; `inner` is what the
    stacks know that it is a stack of.
    """

    kind: type[nnx.Module]
    num_layers: int
    remat: str | Callable[..., Any] | None
    in_loop: bool
    path: str | None = dataclasses.field(compare=False)
    inner: Any = None


class Stack(nnx.Module):
    """Equal blocks as one module: every array has a leading dim of layers, and calling it runs them first to last.

    `stack(x, *args, **kwargs)` hands `x` from layer to layer and the rest to each of them, in one `jax.lax.scan`. A
    layer returns what it takes, or `(x, y)`: then the call returns `(x, ys)`, the ys stacked. What layers keep
    (dropout counts, BatchNorm statistics) is kept, stacked. The attributes are those of a block, so that a
    parameter's path is that of the list without the number: `blocks.up.kernel` for `blocks.0.up.kernel`.

    `stack[i]` and iteration give layers as blocks of their own: what is written to them does not reach the stack.

    Args:
      block: makes one layer from an `nnx.Rngs`; called once, with numbers of its own for each layer.
      num_layers: how many.
      rngs: where the layers' numbers come from.
      remat: what the backward pass keeps of a layer: `none` or None forgets nothing; `dots` keeps the results of
        matmuls without batch dims and of convolutions, `full` only what enters a layer; or a policy of JAX.

    Raises:
      SpanaxError: fewer layers than one, no such policy, a block that is no module; when called, a layer returns
        something else than it takes.

    Example:
      >>> layers = Stack(lambda rngs: nnx.Linear(4, 4, rngs=rngs), 3, rngs=nnx.Rngs(0), remat="full")
      >>> layers.kernel.shape, layers(jnp.ones((2, 4))).shape
      ((3, 4, 4), (2, 4))
      >>> len(layers), layers[-1].kernel.shape
      (3, (4, 4))
    """

    def __init__(
        self,
        block: Callable[[nnx.Rngs], nnx.Module],
        num_layers: int,
        *,
        rngs: nnx.Rngs,
        remat: str | Callable[..., Any] | None = None,
    ):
        if num_layers < 1:
            raise SpanaxError(f"num_layers is {num_layers}; it takes a whole number from 1.")

        def made(rngs: nnx.Rngs) -> nnx.Module:
            layer = block(rngs)
            if not isinstance(layer, nnx.Module):
                what = f"`block` returned a {type(layer).__name__}, not an nnx.Module."
                raise SpanaxError(what, fix="a class or a function of rngs: spanax.Stack(partial(Block, config), ...)")
            return layer

        layers = nnx.split_rngs(splits=num_layers)(nnx.vmap(made))(rngs)
        self._take_over(layers, num_layers, remat, None)

    @classmethod
    def of(
        cls, blocks: Sequence[nnx.Module], *, remat: str | Callable[..., Any] | None = None, path: str | None = None
    ) -> Self:
        """A stack of blocks that are there, with their values.

        Args:
          blocks: equal but for the values of their arrays.
          remat: as of `Stack`.
          path: where in a model the list of the blocks is, whose loop over them is to run as one: indexing and
            iteration then give what such a loop may pass `x` through, and no more. `spanax.stack` gives it.

        Raises:
          SpanaxError: there are none, two differ, or share a variable; the first difference is named.

        Example:
          >>> blocks = [nnx.Linear(4, 4, rngs=nnx.Rngs(seed)) for seed in range(3)]
          >>> bool((Stack.of(blocks)[1].kernel == blocks[1].kernel).all())
          True
        """
        blocks = list(blocks)
        if not blocks:
            raise SpanaxError("there are no blocks to stack.")
        for number, block in enumerate(blocks):
            if not isinstance(block, nnx.Module):
                raise SpanaxError(f"block {number} is a {type(block).__name__}, not an nnx.Module.")
            if found := difference(blocks[0], block):
                raise SpanaxError(
                    f"blocks 0 and {number} are not alike: {found}.",
                    where=path or "",
                    fix="blocks that differ in nothing but the values of their arrays",
                )
        _check_separate(blocks, path)
        graph, first = nnx.split(blocks[0])
        values = zip(*(jax.tree.leaves(nnx.state(block)) for block in blocks), strict=True)
        layers = nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(first), [jnp.stack(each) for each in values]))
        stack = object.__new__(cls)
        stack._take_over(layers, len(blocks), remat, path)
        return stack

    def _take_over(self, layers: nnx.Module, num_layers: int, remat: Any, path: str | None) -> None:
        if not callable(remat) and remat not in (None, *_POLICIES):
            raise SpanaxError(f"unknown remat policy '{remat}'.", fix=nearest(str(remat), _POLICIES))
        _rename_dims(layers, lambda names: (None, *names))
        self.__dict__.update(vars(layers))
        if len(jax.tree.leaves(nnx.state(self))) < len(jax.tree.leaves(nnx.state(layers))):
            what = f"a {type(layers).__name__} holds layers where a pytree would not see them."
            raise SpanaxError(
                what, where=path or "", fix="nnx.List([...]) in place of a list, nnx.Dict in place of a dict"
            )
        self._stack = _Settings(type(layers), num_layers, remat, path is not None, path, vars(layers).get("_stack"))

    def _as_block(self) -> nnx.Module:
        """A block that holds this stack's variables, the very ones."""
        block = object.__new__(self._stack.kind)
        block.__dict__.update(vars(self))
        del block._stack
        if self._stack.inner is not None:
            block._stack = self._stack.inner
        return block

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        graph, params, rest = nnx.split(self._as_block(), nnx.Param, ...)

        def body(x: Any, layer: tuple[nnx.State, nnx.State]) -> tuple[Any, tuple[nnx.State, tuple[Any, ...]]]:
            block = nnx.merge(graph, *layer, copy=True)
            x, *ys = _passed_on(x, block(x, *args, **kwargs))
            given = {id(value) for value in jax.tree.leaves(layer[0])}
            is_kept = lambda _, held: not isinstance(held, nnx.Param) or id(held.get_value()) not in given  # noqa: E731
            return x, (nnx.state(block, is_kept), tuple(ys))

        policy = self._stack.remat
        if policy not in (None, "none"):
            # Inside a loop there is nothing to merge the replay with.
            known = _POLICIES[policy] if isinstance(policy, str) else policy
            body = jax.checkpoint(body, policy=known, prevent_cse=False)
        try:
            x, (rest, ys) = jax.lax.scan(body, x, (params, rest))
        except TraceContextError as error:
            raise SpanaxError(
                "a layer writes to something that is not its own.",
                where=str(error).split(" (")[0],
                fix="random numbers and counts kept in the block: self.rngs = rngs.fork()",
            ) from error
        nnx.update(self, rest)
        return (x, *ys) if ys else x

    def __len__(self) -> int:
        return self._stack.num_layers

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int | slice) -> Any:
        count = self._stack.num_layers
        if isinstance(index, slice):
            return [self[at] for at in range(count)[index]]
        at = operator.index(index)
        if not -count <= at < count:
            what = f"there is no layer {at}: the stack has {count}."
            raise SpanaxError(what, fix=f"0 to {count - 1}, or {-count} to -1 from the end")
        at %= count
        if self._stack.path is not None:
            return layers_of(self, self._stack.kind, self._stack.path)[at]
        graph, state = nnx.split(self._as_block())
        block = nnx.merge(graph, jax.tree.map(lambda stacked: stacked[at], state))
        _rename_dims(block, lambda names: names[1:])
        return block


def _passed_on(x: Any, result: Any) -> tuple[Any, ...]:
    """`(x,)` or `(x, y)`, whichever a layer returned; what looks like that which it takes is the x."""
    if _is_like(result, x):
        return (result,)
    if isinstance(result, tuple) and len(result) == 2 and _is_like(result[0], x):
        return result
    raise SpanaxError(
        "a layer returns something else than it takes, so that none can follow it.",
        where=f"it takes {_told(x)} and returns {_told(result)}",
        fix="blocks that return what they take, or (that, what else there is)",
    )


def _is_like(result: Any, x: Any) -> bool:
    """Whether the next layer can take it. A weak dtype, that of a Python number, gives way."""
    if jax.tree.structure(result) != jax.tree.structure(x):
        return False
    pairs = zip(map(jax.typeof, jax.tree.leaves(result)), map(jax.typeof, jax.tree.leaves(x)), strict=True)
    return all(new.shape == old.shape and (new.dtype == old.dtype or old.weak_type) for new, old in pairs)


def _told(value: Any) -> str:
    return str(jax.tree.map(lambda leaf: jax.typeof(leaf).str_short(), value)).replace("'", "")


def _check_separate(blocks: Sequence[nnx.Module], path: str | None) -> None:
    """Refuses a variable that two blocks share: stacked, each would have a copy."""
    owner: dict[int, int] = {}
    for number, block in enumerate(blocks):
        for name, value in nnx.iter_graph(block):
            if isinstance(value, nnx.Variable) and owner.setdefault(id(value), number) != number:
                shared = ".".join(map(str, name))
                raise SpanaxError(
                    f"blocks {owner[id(value)]} and {number} share `{shared}`; stacked, each has its own.",
                    where=path or "",
                    fix="rngs.fork() for each" if isinstance(value, nnx.RngState) else "leave them a list",
                )


def _rename_dims(module: nnx.Module, renamed: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> None:
    """Keeps the names of dims beside their dims where the author gave some."""
    for _, variable in nnx.iter_graph(module):
        if isinstance(variable, nnx.Variable):
            for name in ANNOTATIONS:
                names = variable.get_metadata().get(name)
                if names is not None:
                    variable.set_metadata(name, renamed(tuple(getattr(names, "spec", names))))
