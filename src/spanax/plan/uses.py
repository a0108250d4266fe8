"""Uses: how an operation takes its operands, where that is not how they lie.

Left to itself, XLA may move activations to a stored weight instead of gathering the weight, and gathers whatever
a kernel of the platform computes. Both are decided here, before anything runs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spanax.plan.resolve import Constraint, Resolver, Spec
from spanax.trace.graph import Op
from spanax.trace.program import Traced

LOCAL = frozenset(
    "top_k approx_top_k fft cholesky eig eigh lu qr householder_product geqrf svd schur triangular_solve "
    "tridiagonal tridiagonal_solve".split()
)
"""Operations that XLA runs as kernels it cannot split, and whose leading dims are independent of each other."""


REDUCING = frozenset({"conv_general_dilated"})
"""Operations whose partial results are reduced before they are split."""


@dataclass(frozen=True)
class Use:
    """What happens around one operation.

    Attributes:
      inputs: the constraint each operand is brought to for it; None: as it lies.
      outputs: the constraint each result is in right after it; None: its own.
      is_local: whether it runs shard by shard, each device on its part of the leading dims.
    """

    inputs: tuple[Constraint | None, ...]
    outputs: tuple[Constraint | None, ...]
    is_local: bool = False


def uses(resolver: Resolver, traced: Traced, constraints: Sequence[Constraint | None]) -> dict[Op, Use]:
    """The operations that take operands otherwise than they lie, each with how."""
    found = {op: use_of(resolver, traced, op, constraints) for op in traced.graph.ops() if not op.bodies}
    return {op: use for op, use in found.items() if use is not None}


def use_of(resolver: Resolver, traced: Traced, op: Op, constraints: Sequence[Constraint | None]) -> Use | None:
    """How one operation takes its operands, if otherwise than they lie."""
    return _lookup(resolver, traced, op, constraints) or _local(traced, op, constraints) or _gathered(op, constraints)


def _gathered(op: Op, constraints: Sequence[Constraint | None]) -> Use | None:
    """Stored operands come in their computed layout where the result is computed.

    A result that is stored, of operands that are not, is a gradient: reduced first, and split then. Asked for both
    at once, XLA may move the activations of a convolution instead.
    """
    results = [constraints[value] for value in op.outputs]
    if all(result is not None and result.used is None for result in results):
        inputs = tuple(_as_used(constraints[value]) for value in op.inputs)
        return Use(inputs, (None,) * len(results)) if any(inputs) else None
    operands = [constraints[value] for value in op.inputs]
    if op.name in REDUCING and all(operand is None or operand.used is None for operand in operands):
        return Use((None,) * len(operands), tuple(map(_as_used, results)))
    return None


def _as_used(constraint: Constraint | None) -> Constraint | None:
    return None if constraint is None or constraint.used is None else Constraint(constraint.used)


def _local(traced: Traced, op: Op, constraints: Sequence[Constraint | None]) -> Use | None:
    """The leading dims as the result has them, everything else whole."""
    if op.name not in LOCAL:
        return None
    classes, split = traced.axes.classes, dict[int | None, tuple[str, ...]]()
    for value in op.outputs:
        constraint = constraints[value]
        split |= dict(zip(classes[value], constraint.spec if constraint else (), strict=False))
    # What the operation works along is whole on both sides: only classes that go through it stay split.
    through = {label for value in op.inputs for label in classes[value] if label is not None}
    split = {label: by for label, by in split.items() if label in through}

    def spec(value: int) -> Constraint:
        return Constraint(tuple(split.get(label, ()) for label in classes[value]))

    if not any(split.values()):
        return None
    return Use(tuple(map(spec, op.inputs)), tuple(map(spec, op.outputs)), is_local=True)


def _lookup(resolver: Resolver, traced: Traced, op: Op, constraints: Sequence[Constraint | None]) -> Use | None:
    """A lookup in a table, or the gradient of one, in whichever of three ways moves least.

    Computed, the table comes as the layout computes with it; if that splits its rows, the results are partial and
    are summed. Whole, it comes whole. Stored, every device answers all of the batch for the columns it keeps, and
    the result moves instead of the table.
    """
    if op.name == "gather":
        table, indices, rows = op.inputs[0], op.inputs[1], op.outputs[0]
        columns = op.params["dimension_numbers"].offset_dims
    elif op.name in ("scatter-add", "scatter_add"):
        table, indices, rows = op.outputs[0], op.inputs[1], op.inputs[2]
        columns = op.params["dimension_numbers"].update_window_dims
    else:
        return None
    lies, result = constraints[table], constraints[rows]
    if lies is None or lies.used is None or result is None:
        return None
    classes = traced.axes.classes
    stored = dict(zip(classes[table], lies.spec, strict=True))
    spec: Spec = tuple(
        stored.get(label, ()) if dim in columns and label is not None else () for dim, label in enumerate(classes[rows])
    )
    row_size, table_size = (math.prod(traced.graph.shape(value)) for value in (rows, table))
    parts, in_use, in_rows = (_ways(resolver, by) for by in (spec, lies.used, result.spec))
    moved = {
        # There and back: the table, or the result; and the sum of partial results where table rows are split.
        "computed": 2 * table_size / in_use + (in_use > 1) * row_size / in_rows,
        "whole": 2 * table_size,
        "stored": (2 + (in_use > 1)) * row_size / parts if parts > 1 else math.inf,
    }
    cheapest = min(moved, key=moved.__getitem__)
    if cheapest == "computed":
        return None
    others = (None,) * (len(op.inputs) - 2) if op.name == "gather" else ()
    everything = Constraint(((),) * len(classes[indices]))
    if cheapest == "whole":
        whole = Constraint(((),) * len(classes[table]))
        return Use((whole, None, *others), (None,)) if op.name == "gather" else Use((None,) * 3, (whole,))
    looked = Constraint(spec)
    return (
        Use((None, everything, *others), (looked,)) if op.name == "gather" else Use((None, everything, looked), (None,))
    )


def _ways(resolver: Resolver, spec: Spec) -> int:
    return resolver.mesh.ways([axis for by in spec for axis in by])
