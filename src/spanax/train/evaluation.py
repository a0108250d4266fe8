"""Evaluation of batches with fewer examples than the traced batch, and means of metrics over batches."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from spanax.batch_dims import num_if_fewer
from spanax.plan.plan import Plan
from spanax.step.pipeline.layer_order import LayerOrder
from spanax.step.placement import to_device
from spanax.trace.program import Program


class Means:
    """Means of metrics over batches, each batch weighted by its number of examples.

    Example:
      >>> means = Means()
      >>> means.add({"loss": 1.0, "by_class": np.array([1.0, 0.0])}, 3)
      >>> means.add({"loss": 3.0, "by_class": np.array([0.0, 4.0])}, 1)
      >>> means.values(), means.num_examples
      ({'by_class': [0.75, 1.0], 'loss': 1.5}, 4)
    """

    def __init__(self) -> None:
        self.num_examples = 0
        self._sums: dict[str, np.ndarray] = {}

    def add(self, metrics: Any, num_examples: int) -> None:
        """Adds the metrics of a batch, a pytree as returned by the loss."""
        for name, value in by_name(metrics).items():
            weighted = np.asarray(value, np.float64) * num_examples
            self._sums[name] = self._sums[name] + weighted if name in self._sums else weighted
        self.num_examples += num_examples

    def values(self) -> dict[str, Any]:
        """Returns the mean of each metric by dotted name."""
        return {name: (total / self.num_examples).tolist() for name, total in self._sums.items()}


def by_name(metrics: Any) -> dict[str, Any]:
    """Returns metrics by dotted name, in the order of `jax.tree.flatten`.

    Example:
      >>> by_name({"loss": 2.0, "error": {"mean": 1.0}})
      {'error.mean': 1.0, 'loss': 2.0}
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(metrics)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def num_fewer(program: Program, batch: Any) -> int:
    """Returns the number of examples of a batch that differs from the traced one only in being smaller; else 0."""
    leaves, treedef = jax.tree.flatten(batch)
    if treedef != program.batch_treedef:
        return 0
    return num_if_fewer(
        [np.shape(leaf) for leaf in leaves], [leaf.shape for leaf in program.batch], program.step.axes.examples
    )


def unplanned_evaluation(
    program: Program, plan: Plan, mesh: jax.sharding.Mesh, rows: LayerOrder | None, batch: Sequence[Any]
) -> Any:
    """Returns a jitted function from a state and a batch to the metrics of the user's `evaluate`, or of the loss.

    The shardings of intermediate values are left to XLA; `batch` are those of the batch, which may be smaller.
    """
    run = program.run_evaluate or program.run_loss
    assert run is not None
    state = [placement.sharding(mesh) for placement in plan.leaves]
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def evaluate(values: Sequence[Any], batch: Sequence[Any]) -> Any:
        values = to_device(values, state)
        values = values if rows is None else rows.to_layers(values)
        with nnx.use_eager_sharding(False):
            return run(values, jax.tree.unflatten(program.batch_treedef, batch))[1]

    return jax.jit(evaluate, in_shardings=(state, list(batch)), out_shardings=replicated)


def smaller_evaluation(
    program: Program, plan: Plan, mesh: jax.sharding.Mesh, rows: LayerOrder | None, count: int
) -> Callable[[Sequence[Any], Any], dict[str, Any]]:
    """Returns a function from a state and a batch of `count` examples to the metrics of an evaluation.

    The examples are sharded as planned if `count` is divisible by the number of shards, and replicated otherwise.
    """
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    dims = zip(plan.batch, program.step.axes.examples, strict=True)
    ways = math.lcm(*(plan.mesh.ways(placement.spec[dim]) for placement, dim in dims if dim is not None))
    is_sharded = count % ways == 0 and jax.process_count() == 1
    batch = [placement.sharding(mesh) if is_sharded else replicated for placement in plan.batch]
    compiled = unplanned_evaluation(program, plan, mesh, rows, batch)
    return lambda values, arrays: compiled(values, _placed(program, batch, arrays))


def _placed(program: Program, shardings: Sequence[jax.sharding.NamedSharding], batch: Any) -> list[jax.Array]:
    """Returns the arrays of a smaller batch on the devices; each process passes all of its examples."""

    def place(array: Any, dtype: Any, sharding: jax.sharding.NamedSharding) -> jax.Array:
        if isinstance(array, jax.Array):
            return jax.device_put(array, sharding)
        values = np.asarray(array, dtype)
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    groups = zip(jax.tree.leaves(batch), program.batch, shardings, strict=True)
    return [place(array, leaf.dtype, sharding) for array, leaf, sharding in groups]
