"""The arrays of several NNX objects by path, read together and replaced in place."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax
from flax import nnx

from spanax.errors import ObjectsError

MODEL = "model"
"""The object whose arrays have no prefix: they have the paths that they have in a Program."""


@dataclass(frozen=True, eq=False)
class NamedObjects:
    """NNX objects by name, such as a model, its optimizer and metrics.

    A Variable that several objects share belongs to the first of them: `model`, then the others by name.

    Attributes:
      names: the names of the objects.
      nodes: the objects.
      slots: the path in `nodes` of each Variable, and of each array that is not in a Variable, and the structure of
        its value.
      arrays: the arrays by path. Those of `model` are as NNX prints them, such as `blocks.0.kernel`; others begin with
        the name of their object, such as `optimizer.step`. The intermediates of `sow` are left out.

    Example:
      >>> model, streams = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Rngs(0)
      >>> objects = NamedObjects.of({"streams": streams, "model": model})
      >>> list(objects.arrays)
      ['bias', 'kernel', 'streams.default.count', 'streams.default.key']
      >>> objects.update(objects.arrays | {"bias": objects.arrays["bias"] + 1})
      >>> model.bias[...].tolist()
      [1.0, 1.0, 1.0]
    """

    names: tuple[str, ...]
    nodes: tuple[Any, ...]
    slots: tuple[tuple[tuple[Any, ...], Any], ...]
    arrays: dict[str, Any]

    @staticmethod
    def of(objects: Mapping[str, Any]) -> "NamedObjects":
        """Returns the arrays of objects.

        Raises:
          SpanaxError: an object is not of NNX, data is not numeric, or two arrays would have the same path.
        """
        names = tuple(sorted(objects, key=lambda name: (name != MODEL, name)))
        for name in names:
            if not is_nnx(objects[name]):
                raise ObjectsError(
                    f"'{name}' is a {type(objects[name]).__name__}, not an NNX object.",
                    fix="an nnx.Module, nnx.Optimizer, nnx.Rngs or another nnx.Pytree",
                )
        nodes = tuple(objects[name] for name in names)
        slots = []
        arrays = dict[str, Any]()
        for path, leaf in nnx.to_flat_state(nnx.state(nodes, nnx.Not(nnx.Intermediate))):
            value = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
            pairs, structure = jax.tree_util.tree_flatten_with_path(value)
            slots.append((path, structure))
            for inner, array in pairs:
                arrays[text := _text(names, path, inner)] = array
                _check_numeric(text, array)
        return NamedObjects(names, nodes, tuple(slots), arrays)

    def update(self, arrays: Mapping[str, Any]) -> None:
        """Replaces the arrays in the objects."""
        values = iter([arrays[path] for path in self.arrays])
        new = [
            (path, jax.tree.unflatten(structure, islice(values, structure.num_leaves)))
            for path, structure in self.slots
        ]
        nnx.update(self.nodes, nnx.from_flat_state(new))


def is_nnx(value: Any) -> bool:
    """Returns whether a value is an NNX object, whose arrays can be replaced in place."""
    return isinstance(value, nnx.Pytree | nnx.Variable | nnx.State)


def _check_numeric(path: str, value: Any) -> None:
    try:
        jax.typeof(value)
    except TypeError as error:
        raise ObjectsError(
            f"`{path}` is data of {getattr(value, 'dtype', type(value).__name__)}; the state consists of numbers.",
            fix="a static attribute",
        ) from error


def _text(names: tuple[str, ...], path: tuple[Any, ...], inner: Any) -> str:
    """Returns the path of an array as text.

    Raises:
      SpanaxError: an attribute of the model has the name of another object, whose paths would be equal.
    """
    owner = names[int(path[0])]
    keys = [str(key) for key in path[1:]]
    if owner == MODEL and keys[0] in names:
        raise ObjectsError(
            f"'{keys[0]}' is the name of an object and of an attribute of the model.",
            where=f"`{'.'.join(keys)}` of the model",
            fix=f"another name for the object; leave it out if it is model.{keys[0]}",
        )
    tail = jax.tree_util.keystr(inner, simple=True, separator=".")
    return ".".join(([] if owner == MODEL else [owner]) + keys + ([tail] if tail else []))
