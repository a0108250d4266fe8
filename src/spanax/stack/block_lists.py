"""Lists of equal blocks in a model that somebody wrote, found and stacked; the model's own loop over them runs on."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import jax
from flax import nnx

from spanax.errors import SpanaxError, first_line, nearest
from spanax.stack.layer_loop import Token, read_tokens, refusal
from spanax.stack.operation_counts import operation_counts
from spanax.stack.stack import Stack

Model = TypeVar("Model", bound=nnx.Module)


def stack(
    model: Model,
    *inputs: Any,
    lists: Sequence[str] | None = None,
    remat: str | Callable[..., Any] | None = None,
) -> Model:
    """The same model with its lists of equal blocks as `spanax.Stack`s, and its code as it is.

    A loop such as `for block in self.blocks: x = block(x)` then runs all layers in one scan: traced and compiled once,
    whatever their number. What else a loop may do with a block or with what it returns would need the numbers of
    single layers; it is met with an error when the model is called, and with `inputs` at once.

    Args:
      model: stays as it is; what comes back is another one with the same values.
      inputs: what the model may be called with, arrays or `jax.ShapeDtypeStruct`s, to try its loops without computing
        and to hold the work of both models against each other.
      lists: paths of the lists to stack, with `*` for any part; by default all with two equal blocks or more that are
        not inside of such blocks.
      remat: as of `spanax.Stack`.

    Raises:
      SpanaxError: no list can be stacked, or one of `lists` cannot; it says why. With `inputs`, too, a loop that does
        more than to pass x on.

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
    chosen = _chosen(list(_lists(model, "", set())), lists)
    for one in chosen:
        try:
            one.replace(model, remat)
        except SpanaxError as error:
            if lists is not None or len(chosen) == 1:
                raise
            refused.append((one.path, first_line(error)))  # raised or warned of below
    if len(refused) == len(chosen):
        told = "; ".join(f"`{path}`: {why}" for path, why in refused)
        raise SpanaxError("no list of blocks can be stacked.", where=told, fix="blocks that are alike")
    for path, why in refused:
        warnings.warn(f"`{path}` stays a list: {why}", stacklevel=2)
    if inputs:
        _try(listed, model, inputs, [one.path for one in chosen])
    return model


@dataclass(frozen=True)
class _Listed:
    """A list of blocks in a model: its path, who holds it under which name, and the blocks."""

    path: str
    parent: Any
    name: Any
    blocks: Sequence[nnx.Module]

    def replace(self, model: nnx.Module, remat: Any) -> None:
        """Puts a stack in the list's place; where it cannot, the list stays."""
        made = Stack.of(self.blocks, remat=remat, path=self.path)
        inside = dict(_variables(self.blocks))
        old = vars(self.parent)[self.name] if isinstance(self.parent, nnx.Pytree) else self.parent[self.name]
        self._put(made)
        for key, path in _variables(model):
            if key in inside:
                self._put(old)
                raise SpanaxError(
                    f"`{path}` and `{self.path}.{inside[key]}` are one variable; stacked, they would be two.",
                    fix="a variable of its own for each, or leave them a list",
                )

    def _put(self, value: Any) -> None:
        if isinstance(self.parent, nnx.Pytree):
            setattr(self.parent, self.name, value)
        else:
            self.parent[self.name] = value


def _lists(value: Any, path: str, seen: set[int]) -> Iterator[_Listed]:
    """Every list, tuple or nnx.List that holds modules only, those inside of a block before the list it is in."""
    if isinstance(value, Stack) or id(value) in seen:
        return
    seen.add(id(value))
    for name, held in _items(value):
        below = f"{path}.{name}" if path else str(name)
        yield from _lists(held, below, seen)
        is_list = isinstance(held, nnx.List | list | tuple) and not isinstance(value, tuple)
        if is_list and len(held) and all(isinstance(one, nnx.Module) for one in held):
            yield _Listed(below, value, name, list(held))


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, nnx.Variable):
        return []
    if isinstance(value, nnx.Pytree):
        return [(name, held) for name, held in vars(value).items() if not name.startswith("_pytree__")]
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list | tuple) else []


def _variables(value: Any) -> Iterator[tuple[int, str]]:
    for path, held in nnx.iter_graph(value):
        if isinstance(held, nnx.Variable):
            yield id(held), ".".join(map(str, path))


def _chosen(found: list[_Listed], lists: Sequence[str] | None) -> list[_Listed]:
    """The lists asked for; by default those that have two blocks or more and are in no other's blocks."""
    long = [one for one in found if len(one.blocks) > 1]
    if not long:
        has = ", ".join(f"`{one.path}` has {len(one.blocks)}" for one in found[:3])
        raise SpanaxError(
            "the model has no list of two blocks or more to stack.",
            where=has,
            fix="self.blocks = nnx.List([Block(rngs) for _ in range(12)]), or spanax.Stack(Block, 12, rngs=rngs)",
        )
    if lists is None:
        return [one for one in long if not any(one.path.startswith(f"{other.path}.") for other in long)]
    for pattern in lists:
        if not any(fnmatchcase(one.path, pattern) for one in long):
            raise SpanaxError(
                f"the model has no list of two blocks or more at `{pattern}`.",
                fix=nearest(pattern, [one.path for one in long]),
            )
    return [one for one in long if any(fnmatchcase(one.path, pattern) for pattern in lists)]


def _try(listed: nnx.Module, stacked: nnx.Module, inputs: Sequence[Any], paths: Sequence[str]) -> None:
    """Calls both models without computing anything: loops say what they do, and both must do the same work."""
    try:
        with read_tokens() as read:
            found = operation_counts(*_called(stacked), inputs)
    except TypeError as error:
        if not read:
            raise
        raise refusal(", ".join(paths), "uses what a layer returned") from error
    wanted = operation_counts(*_called(listed), inputs)
    differ = sorted(key for key in found | wanted if found[key] != wanted[key])
    if differ:
        raise refusal(
            ", ".join(paths),
            f"computes `{differ[0]}` {found[differ[0]]} times, and {wanted[differ[0]]} times in a list",
        )


def _called(model: nnx.Module) -> tuple[Callable[..., Any], nnx.State]:
    """A call of the model as a function of its state, and the state."""
    graph, state = nnx.split(model)

    def call(state: nnx.State, inputs: Sequence[Any]) -> Any:
        merged: Any = nnx.merge(graph, state, copy=True)
        result = jax.tree.leaves(merged(*inputs))
        for leaf in result:
            if type(leaf) is Token:
                leaf.refuse()
        return result

    return call, state
