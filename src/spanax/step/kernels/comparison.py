"""Compares a kernel with its reference, on operands of the shapes that it first runs on."""

import inspect
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spanax.errors import KernelError
from spanax.trace.jaxpr.graph import from_jaxpr
from spanax.trace.kernels.operation import described
from spanax.trace.kernels.runs import Flat, Forward, cotangents, is_float, saved, shapes_of

TOLERANCES = {1: 0.1, 2: 3e-2, 4: 1e-3, 8: 1e-5}
"""The largest difference of equal results, relative to the largest of them, by the bytes of their dtype: that of sums
in another order."""

ROUNDED = 2e-2
"""That of float32 where matmuls round their operands: on TPUs and GPUs."""

MOST_BYTES = 1 << 30
"""A reference whose values take more bytes is not computed for a comparison."""

_compared = set[tuple[Forward, tuple[Any, ...]]]()


def compare_once(run: Forward, shapes: tuple[Any, ...]) -> None:
    """Compares a kernel with its reference on operands of some shapes, unless it was before.

    Raises:
      KernelError: a result or a gradient differs.
    """
    if run.example is not None:
        shapes = ()
    if (run, shapes) in _compared:
        return
    errors: list[BaseException] = []

    def compare() -> None:
        try:
            _compare(run, shapes)
        except BaseException as error:
            errors.append(error)

    # JAX is lowering another function in this thread, maybe for one device of a mesh.
    thread = threading.Thread(target=compare)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    _compared.add((run, shapes))


def _compare(run: Forward, shapes: tuple[Any, ...]) -> None:
    rng = np.random.default_rng(0)
    operands = [_random(rng, each) for each in shapes] if run.example is None else list(run.example.operands)
    shapes = shapes_of(operands)
    known = described(run, shapes)
    gradients = [_random(rng, each) for each in known.results]
    functions = [
        _with_gradients(flat, known.results, is_float_only=known.backward is None)
        for flat in (run.kernel, run.reference)
    ]
    values = from_jaxpr(jax.make_jaxpr(functions[1])(operands, gradients))
    num_bytes = sum(map(values.num_bytes, range(len(values.avals))))
    if num_bytes > MOST_BYTES:
        warnings.warn(
            f"the kernel `{run.kernel.name}` is not compared with its reference, which would need up to "
            f"{num_bytes / 2**30:.1f} GiB; partition_like(..., example=) compares both on smaller operands",
            stacklevel=2,
        )
        return
    kernel, reference = (jax.jit(function)(operands, gradients) for function in functions)
    names = [*(f"result {index}" for index in range(len(known.results))), *_gradient_names(run.kernel, operands)]
    for name, actual, expected in zip(names, kernel, reference, strict=False):
        difference, largest = _difference(np.asarray(actual), np.asarray(expected))
        tolerance = TOLERANCES[min(actual.dtype.itemsize, 8)]
        if jax.default_backend() != "cpu" and actual.dtype.itemsize == 4:
            tolerance = ROUNDED
        if not difference <= tolerance * largest:
            raise KernelError(
                f"the kernel `{run.kernel.name}` differs from its reference by {difference:.3g} in {name}, whose "
                f"largest value is {largest:.3g}.",
                where="operands "
                + ", ".join(f"{each.dtype}{list(each.shape)}" for each in shapes)
                + ("" if run.example is not None else ", random; integers are 0 or 1"),
                fix="a reference that computes the same, or example= with operands that the kernel is made for",
            )


def _difference(actual: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Returns the largest difference of two arrays, and the largest value of the second; NaNs differ."""
    kind = np.complex128 if np.iscomplexobj(expected) else np.float64
    wide, other = (array.astype(kind) for array in (expected, actual))
    same = (wide == other) | (np.isnan(wide) & np.isnan(other))
    difference = np.abs(np.where(same, 0, wide - other)).max(initial=0.0)
    finite = np.where(np.isfinite(wide), np.abs(wide), 0.0)
    return float(np.nan_to_num(difference, nan=np.inf)), float(finite.max(initial=0.0))


def _with_gradients(flat: Flat, results: Sequence[Any], *, is_float_only: bool) -> Any:
    """Returns a function of operands and gradients of the results, that returns results and gradients of operands."""

    def run(operands: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        if is_float_only:
            return flat(*operands)
        outs, _, pull = saved(flat, operands)
        grads = [grad for grad, result in zip(gradients, results, strict=True) if is_float(result)]
        return [*outs, *pull(cotangents(results, grads))]

    return run


def _gradient_names(kernel: Flat, operands: Sequence[Any]) -> Iterator[str]:
    """Yields the names of the gradients of the operands that are floats."""
    try:
        names = [*inspect.signature(kernel.function).parameters]
    except ValueError:
        names = []
    paths, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(kernel.tree, operands))
    for (first, *rest), operand in paths:
        if is_float(operand):
            name = names[first.idx] if first.idx < len(names) else f"argument {first.idx}"
            yield f"the gradient of `{name}{jax.tree_util.keystr(tuple(rest))}`"


def _random(rng: np.random.Generator, shape: Any) -> Any:
    if jnp.issubdtype(shape.dtype, jnp.inexact):
        return rng.normal(size=shape.shape).astype(shape.dtype)
    if shape.dtype == jnp.bool_ or jnp.issubdtype(shape.dtype, jnp.integer):
        return rng.integers(0, 2, shape.shape).astype(shape.dtype)
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), shape.shape)
    return np.zeros(shape.shape, shape.dtype)
