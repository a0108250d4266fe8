"""A kernel of the user's own as one operation, and another one for its gradient.

It stays one operation through differentiation, so that each device later runs the kernel on its shards.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import batching
from jax.interpreters import partial_eval as pe

from spanax.errors import KernelError, first_line
from spanax.trace.jaxpr.dim_maps.registry import TABLE, Row
from spanax.trace.jaxpr.dim_maps.relations import Equation, Family, Relation
from spanax.trace.jaxpr.dim_maps.table import OPAQUE_KERNELS
from spanax.trace.jaxpr.graph import CALLS, OWN_KERNEL, Body, Graph, Op, from_jaxpr
from spanax.trace.kernels.reference import KernelDims, Labels, Reference, doubled
from spanax.trace.kernels.runs import (
    Arrays,
    Backward,
    Flat,
    Forward,
    Mapped,
    Residuals,
    Some,
    cotangents,
    is_float,
    residuals_of,
    saved,
    shapes_of,
)

STATED = frozenset({"custom_jvp_call", "custom_vjp_call"})
"""Calls that state a gradient."""

kernel_p = core.Primitive(OWN_KERNEL)
"""Operands of `run` -> its results; `dims` and `products` describe the plain form of what it computes."""
kernel_p.multiple_results = True


@dataclass(frozen=True, eq=False)
class Described:
    """A kernel and its gradient for operands of some shapes.

    Attributes:
      forward: the parameters of the operation.
      backward: those of the operation of its gradient; None: that of the reference.
      reads: the arguments that the gradient reads.
      outs: the results that it reads.
      results: the shapes of the results.
      tree: the structure of the results.
    """

    forward: dict[str, Any]
    backward: dict[str, Any] | None
    reads: tuple[int, ...]
    outs: tuple[int, ...]
    results: tuple[Any, ...]
    tree: Any


@functools.lru_cache(maxsize=256)
def described(forward: Forward, operands: tuple[Any, ...]) -> Described:
    """Returns how a kernel is sharded, as its reference with operands of these shapes.

    Raises:
      KernelError: the results of the two differ in structure, shape or dtype.
    """
    kernel = forward.kernel
    reference = forward.reference
    trees = [jax.eval_shape(_unflat(flat), *operands) for flat in (kernel, reference)]
    tree = jax.tree.structure(trees[0])
    texts = ["; ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(each)) for each in trees]
    if tree != jax.tree.structure(trees[1]) or texts[0] != texts[1]:
        raise KernelError(
            f"the kernel `{kernel.name}` returns {texts[0] or 'nothing'}, its reference {texts[1] or 'nothing'}"
            f"{' in another structure' * (texts[0] == texts[1])}.",
            where=_listed(operands),
            fix="a reference with results of the same structure, shapes and dtypes",
        )
    trace = functools.partial(_traced, reference)
    graph = trace(operands)
    if captured := [*graph.captured, *_traced(kernel, operands).captured]:
        raise KernelError(
            f"the kernel `{kernel.name}` or its reference reads an array of shape {list(jnp.shape(captured[0]))} of "
            "the function around it.",
            fix="pass it as an argument",
        )
    known = Reference(graph)
    dims = known.dims(trace)
    results = tuple(jax.tree.leaves(trees[0]))
    of_forward = {"run": forward, "classes": dims, "products": known.products()}
    plain = Described(of_forward, None, tuple(range(len(operands))), (), results, tree)
    return plain if _lacks_gradient(kernel, operands) else _with_gradient(plain, operands)


def _with_gradient(plain: Described, operands: tuple[Any, ...]) -> Described:
    """Returns a kernel with its own gradient, whose classes are those of the forward pass."""
    run: Forward = plain.forward["run"]
    dims: KernelDims = plain.forward["classes"]
    residuals = residuals_of(run.kernel, operands)
    labels, lost = _labels_of_extras(run.kernel, operands, dims, residuals)
    lost |= {label for index in residuals.outs for label in dims.sums[index]}
    # Without any class that residuals can have, it is cheaper to compute the results again.
    saves = not lost or len(lost) < len(dims.ways)
    outs = residuals.outs if saves else ()
    labels = labels if saves else ()
    dims = dims.without(lost, "the kernel stores values for its gradient that do not have them") if saves else dims
    floats = [index for index, operand in enumerate(operands) if is_float(operand)]
    of_grads = [index for index, result in enumerate(plain.results) if is_float(result)]
    forward = replace(dims, results=(*dims.results, *labels), sums=(*dims.sums, *[()] * len(labels)))
    grads = tuple(dims.operands[index] for index in floats)
    others = (*(dims.results[index] for index in outs), *labels, *(dims.results[index] for index in of_grads))
    reads = _read(dims, residuals, others) if saves else tuple(range(len(operands)))
    backward = replace(
        dims,
        operands=(*(dims.operands[index] for index in reads), *others),
        results=grads,
        sums=tuple(tuple(label for label, _ in dims.ways if label not in labels) for labels in grads),
    )

    def gradient(*values: Any) -> list[Any]:
        _, _, pull = saved(run.reference, values[: len(operands)])
        return list(pull(cotangents(plain.results, values[len(operands) :])))

    whole = (*(operands[i] for i in reads), *(plain.results[i] for i in outs), *(plain.results[i] for i in of_grads))
    shapes = [each.shape for each in whole]
    shapes[len(reads) + len(outs) : len(reads) + len(outs)] = residuals.shapes if saves else ()
    closed = jax.make_jaxpr(gradient)(*operands, *(plain.results[index] for index in of_grads))
    known = Reference(from_jaxpr(closed), (*dims.operands, *(dims.results[index] for index in of_grads)))
    of_gradient = {
        "run": Backward(run.kernel, reads, saves, operands, dims.operands, _sized(backward.operands, shapes)),
        "classes": backward,
        "products": known.products(),
    }
    of_forward = plain.forward | {"run": replace(run, saves=saves), "classes": forward}
    return replace(plain, forward=of_forward, backward=of_gradient, reads=reads, outs=outs)


def _read(dims: KernelDims, residuals: Residuals, others: Sequence[Labels]) -> tuple[int, ...]:
    """Returns the arguments that a gradient reads: its residuals, and those that tell the size of a shard."""
    reads = {index for kind, index in residuals.sources if kind == "argument"}
    known = {label for labels in (*others, *(dims.operands[index] for index in reads)) for label in labels}
    for index, labels in enumerate(dims.operands):
        if not {*labels} & {label for label, _ in dims.ways} <= known:
            reads.add(index)
            known.update(labels)
    return tuple(sorted(reads))


def _sized(labels: Sequence[Labels], shapes: Sequence[Sequence[int]]) -> tuple[tuple[tuple[int | None, int], ...], ...]:
    return tuple(tuple(zip(*pair, strict=True)) for pair in zip(labels, shapes, strict=True))


def _labels_of_extras(
    kernel: Flat, operands: tuple[Any, ...], dims: KernelDims, residuals: Residuals
) -> tuple[tuple[Labels, ...], set[int]]:
    """Returns the classes of residuals, by which of their dims grow with each, and the classes that one lacks.

    A residual has a class that none of the operands has that it depends on.
    """
    labels: list[list[int | None]] = [[None] * len(shape) for shape in residuals.shapes]
    lost = set[int]()
    for label, _ in dims.ways if residuals.extras else ():
        try:
            shapes = residuals_of(kernel, tuple(doubled(dims, operands, label))).shapes
        except Exception:  # of the user's function
            lost.add(label)
            continue
        if len(shapes) != len(residuals.shapes):
            lost.add(label)
            continue
        for index, (old, new) in enumerate(zip(residuals.shapes, shapes, strict=True)):
            grown = [dim for dim, sizes in enumerate(zip(old, new, strict=True)) if sizes[0] != sizes[1]]
            is_shared = all(label not in dims.operands[argument] for argument in residuals.of[index])
            if not (is_shared and not grown) and (len(grown) != 1 or 2 * old[grown[0]] != new[grown[0]]):
                lost.add(label)
                continue
            for dim in grown:
                labels[index][dim] = label
    return tuple(tuple(None if label in lost else label for label in each) for each in labels), lost


def _lacks_gradient(kernel: Flat, operands: tuple[Any, ...]) -> bool:
    """Returns whether a kernel has no gradient of its own: it calls a kernel outside of a function that states one."""

    def lacks(body: Body) -> bool:
        opaque = (op.name in OPAQUE_KERNELS or any(map(lacks, op.bodies)) for op in body.ops if op.name not in STATED)
        return any(opaque)

    return lacks(from_jaxpr(jax.make_jaxpr(kernel)(*operands), CALLS).body)


def _unflat(flat: Flat) -> Callable[..., Any]:
    return lambda *leaves: flat.function(*jax.tree.unflatten(flat.tree, leaves))


def _traced(function: Flat, operands: Arrays) -> Graph:
    return from_jaxpr(jax.make_jaxpr(function)(*operands))


def _listed(arrays: Arrays) -> str:
    return "operands " + ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)


def apply(forward: Forward, operands: Arrays) -> Any:
    """Returns the results of a kernel, as an operation whose gradient is one operation."""
    shapes = shapes_of(operands)
    known = described(forward, shapes)

    @jax.custom_vjp
    def call(*args: Any) -> list[Any]:
        return kernel_p.bind(*args, **known.forward)[: len(known.results)]

    def with_residuals(*args: Any) -> tuple[list[Any], Any]:
        outs = kernel_p.bind(*args, **known.forward)
        count = len(known.results)
        return outs[:count], ([args[index] for index in known.reads], [outs[i] for i in known.outs], outs[count:])

    def gradient(residuals: Any, of_outs: Arrays) -> tuple[Any, ...]:
        args, outs, extras = residuals
        grads = [grad for grad, result in zip(of_outs, known.results, strict=True) if is_float(result)]
        if known.backward is None:
            _, _, pull = saved(forward.reference, args)
            of_floats = iter(pull(cotangents(known.results, grads)))
        else:
            of_floats = iter(kernel_p.bind(*args, *outs, *extras, *grads, **known.backward))
        return tuple(next(of_floats) if is_float(shape) else None for shape in shapes)

    call.defvjp(with_residuals, gradient)
    return jax.tree.unflatten(known.tree, call(*operands))


def opaque_kernels(op: Op) -> Iterator[Any]:
    """Yields the equations of kernels that no compiler can partition which an operation is or runs."""
    if op.name in OPAQUE_KERNELS:
        yield op.eqn
    elif op.name == OWN_KERNEL:
        graph = from_jaxpr(jax.make_jaxpr(op.params["run"])(*(var.aval for var in op.eqn.invars)))
        yield from (inner.eqn for inner in graph.ops() if inner.name in OPAQUE_KERNELS)


# ---- rules of the primitive


@functools.lru_cache(maxsize=1024)
def _abstract(run: Any, operands: tuple[Any, ...]) -> list[Any]:
    try:
        results = jax.eval_shape(run, *operands)
    except Exception as error:
        raise KernelError(
            f"`{run}` cannot be traced with the shapes of a shard: {first_line(error)}",
            where=_listed(operands),
            fix="a kernel whose blocks divide these shapes, or another mesh",
        ) from error
    return [jax.core.ShapedArray(each.shape, each.dtype) for each in results]


@functools.lru_cache(maxsize=256)
def _jitted(run: Any) -> Callable[..., Any]:
    return jax.jit(lambda *operands: kernel_p.bind(*operands, run=run, classes=None, products=()))


@kernel_p.def_abstract_eval
def _results(*operands: Any, run: Any, classes: Any, products: Any) -> list[Any]:
    return _abstract(run, shapes_of(operands))


@kernel_p.def_impl
def _here(*operands: Any, run: Any, classes: Any, products: Any) -> list[Any]:
    return list(_jitted(run)(*operands))


def _batched(operands: Arrays, axes: Sequence[Any], *, run: Any, classes: Any, products: Any) -> tuple[Any, Any]:
    is_mapped = tuple(axis is not None for axis in axes)
    pairs = list(zip(operands, axes, strict=True))
    size = next(operand.shape[axis] for operand, axis in pairs if axis is not None)
    moved = [operand if axis is None else jnp.moveaxis(operand, axis, 0) for operand, axis in pairs]
    new_dims = classes and classes.batched(is_mapped, size)
    label = new_dims and new_dims.ways[-1][0]
    rows = tuple(
        replace(each, flops=size * each.flops, sizes=(*each.sizes[:3], ((size, label), *each.sizes[3])))
        for each in products
    )
    outs = kernel_p.bind(*moved, run=Mapped(run, is_mapped, size), classes=new_dims, products=rows)
    return outs, [0] * len(outs)


batching.primitive_batchers[kernel_p] = _batched


def _without_unread(used: list[bool], *args: Any) -> tuple[list[bool], Any]:
    """Removes results that nothing reads, such as the gradient of a batch."""
    eqn = args[-1]  # newer versions of JAX pass more arguments before it
    kept = tuple(index for index, is_used in enumerate(used) if is_used)
    if not kept:
        return [False] * len(eqn.invars), None
    if len(kept) < len(used):
        dims = eqn.params["classes"]
        dims = dims and replace(dims, results=_at(dims.results, kept), sums=_at(dims.sums, kept))
        products = tuple(
            replace(each, results=tuple(kept.index(index) for index in each.results if index in kept))
            for each in eqn.params["products"]
            if {*each.results} & {*kept}
        )
        params = eqn.params | {"run": Some(eqn.params["run"], kept), "classes": dims, "products": products}
        eqn = eqn.replace(outvars=list(_at(eqn.outvars, kept)), params=params)
    return [True] * len(eqn.invars), eqn


def _at(values: Sequence[Any], kept: Sequence[int]) -> tuple[Any, ...]:
    return tuple(values[index] for index in kept)


pe.dce_rules[kernel_p] = _without_unread


def _relations(equation: Equation) -> list[Relation]:
    return list(equation.params["classes"].relations(equation.shapes))


TABLE[OWN_KERNEL] = Row(Family.KERNEL, _relations)
