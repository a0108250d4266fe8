"""Cost terms of kernels of the user's own: FLOPs of the reference, bytes of operands and results."""

from collections.abc import Sequence

from spanax.plan.sharding.own_kernels import axes_by_class
from spanax.plan.sharding.partition import union
from spanax.plan.spmd.matmul_rows import dtype_name
from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.plan.spmd.terms import Matmul
from spanax.trace.analysis.op_groups import OpGroup
from spanax.trace.kernels.reference import KernelDims, Product

ARRAYS = 3
"""The number of arrays whose bytes a row of the matmuls has."""


def kernel_rows(sharded: ShardedProgram, group: OpGroup) -> list[Matmul]:
    """Returns the rows of a kernel: one for each matmul of its reference, with the bytes of all operands and results.

    A kernel without matmuls has rows with bytes alone.
    """
    op = group.op
    graph = sharded.traced.graph
    mesh = sharded.resolver.mesh
    dims: KernelDims = op.params["classes"]
    axes = axes_by_class(graph, op, sharded.constraints, mesh)
    masks = {label: sharded.mask(by) for label, by in axes.items()}
    pairs = zip((*op.inputs, *op.outputs), (*dims.operands, *dims.results), strict=True)
    arrays = [
        (
            sharded.num_bytes(value),
            union([masks.get(label, 0) for label in labels if label is not None]),
            sharded.is_batched(value),
        )
        for value, labels in pairs
    ]
    parts = [arrays[start : start + ARRAYS] for start in range(0, len(arrays), ARRAYS)]
    products: list[Product] = [*op.params["products"]]
    empty = Product(0, str(graph.avals[op.inputs[0]].dtype), ((), (), (), ()))
    products += [empty] * (len(parts) - len(products))
    parts += [[]] * (len(products) - len(parts))
    work = union(list(masks.values()))
    rows = []
    for product, part in zip(products, parts, strict=True):
        filled = [*part, *[(0, 0, False)] * (ARRAYS - len(part))]
        rows.append(
            Matmul(
                flops=product.flops,
                work=work,
                sizes=[_total(sizes) for sizes in product.sizes],
                size_axes=[
                    union([masks.get(label, 0) for _, label in sizes if label is not None]) for sizes in product.sizes
                ],
                batched=_batched(sharded, group, product),
                num_bytes=[num_bytes for num_bytes, _, _ in filled],
                bytes_axes=[mask for _, mask, _ in filled],
                bytes_batched=[is_batched for _, _, is_batched in filled],
                dtypes=dtype_name(product.dtype),
                runs=group.runs,
                phase=int(group.phase),
                in_layers=group.in_layers,
            )
        )
    return rows


def _total(sizes: Sequence[tuple[int, int | None]]) -> float:
    total = 1.0
    for size, _ in sizes:
        total *= size
    return total


def _batched(sharded: ShardedProgram, group: OpGroup, product: Product) -> int:
    """Returns which of m, n, k and the number of products grows with the batch; -1 for none."""
    op = group.op
    dims: KernelDims = op.params["classes"]
    batch = sharded.traced.batch_labels
    classes = sharded.traced.axes.classes
    pairs = zip((*op.inputs, *op.outputs), (*dims.operands, *dims.results), strict=True)
    grown = {
        label for value, labels in pairs for label, outer in zip(labels, classes[value], strict=True) if outer in batch
    } - {None}
    rows = (any(label in grown for _, label in sizes) for sizes in product.sizes)
    return next((index for index, is_grown in enumerate(rows) if is_grown), -1)
