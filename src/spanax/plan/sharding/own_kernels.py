"""How a kernel of the user's own is sharded: as its reference allows, each device on its shards."""

import math
from collections.abc import Mapping, Sequence

from spanax.hardware.mesh import MeshShape
from spanax.plan.sharding.resolve import Constraint, Spec, axes_of
from spanax.trace.jaxpr.graph import Graph, Op
from spanax.trace.kernels.reference import KernelDims, Labels

Axes = tuple[str, ...]


def axes_by_class(graph: Graph, op: Op, constraints: Sequence[Constraint | None], mesh: MeshShape) -> dict[int, Axes]:
    """Returns the mesh axes that shard each class of dims: those that shard the largest array that has it."""
    dims: KernelDims = op.params["classes"]
    arrays = list(zip((*op.inputs, *op.outputs), (*dims.operands, *dims.results), strict=True))
    arrays.sort(key=lambda array: -graph.num_bytes(array[0]))
    result: dict[int, Axes] = {}
    used = set[str]()
    for value, labels in arrays:
        constraint = constraints[value]
        for label, by in zip(labels, constraint.computed if constraint else (), strict=constraint is not None):
            if label is None or label in result or not by:
                continue
            ways = dict(dims.ways).get(label, 1)
            axes: Axes = ()
            for axis in by:
                if axis not in used and ways % mesh.ways((*axes, axis)) == 0:
                    axes = (*axes, axis)
            if axes:
                result[label] = axes
                used.update(axes)
    return result


def specs_of(labels: Sequence[Labels], axes: Mapping[int, Axes]) -> list[Spec]:
    """Returns the specs of arrays with dims of some classes."""
    return [tuple(() if label is None else axes.get(label, ()) for label in each) for each in labels]


def scattered_spec(spec: Spec, summed: Axes, wanted: Constraint | None, shape: Sequence[int], mesh: MeshShape) -> Spec:
    """Returns the spec of a sum over mesh axes: scattered over those that shard it afterwards, where they divide it."""
    if wanted is None or wanted.is_open:
        return spec
    result = tuple(
        (*by, *(axis for axis in after if axis in summed)) for by, after in zip(spec, wanted.spec, strict=True)
    )
    is_even = all(size % mesh.ways(by) == 0 for size, by in zip(shape, result, strict=True))
    return result if is_even and len(axes_of(result)) == sum(map(len, result)) else spec


def gathered(graph: Graph, op: Op, constraints: Sequence[Constraint | None], mesh: MeshShape) -> dict[str, float]:
    """Returns the bytes of operands that every device gathers for a kernel, by the reason."""
    dims: KernelDims = op.params["classes"]
    whole = dict(dims.whole)
    axes = axes_by_class(graph, op, constraints, mesh)
    result: dict[str, float] = {}
    for value, labels in zip(op.inputs, dims.operands, strict=True):
        constraint = constraints[value]
        for dim, (label, by) in enumerate(zip(labels, constraint.computed if constraint else (), strict=False)):
            if label is not None and by and by != axes.get(label):
                reason = f"dim {dim} of operand {op.inputs.index(value)}: {whole.get(label, 'it does not divide')}"
                share = 1 - 1 / math.prod(map(mesh.ways, [by]))
                result[reason] = result.get(reason, 0.0) + graph.num_bytes(value) * share
    return result
