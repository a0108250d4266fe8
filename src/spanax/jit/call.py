"""The arguments of a call: NNX objects, arrays and static values."""

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.tree_util import keystr

from spanax.batch_dims import ExampleDims
from spanax.errors import ArgumentError, ObjectsError, SpanaxError
from spanax.frames import is_library, is_spanax
from spanax.jit.content import content
from spanax.trace.batch import AUTO, checked_axes, spread
from spanax.trace.variables import Leaf


@dataclass(frozen=True)
class CallForm:
    """The arguments of a function without the objects and arrays among them; hashable.

    Attributes:
      treedef: the structure of `(args, kwargs)`; each NNX object is a leaf, and each static argument is None.
      is_object: whether each leaf is an NNX object.
      statics: the static arguments, by position or name.
      contents: what forms are compared by instead of `statics`, whose equality ignores types: 2 is equal to 2.0.
    """

    treedef: Any
    is_object: tuple[bool, ...]
    statics: tuple[tuple[int | str, Any], ...] = field(compare=False)
    contents: Hashable

    def arguments(self, nodes: Sequence[Any], arrays: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Returns `args` and `kwargs` with these objects and arrays."""
        objects = iter(nodes)
        values = iter(arrays)
        leaves = [next(objects) if is_object else next(values) for is_object in self.is_object]
        args, kwargs = jax.tree.unflatten(self.treedef, leaves)
        args = list(args)
        for key, value in self.statics:
            if isinstance(key, str):
                kwargs[key] = value
            else:
                args[key] = value
        return args, kwargs

    def names(self, parameters: Sequence[str]) -> tuple[list[str], list[str]]:
        """Returns names of the objects and of the arrays: their path in the arguments, such as `batch.image`.

        Args:
          parameters: the names of the function's positional parameters.
        """
        leaves = jax.tree.unflatten(self.treedef, range(len(self.is_object)))
        names: tuple[list[str], list[str]] = [], []
        for (_, argument, *path), leaf in jax.tree_util.tree_flatten_with_path(leaves)[0]:
            is_keyword = isinstance(argument, jax.tree_util.DictKey)
            index = argument.key if is_keyword else argument.idx
            name = str(index) if is_keyword else parameter_name(index, parameters)
            names[not self.is_object[leaf]].append(
                ".".join(filter(None, (name, keystr(tuple(path), simple=True, separator="."))))
            )
        return names

    def example_dims(self, axes: Any, parameters: Sequence[str], shapes: Sequence[Any]) -> ExampleDims | None:
        """Returns the dim with the examples of each array, or None if the program decides.

        Args:
          axes: as `batch_axes` of `spanax.jit`.
          parameters: the names of the function's positional parameters.
          shapes: the arrays.

        Raises:
          SpanaxError: `axes` do not fit the arguments.
        """
        if isinstance(axes, str) and axes == AUTO:
            return None
        args, kwargs = jax.tree.unflatten(self.treedef, range(len(self.is_object)))
        is_listed = isinstance(axes, tuple | list)
        if is_listed and len(axes) > max(len(args), len(parameters)):
            raise ArgumentError.of("batch_axes", axes, "one entry for each parameter")
        entries: dict[int, Any] = {}
        for key, argument in (*enumerate(args), *kwargs.items()):
            index = parameters.index(key) if key in parameters else key
            name = parameter_name(index, parameters)
            if is_listed and not (isinstance(index, int) and index < len(axes)):
                raise ArgumentError.of("batch_axes", axes, f"an entry for each parameter, also for `{name}`")
            leaves = jax.tree.leaves(argument)
            is_node = len(leaves) == 1 and self.is_object[leaves[0]]
            entry = axes[index] if is_listed else axes
            entries |= zip(leaves, [None] if is_node else spread(entry, argument, name), strict=True)
        names = self.names(parameters)[1]
        arrays = [Leaf(name, shape.shape, shape.dtype, "batch") for name, shape in zip(names, shapes, strict=True)]
        return checked_axes([entries[number] for number, is_node in enumerate(self.is_object) if not is_node], arrays)


def changed_statics(before: CallForm, after: CallForm, parameters: Sequence[str]) -> list[str]:
    """Returns the names of the static arguments that differ between two calls, with their values.

    Example:
      >>> forms = [split_call((), {"steps": steps}, (), ("steps",))[0] for steps in (2, 3)]
      >>> changed_statics(*forms, ())
      ['steps 2 -> 3']
    """
    old = dict(before.statics)
    changed = [(key, old.get(key), value) for key, value in after.statics if key not in old or old[key] != value]
    return [f"{parameter_name(key, parameters)} {was!r:.40} -> {value!r:.40}" for key, was, value in changed]


def parameter_name(key: int | str, parameters: Sequence[str]) -> str:
    """Returns the name of an argument by position or name; the position if it has no name of its own."""
    return parameters[key] if isinstance(key, int) and key < len(parameters) else str(key)


def check_static(form: CallForm, parameters: Sequence[str]) -> None:
    """Checks that the static arguments of a call are hashable, as a key of a compiled program must be.

    Args:
      form: the form of the call.
      parameters: the names of the function's positional parameters.

    Raises:
      SpanaxError: one is not hashable.
    """
    for key, value in form.statics:
        try:
            hash(value)
        except TypeError as error:
            name = parameter_name(key, parameters)
            fix = "a hashable value for a static argument, such as a tuple or a frozen dataclass"
            raise ArgumentError.of(name, value, fix) from error


def split_call(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    static_argnums: Collection[int],
    static_argnames: Collection[str],
    parameters: Sequence[str] = (),
) -> tuple[CallForm, tuple[Any, ...], list[Any]]:
    """Returns the form of a call, its NNX objects, and its arrays.

    Args:
      args: the positional arguments.
      kwargs: the keyword arguments.
      static_argnums: the positions of static arguments.
      static_argnames: the names of static arguments.
      parameters: the names of the function's parameters, for errors.

    Raises:
      SpanaxError: an argument is neither an object, nor an array, nor a number.

    Example:
      >>> form, nodes, arrays = split_call((nnx.Rngs(0), {"x": 1.0}), {"steps": 3}, (), ("steps",))
      >>> form.names(("rngs", "batch")), form.statics, arrays
      ((['rngs'], ['batch.x']), (('steps', 3),), [1.0])
    """
    statics: tuple[tuple[int | str, Any], ...] = ()
    if static_argnums or static_argnames:
        statics = tuple((index, args[index]) for index in sorted(static_argnums) if index < len(args))
        statics += tuple((name, kwargs[name]) for name in sorted(static_argnames) if name in kwargs)
        args = [None if index in static_argnums else value for index, value in enumerate(args)]
        kwargs = {name: None if name in static_argnames else value for name, value in kwargs.items()}
    leaves, treedef = jax.tree.flatten((tuple(args), dict(kwargs)), is_leaf=is_object)
    kinds = tuple(map(is_object, leaves))
    nodes = tuple(leaf for leaf, is_node in zip(leaves, kinds, strict=True) if is_node)
    arrays = [as_array(leaf) for leaf, is_node in zip(leaves, kinds, strict=True) if not is_node]
    form = CallForm(treedef, kinds, statics, content(statics))
    if any(array is None for array in arrays):
        raise _not_an_array(
            form, [leaf for leaf, is_node in zip(leaves, kinds, strict=True) if not is_node], parameters
        )
    return form, nodes, arrays


def _not_an_array(form: CallForm, leaves: Sequence[Any], parameters: Sequence[str]) -> ObjectsError:
    """Returns the error for the first leaf of the arguments that is not an array."""
    names = form.names(parameters)[1]
    name, value = next(pair for pair in zip(names, leaves, strict=True) if as_array(pair[1]) is None)
    argument, _, inside = name.partition(".")
    fix = f"remove it from `{argument}`, or pass it as an argument of its own and in static_argnames"
    return ObjectsError(
        f"`{name}` is a {type(value).__name__}, neither an NNX object nor an array.",
        fix=fix if inside else f'static_argnames=("{argument}",)',
    )


def is_object(value: Any) -> bool:
    """Returns whether a value is an NNX object, whose arrays a function may update."""
    return isinstance(value, nnx.Pytree | nnx.Variable)


def as_array(value: Any) -> Any:
    """Returns an argument as JAX accepts it: arrays of other libraries, such as PyTorch, as NumPy arrays.

    None stands for an argument that is neither an array nor a number.
    """
    if isinstance(value, jax.Array | np.ndarray | np.generic | int | float | complex | jax.ShapeDtypeStruct):
        return value
    if hasattr(value, "__jax_array__"):
        return value.__jax_array__()
    if hasattr(value, "__array__"):
        return np.asarray(value)
    return None


NOTE = (
    "For simplicity, Spanax has removed its internal frames from the traceback. "
    "Set JAX_TRACEBACK_FILTERING=off to include these."
)


class WithoutSpanax:
    """A context that removes Spanax's frames from the tracebacks of errors; the frames of user code stay.

    JAX_TRACEBACK_FILTERING=off keeps every frame, as in JAX.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or jax.config.jax_traceback_filtering == "off":
            return
        for each in _chain(error):
            each.__traceback__ = _filtered(each.__traceback__)
        # A SpanaxError states what to change; JAX adds a note of its own to errors that occur while it traces.
        notes = getattr(error, "__notes__", ())
        if not isinstance(error, SpanaxError) and not any("JAX_TRACEBACK_FILTERING" in note for note in notes):
            error.add_note(NOTE)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and its visible causes, each once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _filtered(trace: TracebackType | None) -> TracebackType | None:
    """Returns a traceback without the frames of Spanax and of the libraries that it calls."""
    frames = list[TracebackType]()
    is_inside = False
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        is_inside = is_spanax(file) or (is_inside and is_library(file))
        if not is_inside:
            frames.append(trace)
        trace = trace.tb_next
    result: TracebackType | None = None
    for frame in reversed(frames):
        result = TracebackType(result, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return result
