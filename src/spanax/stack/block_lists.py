"""Replaces a model's lists of equal blocks by `spanax.Stack`s; the model's own loops over the lists still work."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import jax
from flax import nnx

from spanax.errors import SpanaxError, StackError, first_line, nearest
from spanax.stack.block_equality import operation_counts
from spanax.stack.layer_loop import Token, read_tokens, refusal
from spanax.stack.stack import Stack

Model = TypeVar("Model", bound=nnx.Module)


def stack(
    model: Model,
    *inputs: Any,
    lists: Sequence[str] | None = None,
    remat: str | Callable[..., Any] | None = None,
) -> Model:
    """Returns a copy of a model in which `spanax.Stack`s replace the lists of equal blocks.

    A loop such as `for block in self.blocks: x = block(x)` then runs all layers in one scan, which is traced and
    compiled once, for any number of layers. Any other use of a block or of its result would need the values of a single
    layer and raises an error: when the model is called, or right away if `inputs` are passed.

    Args:
      model: the model to copy; it is not changed.
      inputs: arguments for a call of the model, arrays or `jax.ShapeDtypeStruct`s. If given, both models are traced
        without computing anything, and their operation counts are compared.
      lists: paths of the lists to stack, where `*` matches any text; by default all lists of at least two equal blocks
        that are not inside another such list.
      remat: the rematerialization policy, see `spanax.Stack`.

    Raises:
      SpanaxError: no list can be stacked, or one of `lists` cannot. With `inputs`, also if a loop does more than pass
        x from block to block.

    Example:
      >>> class Deep(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(6)])
      ...     def __call__(self, x):
      ...         for block in self.blocks:
      ...             x = block(x)
      ...         return x
      >>> x = jax.numpy.ones((2, 8))
      >>> listed = Deep(nnx.Rngs(0))
      >>> stacked = stack(listed, x)
      >>> stacked.blocks.kernel.shape, bool(jax.numpy.allclose(stacked(x), listed(x)))
      ((6, 8, 8), True)
    """
    listed, model = model, nnx.clone(model)
    refused: list[tuple[str, str]] = []
    selected = _selected(list(_lists(model, "", set())), lists)
    for candidate in selected:
        try:
            candidate.replace(model, remat)
        except SpanaxError as error:
            if lists is not None or len(selected) == 1:
                raise
            refused.append((candidate.path, first_line(error)))  # raised, or logged as a warning, below
    if len(refused) == len(selected):
        reasons = "; ".join(f"`{path}`: {why}" for path, why in refused)
        raise StackError("no list of blocks can be stacked.", where=reasons, fix="make the blocks equal")
    for path, why in refused:
        warnings.warn(f"`{path}` remains a list: {why}", stacklevel=2)
    if inputs:
        _try(listed, model, inputs, [candidate.path for candidate in selected])
    return model


@dataclass(frozen=True)
class _BlockList:
    """A list of blocks in a model: its path, the object and the attribute or key that hold it, and the blocks."""

    path: str
    parent: Any
    name: Any
    blocks: Sequence[nnx.Module]

    def replace(self, model: nnx.Module, remat: Any) -> None:
        """Replaces the list by a stack.

        Raises:
          SpanaxError: the blocks cannot be stacked; the model still has the list.
        """
        stacked = Stack.of(self.blocks, remat=remat, path=self.path)
        paths_in_blocks = dict(_variables(self.blocks))
        old = vars(self.parent)[self.name] if isinstance(self.parent, nnx.Pytree) else self.parent[self.name]
        self._put(stacked)
        for key, path in _variables(model):
            if key in paths_in_blocks:
                self._put(old)
                raise StackError(
                    f"`{path}` and `{self.path}.{paths_in_blocks[key]}` share a variable; stacking would copy it.",
                    fix="use separate variables, or do not stack this list",
                )

    def _put(self, value: Any) -> None:
        if isinstance(self.parent, nnx.Pytree):
            setattr(self.parent, self.name, value)
        else:
            self.parent[self.name] = value


def _lists(value: Any, path: str, seen: set[int]) -> Iterator[_BlockList]:
    """Yields each list, tuple or nnx.List that contains only modules, nested lists before the lists around them."""
    if isinstance(value, Stack) or id(value) in seen:
        return
    seen.add(id(value))
    for name, child in _items(value):
        child_path = f"{path}.{name}" if path else str(name)
        yield from _lists(child, child_path, seen)
        is_list = isinstance(child, nnx.List | list | tuple) and not isinstance(value, tuple)
        if is_list and len(child) and all(isinstance(block, nnx.Module) for block in child):
            yield _BlockList(child_path, value, name, list(child))


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, nnx.Variable):
        return []
    if isinstance(value, nnx.Pytree):
        return [(name, item) for name, item in vars(value).items() if not name.startswith("_pytree__")]
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list | tuple) else []


def _variables(value: Any) -> Iterator[tuple[int, str]]:
    for path, node in nnx.iter_graph(value):
        if isinstance(node, nnx.Variable):
            yield id(node), ".".join(map(str, path))


def _selected(candidates: list[_BlockList], lists: Sequence[str] | None) -> list[_BlockList]:
    """Returns the lists that match `lists`; by default the outermost lists of at least two blocks."""
    stackable = [candidate for candidate in candidates if len(candidate.blocks) > 1]
    if not stackable:
        lengths = ", ".join(f"`{candidate.path}` has {len(candidate.blocks)}" for candidate in candidates[:3])
        raise StackError(
            "the model has no list of at least two blocks.",
            where=lengths,
            fix="self.blocks = nnx.List([Block(rngs) for _ in range(12)]), or spanax.Stack(Block, 12, rngs=rngs)",
        )
    if lists is None:
        return [
            candidate
            for candidate in stackable
            if not any(candidate.path.startswith(f"{other.path}.") for other in stackable)
        ]
    for pattern in lists:
        if not any(fnmatchcase(candidate.path, pattern) for candidate in stackable):
            raise StackError(
                f"the model has no list of at least two blocks at `{pattern}`.",
                fix=nearest(pattern, [candidate.path for candidate in stackable]),
            )
    return [candidate for candidate in stackable if any(fnmatchcase(candidate.path, pattern) for pattern in lists)]


def _try(listed: nnx.Module, stacked: nnx.Module, inputs: Sequence[Any], paths: Sequence[str]) -> None:
    """Traces both models and compares their operation counts.

    Raises:
      SpanaxError: a loop does more than pass x from block to block.
    """
    try:
        with read_tokens() as tokens:
            stacked_counts = operation_counts(*_as_function(stacked), inputs)
    except TypeError as error:
        if not tokens:
            raise
        raise refusal(", ".join(paths), "uses the result of a layer") from error
    listed_counts = operation_counts(*_as_function(listed), inputs)
    differ = sorted(key for key in stacked_counts | listed_counts if stacked_counts[key] != listed_counts[key])
    if differ:
        raise refusal(
            ", ".join(paths),
            f"runs `{differ[0]}` {stacked_counts[differ[0]]} times, but {listed_counts[differ[0]]} times as a list",
        )


def _as_function(model: nnx.Module) -> tuple[Callable[..., Any], nnx.State]:
    """Returns the model's call as a function of its state and inputs, and the state."""
    graph, state = nnx.split(model)

    def call(state: nnx.State, inputs: Sequence[Any]) -> Any:
        merged: Any = nnx.merge(graph, state, copy=True)
        result = jax.tree.leaves(merged(*inputs))
        for leaf in result:
            if type(leaf) is Token:
                leaf.refuse()
        return result

    return call, state
