"""The arrays of several NNX objects by path, read together and replaced in place."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from spanax.errors import ObjectsError
from spanax.trace.variables import named_values, stored_value, type_of

MODEL = "model"
"""The object whose arrays have no prefix: they have the paths that they have in a Program."""


@dataclass(frozen=True, eq=False)
class NamedObjects:
    """NNX objects by name, such as a model, its optimizer and metrics.

    A Variable that several objects share belongs to the first of them: `model`, then the others by name.

    Attributes:
      names: the names of the objects.
      nodes: the objects.
      treedef: the structure of the state of `nodes`, with the values of Variables as stored.
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
    treedef: Any
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
        state = nnx.state(nodes, nnx.Not(nnx.Intermediate))
        values, treedef = jax.tree.flatten(nnx.to_pure_dict(state, stored_value))
        arrays = dict[str, Any]()
        named = named_values(state, ["" if name == MODEL else name for name in names])
        for (path, owner, _), value in zip(named, values, strict=True):
            first = path.split(".")[0]
            if names[owner] == MODEL and first in names:
                raise ObjectsError(
                    f"'{first}' is the name of an object and of an attribute of the model.",
                    where=f"`{path}` of the model",
                    fix=f"another name for the object; leave it out if it is model.{first}",
                )
            type_of(path, value)
            arrays[path] = value
        return NamedObjects(names, nodes, treedef, arrays)

    def update(self, arrays: Mapping[str, Any]) -> None:
        """Replaces the arrays in the objects."""
        nnx.update(self.nodes, self.treedef.unflatten([arrays[path] for path in self.arrays]))


def is_nnx(value: Any) -> bool:
    """Returns whether a value is an NNX object, whose arrays can be replaced in place."""
    return isinstance(value, nnx.Pytree | nnx.Variable | nnx.State)
