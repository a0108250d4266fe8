"""The results of a traced function: arrays, new NNX objects, and objects that were passed to it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from flax import nnx

from spanax.jit.call import is_object


@jax.tree_util.register_static
@dataclass(frozen=True)
class Argument:
    """A result that is one of the function's objects, or a part of one."""

    path: tuple[Any, ...]


@partial(jax.tree_util.register_dataclass, data_fields=["state"], meta_fields=["graphdef"])
@dataclass(frozen=True)
class NewObject:
    """A result that is an NNX object created by the function."""

    graphdef: Any
    state: Any


@partial(jax.tree_util.register_dataclass, data_fields=["results", "variables"], meta_fields=["paths"])
@dataclass(frozen=True)
class Returned:
    """The results of a call, and the Variables that it added to its objects, such as those of `sow`.

    `paths` are those of the modules with the names of the attributes.
    """

    results: Any
    variables: list[Any]
    paths: tuple[tuple[tuple[Any, ...], str], ...]


OBJECTS = Argument | NewObject


def attributes(nodes: tuple[Any, ...]) -> dict[tuple[Any, ...], set[str]]:
    """Returns the names of the attributes of every module of the objects, by its path."""
    return {path: {*vars(node)} for path, node in nnx.iter_graph(nodes) if isinstance(node, nnx.Pytree)}


def returned(results: Any, nodes: tuple[Any, ...], before: Mapping[tuple[Any, ...], set[str]]) -> Returned:
    """Returns the results of a function, and the Variables that it added, which it removes from the objects.

    Args:
      results: the results.
      nodes: the objects after the call.
      before: their attributes before it.
    """
    by_path = dict(nnx.iter_graph(nodes))
    paths = {id(node): path for path, node in by_path.items() if is_object(node)}

    def pure(result: Any) -> Any:
        if id(result) in paths:
            return Argument(paths[id(result)])
        # Variables are pytrees.
        return NewObject(*nnx.split(result)) if isinstance(result, nnx.Pytree) else result

    pure_results = jax.tree.map(pure, results, is_leaf=is_object)
    added = {
        (path, name): value
        for path, names in before.items()
        if path in by_path and not isinstance(by_path[path], nnx.List)
        for name, value in vars(by_path[path]).items()
        if name not in names and isinstance(value, nnx.Variable)
    }
    for path, name in added:
        delattr(by_path[path], name)
    return Returned(pure_results, [*added.values()], tuple(added))


def with_objects(call: Returned, by_path: Mapping[tuple[Any, ...], Any]) -> Any:
    """Returns the results of a function, and adds new Variables to its objects.

    Args:
      call: what `returned` returned.
      by_path: the objects that were passed to the function, and their parts.
    """
    for (path, name), variable in zip(call.paths, call.variables, strict=True):
        setattr(by_path[path], name, variable)

    def restore(result: Any) -> Any:
        if isinstance(result, Argument):
            return by_path[result.path]
        return nnx.merge(result.graphdef, result.state) if isinstance(result, NewObject) else result

    return jax.tree.map(restore, call.results, is_leaf=lambda result: isinstance(result, OBJECTS))


def has_objects(call: Returned) -> bool:
    """Returns whether results represent NNX objects, or Variables were added to the objects."""
    leaves = jax.tree.leaves(call.results, is_leaf=lambda result: isinstance(result, OBJECTS))
    return bool(call.paths) or any(isinstance(leaf, OBJECTS) for leaf in leaves)
