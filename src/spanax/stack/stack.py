"""`Stack`: equal layers stacked along a leading dim and run in one scan, so compile time does not grow with depth."""

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from flax.errors import TraceContextError

from spanax.errors import StackError, UnknownNameError, nearest
from spanax.stack.block_equality import difference
from spanax.stack.layer_loop import layers_of


def _keeps_matmuls(primitive: Any, *avals: Any, **params: Any) -> Any:
    """The `dots` policy as `spanax.trace` defines it, which also saves the results of convolutions."""
    dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return primitive.name == "conv_general_dilated" or dots(primitive, *avals, **params)


_POLICIES = {"none": None, "dots": _keeps_matmuls, "full": jax.checkpoint_policies.nothing_saveable}


@dataclasses.dataclass(frozen=True)
class _Settings:
    """The static configuration of a stack.

    `in_loop` marks a stack that replaces a list in a model, at `path`; `inner` holds the settings of the blocks if
    they are stacks themselves.
    """

    kind: type[nnx.Module]
    num_layers: int
    remat: str | Callable[..., Any] | None
    in_loop: bool
    path: str | None = dataclasses.field(compare=False)
    inner: Any = None


class Stack(nnx.Module):
    """A module of equal blocks: every array has a leading layer dim, and a call runs the layers in order.

    `stack(x, *args, **kwargs)` passes `x` from layer to layer and the other arguments to every layer, in one
    `jax.lax.scan`. A layer returns a new `x`, or `(x, y)`; in the second case the call returns `(x, ys)` with the ys
    stacked. The stacked state of the layers (dropout counts, BatchNorm statistics) is updated. The attributes are those
    of a block, so a parameter's path is that in a list without the index: `blocks.up.kernel` for `blocks.0.up.kernel`.

    `stack[i]` and iteration return copies of single layers: writing to them does not change the stack.

    Args:
      block: creates a layer from an `nnx.Rngs`; called once under `nnx.vmap`, with different keys per layer.
      num_layers: the number of layers, at least 1.
      rngs: the random streams from which the layers' keys are split.
      remat: what the backward pass saves of a layer: `none` or None saves everything; `dots` saves the results of
        matmuls without batch dims and of convolutions; `full` saves only the layer's input; or a JAX checkpoint policy.

    Raises:
      SpanaxError: `num_layers` is less than 1, `remat` is unknown, or `block` does not return a module; when called,
        if the shape or dtype of a layer's output differs from its input's.

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
            raise StackError(f"num_layers is {num_layers}; it must be an integer of at least 1.")

        def layer_of(rngs: nnx.Rngs) -> nnx.Module:
            layer = block(rngs)
            if not isinstance(layer, nnx.Module):
                what = f"`block` returned a {type(layer).__name__}, not an nnx.Module."
                raise StackError(what, fix="a class or a function of rngs: spanax.Stack(partial(Block, config), ...)")
            return layer

        layers = nnx.split_rngs(splits=num_layers)(nnx.vmap(layer_of))(rngs)
        self._take_over(layers, num_layers, remat, None)

    @classmethod
    def of(
        cls, blocks: Sequence[nnx.Module], *, remat: str | Callable[..., Any] | None = None, path: str | None = None
    ) -> Self:
        """Returns a stack of existing blocks, with their values.

        Args:
          blocks: blocks that are equal in everything but the values of their arrays.
          remat: the rematerialization policy, see `Stack`.
          path: the path of the list that the stack replaces in a model, passed by `spanax.stack`. Indexing and
            iteration then return placeholders, with which the model's loop over the list runs as one scan.

        Raises:
          SpanaxError: `blocks` is empty, or two blocks differ or share a variable; the error names the first
            difference.

        Example:
          >>> blocks = [nnx.Linear(4, 4, rngs=nnx.Rngs(seed)) for seed in range(3)]
          >>> bool((Stack.of(blocks)[1].kernel == blocks[1].kernel).all())
          True
        """
        blocks = list(blocks)
        if not blocks:
            raise StackError("cannot stack an empty list of blocks.")
        for number, block in enumerate(blocks):
            if not isinstance(block, nnx.Module):
                raise StackError(f"block {number} is a {type(block).__name__}, not an nnx.Module.")
            if mismatch := difference(blocks[0], block):
                raise StackError(
                    f"blocks 0 and {number} differ: {mismatch}.",
                    where=path or "",
                    fix="use blocks that differ only in the values of their arrays",
                )
        _check_separate(blocks, path)
        graph, first = nnx.split(blocks[0])
        values = zip(*(jax.tree.leaves(nnx.state(block)) for block in blocks), strict=True)
        layers = nnx.merge(
            graph, jax.tree.unflatten(jax.tree.structure(first), [jnp.stack(leaves) for leaves in values])
        )
        stack = object.__new__(cls)
        stack._take_over(layers, len(blocks), remat, path)
        return stack

    def _take_over(self, layers: nnx.Module, num_layers: int, remat: Any, path: str | None) -> None:
        if not callable(remat) and remat not in (None, *_POLICIES):
            raise UnknownNameError(f"unknown remat policy '{remat}'.", fix=nearest(str(remat), _POLICIES))
        _rename_dims(layers, lambda names: (None, *names))
        self.__dict__.update(vars(layers))
        if len(jax.tree.leaves(nnx.state(self))) < len(jax.tree.leaves(nnx.state(layers))):
            what = f"a {type(layers).__name__} holds layers in a plain list or dict, which is not part of the pytree."
            raise StackError(
                what, where=path or "", fix="nnx.List([...]) in place of a list, nnx.Dict in place of a dict"
            )
        self._stack = _Settings(type(layers), num_layers, remat, path is not None, path, vars(layers).get("_stack"))

    def _as_block(self) -> nnx.Module:
        """Returns a block that shares this stack's variables."""
        block = object.__new__(self._stack.kind)
        block.__dict__.update(vars(self))
        del block._stack
        if self._stack.inner is not None:
            block._stack = self._stack.inner
        return block

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        graph, params, state = nnx.split(self._as_block(), nnx.Param, ...)

        def body(x: Any, layer: tuple[nnx.State, nnx.State]) -> tuple[Any, tuple[nnx.State, tuple[Any, ...]]]:
            block = nnx.merge(graph, *layer, copy=True)
            x, *ys = _passed_on(x, block(x, *args, **kwargs))
            inputs = {id(value) for value in jax.tree.leaves(layer[0])}

            def is_new(_: Any, leaf: Any) -> bool:
                parts = jax.tree.leaves(leaf.get_raw_value())
                return not isinstance(leaf, nnx.Param) or any(id(part) not in inputs for part in parts)

            return x, (nnx.state(block, is_new), tuple(ys))

        policy = self._stack.remat
        if policy not in (None, "none"):
            # Inside a scan XLA cannot merge the recomputation with the forward pass, so CSE needs no barrier.
            checkpoint_policy = _POLICIES[policy] if isinstance(policy, str) else policy
            body = jax.checkpoint(body, policy=checkpoint_policy, prevent_cse=False)
        try:
            x, (state, ys) = jax.lax.scan(body, x, (params, state))
        except TraceContextError as error:
            raise StackError(
                "a layer writes to a variable outside the block.",
                where=str(error).split(" (")[0],
                fix="store random streams and counts in the block: self.rngs = rngs.fork()",
            ) from error
        nnx.update(self, state)
        return (x, *ys) if ys else x

    def __len__(self) -> int:
        return self._stack.num_layers

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int | slice) -> Any:
        count = self._stack.num_layers
        if isinstance(index, slice):
            return [self[layer] for layer in range(count)[index]]
        layer = operator.index(index)
        if not -count <= layer < count:
            what = f"layer index {layer} is out of range for a stack of {count} layers."
            raise StackError(what, fix=f"0 to {count - 1}, or {-count} to -1 from the end")
        layer %= count
        if self._stack.path is not None:
            return layers_of(self, self._stack.kind, self._stack.path)[layer]
        graph, state = nnx.split(self._as_block())
        block = nnx.merge(graph, jax.tree.map(lambda stacked: stacked[layer], state))
        _rename_dims(block, lambda names: names[1:])
        return block


def _passed_on(x: Any, result: Any) -> tuple[Any, ...]:
    """Returns `(x,)` or `(x, y)`, whichever the layer returned: a result with the types of `x` is an x.

    Raises:
      SpanaxError: neither the result nor its first item has the types of `x`.
    """
    if _is_like(result, x):
        return (result,)
    if isinstance(result, tuple) and len(result) == 2 and _is_like(result[0], x):
        return result
    raise StackError(
        "the output of a layer does not match its input.",
        where=f"input {_summary(x)}, output {_summary(result)}",
        fix="return x with the shape and dtype of the input, or (x, y)",
    )


def _is_like(result: Any, x: Any) -> bool:
    """Returns whether the next layer accepts the result; a weakly typed `x` accepts any dtype."""
    if jax.tree.structure(result) != jax.tree.structure(x):
        return False
    pairs = zip(map(jax.typeof, jax.tree.leaves(result)), map(jax.typeof, jax.tree.leaves(x)), strict=True)
    return all(new.shape == old.shape and (new.dtype == old.dtype or old.weak_type) for new, old in pairs)


def _summary(value: Any) -> str:
    return str(jax.tree.map(lambda leaf: jax.typeof(leaf).str_short(), value)).replace("'", "")


def _check_separate(blocks: Sequence[nnx.Module], path: str | None) -> None:
    """Raises if two blocks share a variable, since each would get its own copy in the stack."""
    owner: dict[int, int] = {}
    for number, block in enumerate(blocks):
        for name, value in nnx.iter_graph(block):
            if isinstance(value, nnx.Variable) and owner.setdefault(id(value), number) != number:
                shared = ".".join(map(str, name))
                raise StackError(
                    f"blocks {owner[id(value)]} and {number} share `{shared}`; stacking would copy it.",
                    where=path or "",
                    fix="rngs.fork() per block" if isinstance(value, nnx.RngState) else "do not stack this list",
                )


def _rename_dims(module: nnx.Module, renamed: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> None:
    """Applies `renamed` to the dim names of each annotated variable."""
    for _, variable in nnx.iter_graph(module):
        names = variable.get_metadata().get("out_sharding") if isinstance(variable, nnx.Variable) else None
        if names is not None:
            variable.set_metadata("out_sharding", renamed(tuple(getattr(names, "spec", names))))
