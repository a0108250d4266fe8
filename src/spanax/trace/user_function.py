"""Traces in the name of the user's function, so that errors name it and its arguments."""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import jax
from flax.errors import TraceContextError
from jax.tree_util import GetAttrKey

from spanax.errors import StepError
from spanax.trace.user_mesh import UserMesh

READS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
"""Exceptions that JAX raises where a program reads the value of a traced array."""

NOTE = (
    "`{}` is traced once for all values, as by nnx.jit. Replace a test of an array by jnp.where or nnx.cond, and a "
    "print by jax.debug.print; or return the array, and convert or test it after the call."
)


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, eq=False)
class Argument:
    """The arrays of one argument of a function, with their paths in it, which JAX shows in its errors."""

    paths: tuple[str, ...]
    arrays: Sequence[Any]

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        """Returns the arrays with their paths."""
        return [*zip(map(GetAttrKey, self.paths), self.arrays, strict=True)], self.paths

    @classmethod
    def tree_unflatten(cls, paths: tuple[str, ...], arrays: Sequence[Any]) -> "Argument":
        """Returns the argument with other arrays."""
        return cls(paths, arrays)


@dataclass(frozen=True, eq=False)
class UserFunction:
    """The function that the user wrote.

    Attributes:
      function: the function.
      names: a name for every array of its arguments, which begins with that of the argument: `model.kernel`.
    """

    function: Callable[..., Any]
    names: Sequence[str]

    def jaxpr(self, traced: Callable[..., Any], values: Any, batch: Any, mesh: UserMesh) -> tuple[Any, Any]:
        """Returns the jaxpr of a function that calls the user's, and the shapes of its results.

        Args:
          traced: a function of `values` and `batch`.
          values: shapes and dtypes of the state.
          batch: the same of the batch.
          mesh: the mesh under which it is traced.

        Raises:
          SpanaxError: the user's function uses the name of a mapped axis.
        """
        leaves, treedef = jax.tree.flatten((values, batch))
        arguments = _arguments(self.names, leaves)

        def call(*args: Any) -> Any:
            return traced(*jax.tree.unflatten(treedef, jax.tree.leaves(args)))

        # JAX describes a function by these two attributes.
        functools.update_wrapper(call, self._code, updated=())
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in arguments]
        vars(call)["__signature__"] = inspect.Signature(parameters)
        with self._errors():
            return jax.make_jaxpr(mesh.traced(call), return_shape=True)(*arguments.values())

    @property
    def _code(self) -> Callable[..., Any]:
        function = inspect.unwrap(self.function)
        while isinstance(function, functools.partial):
            function = inspect.unwrap(function.func)
        return function if hasattr(function, "__code__") else type(function).__call__

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Adds to errors of the user's code what to change in it."""
        try:
            yield
        except READS as error:
            error.add_note(NOTE.format(self._code.__name__))
            raise
        except TraceContextError as error:
            error.add_note("The function updates an object that it captures: pass it as an argument.")
            raise
        except NameError as error:
            if error.name is not None:  # Python's own, for an undefined variable
                raise
            raise StepError(
                "the function uses the name of a mapped axis, such as in jax.lax.pmean, and has none.",
                fix="delete the line: a gradient is already that of the whole batch; only jax.shard_map and "
                "jax.vmap(axis_name=...) have axis names",
            ) from error


def _arguments(names: Sequence[str], arrays: Sequence[Any]) -> dict[str, Any]:
    """Returns the arrays by argument, in their order."""
    arguments: dict[str, Any] = {}
    split = [(*name.partition(".")[::2], array) for name, array in zip(names, arrays, strict=True)]
    for name, group in groupby(split, key=lambda item: item[0]):
        _, paths, values = zip(*group, strict=True)
        name = name if name.isidentifier() else f"_{name}"
        while name in arguments:  # an argument with objects and arrays, which come after all objects
            name += "_"
        arguments[name] = Argument(paths, values) if paths != ("",) else values[0]
    return arguments
