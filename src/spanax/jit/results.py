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


OBJECTS = Argument | NewObject


def pure_results(results: Any, nodes: tuple[Any, ...]) -> Any:
    """Returns the results of a function as a pytree of arrays, given the objects that were passed to it."""
    paths = {id(node): path for path, node in nnx.iter_graph(nodes) if is_object(node)}

    def pure(result: Any) -> Any:
        if id(result) in paths:
            return Argument(paths[id(result)])
        if isinstance(result, nnx.Pytree):
            graphdef, state = nnx.split(result)
            return NewObject(graphdef, state)
        return result  # Variables are pytrees

    return jax.tree.map(pure, results, is_leaf=is_object)


def with_objects(results: Any, by_path: Mapping[tuple[Any, ...], Any]) -> Any:
    """Returns the results that `pure_results` represents.

    Args:
      results: what `pure_results` returned.
      by_path: the objects that were passed to the function, and their parts.
    """

    def restore(result: Any) -> Any:
        if isinstance(result, Argument):
            return by_path[result.path]
        return nnx.merge(result.graphdef, result.state) if isinstance(result, NewObject) else result

    return jax.tree.map(restore, results, is_leaf=lambda result: isinstance(result, OBJECTS))


def has_objects(results: Any) -> bool:
    """Returns whether the results that `pure_results` returned represent NNX objects."""
    leaves = jax.tree.leaves(results, is_leaf=lambda result: isinstance(result, OBJECTS))
    return any(isinstance(leaf, OBJECTS) for leaf in leaves)
