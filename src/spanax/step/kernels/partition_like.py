"""Kernels of the user's own, sharded as their plain references; compared with them before they first run."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import jax
from jax.interpreters import mlir

from spanax.compat import has_backend
from spanax.errors import ArgumentError, KernelError
from spanax.step.kernels.comparison import compare_once
from spanax.trace.kernels.operation import apply, kernel_p
from spanax.trace.kernels.runs import Example, Flat, Forward, as_arrays, inner, shapes_of

P = ParamSpec("P")
R = TypeVar("R")


def partition_like(kernel: Callable[P, R], reference: Callable[P, R], *, example: Any = None) -> Callable[P, R]:
    """Returns a function that computes `kernel` and is sharded as its plain `reference` would be, gradients too.

    Each device runs the kernel on its shards, which the kernel sees as arrays of their own shapes. Dims along which the
    reference computes row by row, or sums, are sharded; operands are gathered along the others. Its gradient is that of
    its `jax.custom_vjp`, or else of the reference.

    Call it once, outside of a model: layers with equal functions are compared once, and compiled alike.

    Before it first runs on shapes, the kernel is compared with its reference, on random operands: normal floats, and
    integers of 0 and 1.

    Args:
      kernel: a function of arrays, such as one that calls `pallas_call`, or the FFI.
      reference: the same function in operations of `jax.numpy` and `jax.lax`.
      example: a tuple of operands to compare both on instead.

    Raises:
      SpanaxError: they take or return other arrays; when they run, that their results differ.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax.experimental import pallas
      >>> def double(x):  # on a TPU or GPU, without `interpret`
      ...     def kernel(x_ref, out_ref):
      ...         out_ref[...] = 2 * x_ref[...]
      ...     return pallas.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)
      >>> doubled = partition_like(double, lambda x: 2 * x)
      >>> doubled(jnp.ones(3)).tolist()
      [2.0, 2.0, 2.0]
    """
    for name, function in (("kernel", kernel), ("reference", reference)):
        if not callable(function):
            raise ArgumentError.of(name, function, "a function of arrays")
    compared = None if example is None else Example(tuple(as_arrays(jax.tree.leaves(example))))

    @functools.wraps(kernel)
    def call(*args: Any) -> Any:
        for function in (kernel, reference):
            _check_arity(function, args)
        leaves, tree = jax.tree.flatten(args)
        forward = Forward(Flat(kernel, tree), Flat(reference, tree), example=compared)
        return apply(forward, as_arrays(leaves))

    return cast(Callable[P, R], call)


def _check_arity(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a builtin
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        name = getattr(function, "__name__", "function")
        raise KernelError(
            f"`{name}{signature}` is called with {len(args)} arguments: {error}.",
            fix="a kernel and a reference with equal positional arguments",
        ) from None


def _lowered(ctx: Any, *operands: Any, run: Any, classes: Any, products: Any) -> Any:
    """Lowers a kernel, after a comparison with its reference where that can run here."""
    forward, shapes = inner(run, shapes_of(ctx.avals_in))
    platforms = ctx.module_context.platforms
    if isinstance(forward, Forward) and has_backend() and list(platforms) == [jax.default_backend()]:
        compare_once(forward, shapes)
    return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


mlir.register_lowering(kernel_p, _lowered)
