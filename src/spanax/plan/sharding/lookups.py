"""How a lookup in a table, or its gradient, is sharded: the strategies, and how many numbers each moves."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spanax.plan.sharding.resolve import Constraint, Spec, axes_of
from spanax.trace.analysis.step_analysis import StepAnalysis
from spanax.trace.jaxpr.dim_maps.relations import Family
from spanax.trace.jaxpr.dim_maps.table import names
from spanax.trace.jaxpr.graph import Op

LOOKUPS = names(Family.GATHER, Family.SCATTER_ADD)
"""Operations that read rows of a table, or add to them; their sharding also depends on the sizes of the mesh."""

Strategy = tuple[Spec, Spec, Any]
"""The specs of the table and of the rows, and how many numbers move per device."""


@dataclass(frozen=True)
class Lookup:
    """A lookup in a table, or its gradient, whose operands have to be resharded.

    Attributes:
      table: the table, or its gradient.
      indices: the indices of the rows.
      rows: the rows.
      columns: dims of the rows.
      looked_up: dims of the table.
      sharding: the constraint of the table.
      result: the constraint of the rows.
      moved: the mesh axes that shard the examples of the table, and another dim of the rows.
    """

    table: int
    indices: int
    rows: int
    columns: Sequence[int]
    looked_up: Sequence[int]
    sharding: Constraint
    result: Constraint
    moved: frozenset[str] = frozenset()

    @property
    def summed(self) -> set[str]:
        """The mesh axes that shard the rows of the table in computation: partial results are summed over them."""
        return {axis for dim in self.looked_up for axis in self.sharding.computed[dim]}


def lookup_of(op: Op, constraints: Sequence[Constraint | None], step: StepAnalysis) -> Lookup | None:
    """Returns the lookup of an operation; None for any other, and where each device has what its rows need."""
    if op.name not in LOOKUPS:
        return None
    numbers: Any = op.params["dimension_numbers"]
    if op.family is Family.GATHER:
        table, indices, rows = *op.inputs[:2], op.outputs[0]
        columns = numbers.offset_dims
    else:
        table, indices, rows = op.outputs[0], *op.inputs[1:3]
        columns = numbers.update_window_dims
    sharding = constraints[table]
    result = constraints[rows]
    if sharding is None or result is None:
        return None
    lookup = Lookup(table, indices, rows, columns, op.indexed, sharding, result)
    lookup = replace(lookup, moved=_moved(lookup, step))
    return None if sharding.used is None and not lookup.summed and not lookup.moved else lookup


def _moved(lookup: Lookup, step: StepAnalysis) -> frozenset[str]:
    """Returns the mesh axes that shard the examples of a table, and in its rows another dim, such as experts."""
    table = _of_examples(lookup.table, lookup.sharding, step)
    rows = _of_examples(lookup.rows, lookup.result, step)
    if lookup.sharding.used is not None or lookup.summed or len(table) != 1 or table.keys() != rows.keys():
        return frozenset()
    moved = axes_of([*table.values()]) - axes_of([*rows.values()])
    return frozenset(moved) if moved <= axes_of(lookup.result.spec) else frozenset()


def _of_examples(value: int, sharding: Constraint, step: StepAnalysis) -> dict[int | None, tuple[str, ...]]:
    """Returns the mesh axes that shard the examples of a value, by class."""
    pairs = zip(step.axes.classes[value], sharding.spec, strict=True)
    return {label: by for label, by in pairs if label in step.batch_labels}


def strategies(lookup: Lookup, step: StepAnalysis, ways: Callable[[Sequence[str]], Any]) -> list[Strategy]:
    """Returns the strategies of a lookup, with how many numbers move per device.

    Computed: the table has its computed sharding; if that shards its rows, the devices of those shards receive the same
    indices, and their partial results are summed. Replicated: every device gathers the table. Stored: each device
    looks up its stored columns for the indices of all devices with other columns of the same rows, and the result
    moves instead. Of examples that move, the rows do, or the tables: XLA would gather those of all devices.

    Args:
      lookup: the lookup.
      step: the traced function.
      ways: returns the number of shards over mesh axes: of one mesh, or an array for meshes with several devices along
        the same axes.
    """
    shape = step.graph.shape
    classes = step.axes.classes
    summed = lookup.summed
    used = lookup.sharding.computed
    stored = lookup.sharding.spec
    result = lookup.result.spec
    is_stored = lookup.sharding.used is not None
    row_size = math.prod(shape(lookup.rows))
    table_size = math.prod(shape(lookup.table))
    if lookup.moved:
        examples = _of_examples(lookup.table, lookup.sharding, step)
        rest = without(result, lookup.moved)
        rows = tuple(examples.get(label, by) for label, by in zip(classes[lookup.rows], rest, strict=True))
        gathered = without(stored, lookup.moved)
        sent = row_size / ways([*axes_of(rows)])
        return [(stored, rows, sent), (gathered, result, table_size / ways([*axes_of(gathered)]))]
    is_summed = ways([*summed]) > 1
    computed = without(result, summed)
    sums = is_summed * (1 + (computed != result)) * row_size / ways([*axes_of(computed)])
    tables = 2 * table_size / ways([*axes_of(used)]) if is_stored else 0
    candidates: list[Strategy] = [(used, computed, tables + sums)]
    if not step.batch_labels.intersection(classes[lookup.table]):
        candidates.append((((),) * len(used), result, 2 * table_size))
    else:  # a table per example: resharded as its rows are, or gathered
        free_spec = without(used, axes_of(result) | summed)
        row_axes = dict(zip(classes[lookup.rows], result, strict=True))
        as_rows = step.batch_labels & row_axes.keys()
        by_dim = [
            row_axes[label] if label in as_rows else by
            for label, by in zip(classes[lookup.table], free_spec, strict=True)
        ]
        local_spec = tuple(() if dim in lookup.looked_up else by for dim, by in enumerate(by_dim))
        candidates.append((local_spec, result, table_size / ways([*axes_of(local_spec)])))
    by_label = dict(zip(classes[lookup.table], stored, strict=True))
    columns = {dim: by_label.get(classes[lookup.rows][dim], ()) for dim in lookup.columns}
    parts = axes_of([*columns.values()])
    if is_stored and np.all(ways([*parts]) > 1):
        # Axes that shard the batch and no column stay: only devices with the same shard of the batch communicate.
        batch_spec = without(result, parts | summed)
        rows = tuple(columns.get(dim, by) for dim, by in enumerate(batch_spec))
        batch = axes_of(batch_spec) - parts
        moved = (2 + is_summed) * row_size / ways([*parts, *batch])
        candidates.append((stored, rows, moved + (ways([*batch]) > 1) * table_size / ways([*parts])))
    return candidates


def exchanged_first(used: Spec, local: Spec) -> Constraint | None:
    """Returns the sharding of a table between its own and that of its rows, if axes move between its dims.

    Axes that its rows do not have stay in place meanwhile. If they changed at once, XLA would exchange the gathered
    table, or exchange sums over devices twice.
    """
    remaining = axes_of(used) - axes_of(local)
    spec = tuple((*by, *(axis for axis in use if axis in remaining)) for by, use in zip(local, used, strict=True))
    changed = {axis for by, use in zip(local, used, strict=True) for axis in use if axis not in by}
    return Constraint(spec) if remaining and changed != remaining else None


def without(spec: Spec, axes: Collection[str]) -> Spec:
    """Returns a spec without some mesh axes."""
    return tuple(tuple(axis for axis in by if axis not in axes) for by in spec)
