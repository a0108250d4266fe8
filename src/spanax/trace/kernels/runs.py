"""What the operations of a kernel of the user's own run: the kernel with its residuals, and its gradient."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

Arrays = Sequence[Any]


def as_arrays(leaves: Sequence[Any]) -> list[Any]:
    """Returns arrays for the numbers among arrays; those of NumPy, which are on no device."""
    return [leaf if hasattr(leaf, "dtype") else np.asarray(leaf, jnp.result_type(leaf)) for leaf in leaves]


@dataclass(frozen=True)
class Flat:
    """A function of arrays in a structure, `tree`, as a function of its leaves."""

    function: Callable[..., Any]
    tree: Any

    def __call__(self, *leaves: Any) -> list[Any]:
        """Returns the leaves of the result."""
        return as_arrays(jax.tree.leaves(self.function(*jax.tree.unflatten(self.tree, leaves))))

    @property
    def name(self) -> str:
        """The name of the function."""
        function = self.function
        while isinstance(function, functools.partial):
            function = function.func
        return str(getattr(function, "__name__", type(function).__name__))

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class Example:
    """Operands to compare a kernel and its reference on."""

    operands: tuple[Any, ...]


@dataclass(frozen=True)
class Forward:
    """A kernel with its reference; after the results, it returns the residuals that are neither operands nor results.

    `example` are operands to compare both on; None: random ones.
    """

    kernel: Flat
    reference: Flat
    saves: bool = False
    example: Example | None = None

    def __call__(self, *operands: Any) -> list[Any]:
        """Returns the results, and the residuals."""
        if not self.saves:
            return self.kernel(*operands)
        residuals = residuals_of(self.kernel, shapes_of(operands))
        outs, leaves, _ = saved(self.kernel, operands)
        return [*outs, *(leaves[index] for index in residuals.extras)]

    def __repr__(self) -> str:
        return repr(self.kernel)


@dataclass(frozen=True)
class Backward:
    """The gradient of a kernel; without `saves`, its results are computed again.

    Its operands are the arguments of the kernel that it reads, the results that it reads, the residuals, and the
    gradients of the results that are floats.

    Attributes:
      kernel: the kernel.
      reads: the arguments that it reads.
      saves: whether the results are not computed again.
      shapes: the shapes of all arguments, where they are whole.
      labels: the classes of their dims.
      known: of each of its operands, the classes of its dims and their sizes.
    """

    kernel: Flat
    reads: tuple[int, ...]
    saves: bool
    shapes: tuple[Any, ...]
    labels: tuple[tuple[int | None, ...], ...]
    known: tuple[tuple[tuple[int | None, int], ...], ...]

    def __call__(self, *operands: Any) -> list[Any]:
        """Returns the gradients of the arguments that are floats."""
        num = len(self.reads)
        if not self.saves:
            results, _, pull = saved(self.kernel, operands[:num])
            return list(pull(cotangents(shapes_of(results), operands[num:])))
        residuals = residuals_of(self.kernel, self._local(operands))
        of_outs = num + len(residuals.outs)
        of_extras = of_outs + len(residuals.extras)
        known: dict[str, Any] = {
            "argument": dict(zip(self.reads, operands, strict=False)),
            "result": dict(zip(residuals.outs, operands[num:of_outs], strict=True)),
            "extra": operands[of_outs:of_extras],
        }
        pull = jax.tree.unflatten(residuals.tree, [known[kind][index] for kind, index in residuals.sources])
        return list(pull(cotangents(residuals.results, operands[of_extras:])))

    def _local(self, operands: Arrays) -> tuple[Any, ...]:
        """Returns the shapes of all arguments of a shard, by those of its operands."""
        shares = {
            label: Fraction(size, whole)
            for operand, dims in zip(operands, self.known, strict=True)
            for size, (label, whole) in zip(jnp.shape(operand), dims, strict=True)
        }
        return tuple(
            jax.ShapeDtypeStruct(
                [int(size * shares.get(label, 1)) for label, size in zip(labels, each.shape, strict=True)], each.dtype
            )
            for each, labels in zip(self.shapes, self.labels, strict=True)
        )

    def __repr__(self) -> str:
        return f"gradient of {self.kernel!r}"


@dataclass(frozen=True)
class Mapped:
    """A function under `jax.vmap`: the operands with `is_mapped` have a first dim of this size."""

    run: Any
    is_mapped: tuple[bool, ...]
    size: int

    def __call__(self, *operands: Any) -> list[Any]:
        """Returns the results, each with a first dim."""
        axes = [0 if is_mapped else None for is_mapped in self.is_mapped]
        return list(jax.vmap(self.run, in_axes=axes)(*operands))

    def __repr__(self) -> str:
        return repr(self.run)


@dataclass(frozen=True)
class Some:
    """A function without some of its results."""

    run: Any
    kept: tuple[int, ...]

    def __call__(self, *operands: Any) -> list[Any]:
        """Returns the remaining results."""
        results = self.run(*operands)
        return [results[index] for index in self.kept]

    def __repr__(self) -> str:
        return repr(self.run)


@dataclass(frozen=True, eq=False)
class Residuals:
    """What the gradient of a kernel reads.

    Attributes:
      tree: the structure of the function that computes the gradient.
      sources: where each of its leaves is: an argument, a result or an extra residual, by index.
      outs: the results that it reads.
      extras: its leaves that are neither arguments nor results.
      results: the shapes of the results.
      of: for each extra, the arguments that it depends on.
      shapes: the shape of each extra.
    """

    tree: Any
    sources: tuple[tuple[str, int], ...]
    outs: tuple[int, ...]
    extras: tuple[int, ...]
    results: tuple[Any, ...]
    of: tuple[frozenset[int], ...]
    shapes: tuple[tuple[int, ...], ...]


def shapes_of(arrays: Arrays) -> tuple[Any, ...]:
    """Returns the shapes and dtypes of arrays."""
    return tuple(jax.ShapeDtypeStruct(jnp.shape(array), jnp.result_type(array)) for array in arrays)


def is_float(array: Any) -> bool:
    """Returns whether an array can have a gradient."""
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


def saved(kernel: Flat, operands: Arrays) -> tuple[list[Any], list[Any], Any]:
    """Returns the results of a kernel, the residuals, and the function from their gradients to those of operands."""
    floats = [index for index, operand in enumerate(operands) if is_float(operand)]

    def of_floats(*values: Any) -> list[Any]:
        return kernel(*(dict(zip(floats, values, strict=True)).get(i, operand) for i, operand in enumerate(operands)))

    outs, pull = jax.vjp(of_floats, *(operands[index] for index in floats))
    return outs, jax.tree.leaves(pull), pull


def cotangents(results: Sequence[Any], grads: Arrays) -> list[Any]:
    """Returns the gradients of all results, given those of floats."""
    remaining = iter(grads)
    return [next(remaining) if is_float(each) else np.zeros(each.shape, jax.dtypes.float0) for each in results]


@functools.lru_cache(maxsize=256)
def residuals_of(kernel: Flat, operands: tuple[Any, ...]) -> Residuals:
    """Returns what the gradient of a kernel reads, for operands of these shapes."""
    trees: list[Any] = []

    def run(*args: Any) -> tuple[list[Any], list[Any]]:
        outs, leaves, pull = saved(kernel, args)
        trees.append(jax.tree.structure(pull))
        return outs, leaves

    closed, (outs, leaves) = jax.make_jaxpr(run, return_shape=True)(*operands)
    args = closed.jaxpr.invars
    results = closed.jaxpr.outvars[: len(outs)]
    residuals = closed.jaxpr.outvars[len(outs) :]
    sources: list[tuple[str, int]] = []
    extras: list[int] = []
    for index, var in enumerate(residuals):
        if any(var is each for each in args):
            sources.append(("argument", next(i for i, each in enumerate(args) if each is var)))
        elif any(var is each for each in results):
            sources.append(("result", next(i for i, each in enumerate(results) if each is var)))
        else:
            sources.append(("extra", len(extras)))
            extras.append(index)
    return Residuals(
        trees[-1],
        tuple(sources),
        tuple(sorted({index for kind, index in sources if kind == "result"})),
        tuple(extras),
        tuple(outs),
        tuple(_ancestors(closed.jaxpr, residuals[index]) for index in extras),
        tuple(leaves[index].shape for index in extras),
    )


def _ancestors(jaxpr: Any, var: Any) -> frozenset[int]:
    """Returns the arguments that a value depends on."""
    needed = {var} if isinstance(var, core.Var) else set()
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(atom for atom in eqn.invars if isinstance(atom, core.Var))
    return frozenset(index for index, arg in enumerate(jaxpr.invars) if arg in needed)


def inner(run: Any, operands: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Returns the function that others map or take results of, and the shapes of its operands."""
    while isinstance(run, Mapped | Some):
        if isinstance(run, Mapped):
            pairs = zip(operands, run.is_mapped, strict=True)
            operands = tuple(
                jax.ShapeDtypeStruct(each.shape[1:], each.dtype) if is_mapped else each for each, is_mapped in pairs
            )
        run = run.run
    return run, operands


def by_reference(run: Any) -> Any:
    """Returns what an operation runs, with the reference in place of the kernel; None if it computes a gradient."""
    if not isinstance(run, Mapped | Some):
        return run.reference if isinstance(run, Forward) else None
    plain = by_reference(run.run)
    return None if plain is None else replace(run, run=plain)
