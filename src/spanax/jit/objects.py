"""The arrays of NNX objects, read and replaced in place."""

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import attrgetter, is_
from typing import Any

import jax
from flax import nnx

from spanax.errors import ObjectsError
from spanax.jit.snapshot import Snapshot, changes, structure_of

# The attributes below the API: `set_raw_value` takes 6 us per Variable, `nnx.update` 36 us, and this 1 us.
_VALUE: Any = nnx.Variable.__dict__["_raw_value"]
_AVAL = attrgetter("aval")

NUM_OBJECTS = 2
"""The number of tuples of objects whose structure is cached, such as a model and its moving average."""


@dataclass(frozen=True, eq=False)
class Objects:
    """The arrays of a tuple of NNX objects, in the order in which NNX flattens them.

    It keeps their parts alive, but not the objects: whoever stores it drops it when one of them is deleted.

    Attributes:
      references: each object; weakly, unless it is a Variable, which has no weak references.
      classes: their classes.
      inner: their parts, by path.
      structure: what a program compiled for the objects depends on: equal for objects of an equal structure.
      slots: where each array is stored: a Variable with one array, an `Attribute` or a `Part`.
      is_traced: whether another transformation traces the arrays.
      shapes: the type of each array.
      avals: the last object seen that equals each of `shapes`: comparing identities is cheaper.
      snapshot: everything else that a program may have read from the objects.

    Example:
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> objects = Objects.of((model,))
      >>> objects.update([0], [objects.arrays()[0] + 1])
      >>> float(model.bias[0]), objects.is_current()
      (1.0, True)
    """

    references: tuple[Callable[[], Any], ...]
    classes: list[type]
    inner: dict[tuple[Any, ...], Any]
    structure: Hashable
    slots: tuple[Any, ...]
    is_traced: bool
    shapes: list[Hashable]
    avals: list[Any]
    snapshot: Snapshot

    @staticmethod
    def of(nodes: tuple[Any, ...]) -> "Objects":
        """Returns the arrays of objects.

        Raises:
          SpanaxError: a Variable is a hijax one.
        """
        graphdef, state = nnx.split(nodes)
        by_path = dict(nnx.iter_graph(nodes))
        slots: list[Any] = []
        for path, _ in nnx.to_flat_state(state):
            node = by_path[path]
            if isinstance(node, nnx.Variable) and nnx.Variable not in type(node).__mro__:
                raise ObjectsError(
                    f"`{'.'.join(map(str, path[1:]))}` is a {type(node).__name__}, which spanax.jit does not support.",
                    fix="nnx.with_vars((model, optimizer), hijax=False), or `with nnx.var_defaults(hijax=False):` "
                    "around their creation",
                )
            if not isinstance(node, nnx.Variable):
                slots.append(Attribute.of(by_path[path[:-1]], path[-1]))
            elif jax.tree_util.all_leaves([node.get_raw_value()]):
                slots.append(node)
            else:
                leaves, treedef = jax.tree.flatten(node.get_raw_value())
                slots += [Part(node, treedef, index) for index in range(len(leaves))]
        arrays = _arrays(slots)
        shapes = [*map(_shape, arrays)]
        structure = structure_of(graphdef, shapes, [slot.treedef for slot in slots if isinstance(slot, Part)])
        is_traced = any(isinstance(array, jax.core.Tracer) for array in arrays)
        return Objects(
            references=tuple(
                weakref.ref(node) if isinstance(node, nnx.Pytree) else partial(_same, node) for node in nodes
            ),
            classes=[*map(type, nodes)],
            inner={path: node for path, node in by_path.items() if len(path) > 1},
            structure=structure,
            slots=tuple(slots),
            is_traced=is_traced,
            shapes=shapes,
            avals=[None] * len(slots),
            snapshot=Snapshot.of(nodes, by_path.values()),
        )

    @property
    def nodes(self) -> tuple[Any, ...]:
        """The objects."""
        return tuple(reference() for reference in self.references)

    @property
    def by_path(self) -> dict[tuple[Any, ...], Any]:
        """The objects and their parts, by path."""
        return self.inner | {(index,): node for index, node in enumerate(self.nodes)}

    @property
    def is_owned(self) -> bool:
        """Whether this keeps none of the objects alive that are not part of another one."""
        return not self.references or any(
            isinstance(node, nnx.Pytree) and not self.snapshot.holds(node) for node in self.nodes
        )

    @cached_property
    def has_only_variables(self) -> bool:
        """Whether every array is the value of a Variable."""
        return all(isinstance(slot, nnx.Variable) for slot in self.slots)

    @cached_property
    def has_parts(self) -> bool:
        """Whether a Variable has several arrays."""
        return any(isinstance(slot, Part) for slot in self.slots)

    def has_nodes(self, nodes: tuple[Any, ...]) -> bool:
        """Returns whether these are the objects."""
        return len(nodes) == len(self.references) and all(map(is_, nodes, self.nodes))

    def is_of(self, nodes: tuple[Any, ...]) -> bool:
        """Returns whether these are the objects, with the structure that they had when they were flattened."""
        return self.has_nodes(nodes) and self.is_current()

    def is_current(self) -> bool:
        """Returns whether the objects have the structure that they had when they were flattened."""
        return [*map(type, self.nodes)] == self.classes and self.snapshot.is_current() and self._has_shapes()

    def _has_shapes(self) -> bool:
        """Returns whether the arrays have the shapes and types that they had when the objects were flattened."""
        if self.has_parts and not all(slot.has_structure() for slot in self.slots if isinstance(slot, Part)):
            return False
        arrays = self.arrays()
        try:
            if all(map(is_, map(_AVAL, arrays), self.avals)):
                return True
        except AttributeError:  # NumPy arrays and numbers
            return [*map(_shape, arrays)] == self.shapes
        if [*map(_shape, arrays)] != self.shapes:
            return False
        self.avals[:] = map(_AVAL, arrays)
        return True

    def arrays(self) -> list[Any]:
        """Returns the arrays."""
        read = _VALUE.__get__
        if self.has_only_variables:
            return [*map(read, self.slots)]
        return _arrays(self.slots)

    def update(self, indices: Iterable[int], arrays: Sequence[Any]) -> None:
        """Replaces the arrays with these indices."""
        slots = map(self.slots.__getitem__, indices)
        if self.has_only_variables:
            deque(map(_VALUE.__set__, slots, arrays), maxlen=0)
            return
        for slot, array in zip(slots, arrays, strict=True):
            if isinstance(slot, nnx.Variable):
                _VALUE.__set__(slot, array)
            else:
                slot.write(array)
        self.snapshot.refresh()


@dataclass(frozen=True, eq=False)
class Attribute:
    """An array that is not in a Variable, but an item of a module, a list or a dict."""

    container: Any
    key: Any

    @staticmethod
    def of(node: Any, key: Any) -> "Attribute":
        """Returns the item of a container; of a module, the item of its dict, which does not keep the module alive."""
        return Attribute(vars(node), str(key)) if isinstance(node, nnx.Pytree) else Attribute(node, key)

    def read(self) -> Any:
        """Returns the array."""
        return self.container[self.key]

    def write(self, array: Any) -> None:
        """Replaces the array.

        Raises:
          SpanaxError: the array is an item of a tuple.
        """
        if isinstance(self.container, tuple):
            raise ObjectsError(
                "an array of the objects is an item of a tuple, which cannot be updated in place.",
                where=f"item {self.key}",
                fix="nnx.Variable(array), or a list",
            )
        self.container[self.key] = array


@dataclass(frozen=True, eq=False)
class Part:
    """One array of a Variable whose value is a pytree of several."""

    variable: nnx.Variable[Any]
    treedef: Any
    index: int

    def read(self) -> Any:
        """Returns the array."""
        return jax.tree.leaves(self.variable.get_raw_value())[self.index]

    def has_structure(self) -> bool:
        """Returns whether the value has the structure that it had when the objects were flattened."""
        return bool(jax.tree.structure(self.variable.get_raw_value()) == self.treedef)

    def write(self, array: Any) -> None:
        """Replaces the array."""
        leaves = jax.tree.leaves(self.variable.get_raw_value())
        leaves[self.index] = array
        self.variable.set_raw_value(jax.tree.unflatten(self.treedef, leaves))


@dataclass(eq=False)
class SeenObjects:
    """The structures of the objects that a function was called with, and the objects of its last calls.

    Attributes:
      numbers: a number for each structure.
      recent: the last objects, the numbers of their structures, and references that drop them from the list.
    """

    numbers: dict[Hashable, int] = field(default_factory=dict)
    recent: list[tuple[Objects, int, list[Any]]] = field(default_factory=list)

    def of(self, nodes: tuple[Any, ...]) -> tuple[Objects, int]:
        """Returns the arrays of objects and the number of their structure."""
        for objects, number, _ in self.recent:
            if objects.is_of(nodes):
                return objects, number
        objects = Objects.of(nodes)
        number = self.numbers.setdefault(objects.structure, len(self.numbers))
        others = [entry for entry in self.recent if not entry[0].has_nodes(nodes)]
        # A model that refers to itself, and Variables, would not be freed.
        if objects.is_owned and not objects.is_traced:
            references = [weakref.ref(node, self._forget) for node in nodes if isinstance(node, nnx.Pytree)]
            others = [(objects, number, references), *others]
        self.recent = others[:NUM_OBJECTS]
        return objects, number

    def changes(self, number: int, objects: Objects, prefixes: Sequence[str]) -> list[str]:
        """Returns what objects differ in from those of an earlier structure; `prefixes` begin their paths."""
        before = next(structure for structure, each in self.numbers.items() if each == number)
        return changes(before, objects.structure, prefixes)

    def accept(self, nodes: tuple[Any, ...], number: int) -> None:
        """Gives the present structure of objects a number: tracing a function may have mutated static attributes."""
        self.numbers.setdefault(Objects.of(nodes).structure, number)

    def _forget(self, reference: Any) -> None:
        self.recent = [entry for entry in self.recent if all(each is not reference for each in entry[2])]


def _same(node: Any) -> Any:
    return node


def _arrays(slots: Iterable[Any]) -> list[Any]:
    return [_VALUE.__get__(slot) if isinstance(slot, nnx.Variable) else slot.read() for slot in slots]


def _shape(array: Any) -> Hashable:
    """Returns what a program depends on of an array."""
    try:
        aval = jax.typeof(array)
    except TypeError:  # not numeric
        return (type(array),)
    return aval.shape, aval.dtype, getattr(aval, "weak_type", False)
