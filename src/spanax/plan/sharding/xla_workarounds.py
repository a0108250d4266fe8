"""The defects of XLA that Spanax works around, each with the JAX versions that have it.

A workaround acts on all versions. `tests/plan/sharding/test_xla_workarounds.py` runs JAX without it, and fails on a
version that `jax_versions` describes wrongly: then change the record, or delete the workaround.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from spanax.plan.sharding.resolve import Constraint
from spanax.trace.axes.discover import is_padding
from spanax.trace.jaxpr.dim_maps.relations import Family
from spanax.trace.jaxpr.graph import Graph, Op


@dataclass(frozen=True)
class XlaWorkaround:
    """A defect of XLA, and where Spanax works around it.

    Attributes:
      name: identifies it.
      platform: the platform of the compiler; empty: all, because the defect is in the partitioner.
      jax_versions: the versions that have the defect.
      reason: what XLA does.
      source: the module of the workaround.

    Example:
      >>> SHARD_SCATTERS.is_needed("0.10.2"), SHARD_SCATTERS.is_needed("0.12.0")
      (True, False)
    """

    name: str
    platform: str
    jax_versions: SpecifierSet
    reason: str
    source: str

    def is_needed(self, jax_version: str) -> bool:
        """Returns whether a version of JAX has the defect."""
        return self.jax_versions.contains(jax_version, prereleases=True)


RESIZED_DIMS = XlaWorkaround(
    "resized-dims",
    "",
    SpecifierSet(">=0.10.2"),
    "slices, pads and concatenations of an unevenly sharded dim do not compile, or return wrong numbers",
    "plan/sharding/xla_workarounds",
)

PADDED_DIMS = XlaWorkaround(
    "padded-dims",
    "",
    SpecifierSet(">=0.10.2"),
    "a pad between elements into a sharded dim fails to compile, and a negative pad returns wrong numbers",
    "plan/sharding/xla_workarounds",
)

SHARD_SCATTERS = XlaWorkaround(
    "shard-scatters",
    "",
    SpecifierSet(">=0.10.2,<0.12"),
    "a scatter into a shard of a replicated array writes values of other shards",
    "plan/sharding/xla_workarounds",
)

GROUPED_CONVOLUTIONS = XlaWorkaround(
    "grouped-convolutions",
    "",
    SpecifierSet(">=0.10.2"),
    "the gradient of a grouped convolution's kernel is summed over mesh axes that do not shard the batch",
    "plan/sharding/operands",
)

MANUAL_LOOKUPS = XlaWorkaround(
    "manual-lookups",
    "",
    SpecifierSet(">=0.10.2"),
    "a lookup in a sharded table inside a shard_map over another mesh axis aborts the process",
    "step/replay/sharded_lookup",
)

EXTENDED_OPERANDS = XlaWorkaround(
    "extended-operands",
    "",
    SpecifierSet(">=0.12"),
    "a matmul of an operand whose sharding the compiler extended from that of its sum aborts the process",
    "plan/sharding/xla_workarounds",
)

CPU_TRANSPOSES = XlaWorkaround(
    "cpu-transposes",
    "cpu",
    SpecifierSet(">=0.10.2"),
    "a contraction over two dims writes a transposed copy of an operand",
    "step/replay/replay",
)

CPU_COLLECTIVES = XlaWorkaround(
    "cpu-collectives",
    "cpu",
    SpecifierSet(">=0.10.2"),
    "collectives of simulated devices deadlock where steps are dispatched without waiting for them",
    "train/run",
)

WORKAROUNDS = (
    RESIZED_DIMS,
    PADDED_DIMS,
    SHARD_SCATTERS,
    GROUPED_CONVOLUTIONS,
    MANUAL_LOOKUPS,
    EXTENDED_OPERANDS,
    CPU_TRANSPOSES,
    CPU_COLLECTIVES,
)

RESIZES = frozenset({Family.RESIZE, Family.DYNAMIC_SLICE})
"""Operations that resize dims of their operands."""

SCATTERS = frozenset({Family.SCATTER, Family.SCATTER_ADD})
"""Operations that write elements of their first operand at indices."""

Placed = tuple[tuple[Constraint | None, ...], tuple[Constraint | None, ...]]


def resized(graph: Graph, op: Op, placed: Sequence[Constraint | None]) -> Placed | None:
    """Returns the constraints of the operands and results of an operation that resizes a dim (`RESIZED_DIMS`).

    None for other operations. An operand is replicated along a resized dim unless all operands and results are sharded
    equally along it: 7 of 8 elements do not divide. Shards of a padded axis are not shards of the axis.

    Args:
      graph: the program.
      op: an operation.
      placed: the constraints of its operands, then those of its results.
    """
    if op.family not in RESIZES:
        return None
    num_operands = len(op.inputs)
    rank = len(graph.shape(op.outputs[0]))  # operands of another rank are the padding value or start indices
    arrays = [index for index, value in enumerate((*op.inputs, *op.outputs)) if len(graph.shape(value)) == rank]
    shapes = [graph.shape((*op.inputs, *op.outputs)[index]) for index in arrays]
    closed = [placed[index] or Constraint(((),) * len(shape)) for index, shape in zip(arrays, shapes, strict=True)]
    dims = [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len({*sizes}) > 1]
    if not is_padding(op):
        dims = [dim for dim in dims if len({constraint.spec[dim] for constraint in closed}) > 1]
    if not dims:
        return None
    constraints: list[Constraint | None] = [None] * len(placed)
    for index, constraint in zip(arrays, closed, strict=True):
        constraints[index] = _replicated(constraint, dims if index < num_operands else ())
    return tuple(constraints[:num_operands]), tuple(constraints[num_operands:])


def padded(op: Op, operand: Constraint | None, result: Constraint | None) -> Placed | None:
    """Returns constraints that replicate a pad along the dims that it dilates or cuts (`PADDED_DIMS`); else None."""
    config = op.params.get("padding_config", ())
    dims = [dim for dim, (low, high, between) in enumerate(config) if between or low < 0 or high < 0]
    constraints = [constraint for constraint in (operand, result) if constraint is not None]
    if not any(constraint.spec[dim] or constraint.computed[dim] for constraint in constraints for dim in dims):
        return None
    operand, result = (
        None if each is None else _replicated(Constraint(each.computed), dims) for each in (operand, result)
    )
    return (operand, None), (result,)


def writes_shards(op: Op, operand: Constraint | None) -> bool:
    """Returns whether a scatter writes along a sharded dim of its operand (`SHARD_SCATTERS`).

    Each device scatters into its own shard; indices into other shards are out of bounds there. Where the shard is a
    slice of an operand that was computed replicated, XLA's simplifier reads the replicated form at these indices, and
    the scatter writes that into the shard. An optimization barrier keeps the two apart.
    """
    return operand is not None and any(operand.spec[dim] for dim in op.indexed)


def is_extended(graph: Graph, value: int, constraints: Sequence[Constraint | None]) -> bool:
    """Returns whether a sum of a value is sharded over further mesh axes than the value (`EXTENDED_OPERANDS`).

    Without a constraint of its own, the value would be sharded over these axes, too, such as the gradient of an
    activation over those of the bias. XLA aborts on some matmuls that read it.
    """
    axes = _axes(constraints[value])
    sums = (op.outputs[0] for op in graph.readers.get(value, ()) if op.family is Family.REDUCTION)
    return any(not _axes(constraints[result]) <= axes for result in sums)


def _axes(constraint: Constraint | None) -> frozenset[str]:
    return frozenset() if constraint is None else frozenset().union(*constraint.spec)


def _replicated(constraint: Constraint, dims: Collection[int]) -> Constraint:
    return Constraint(tuple(() if dim in dims else axes for dim, axes in enumerate(constraint.spec)))
