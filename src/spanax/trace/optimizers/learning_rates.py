"""Reports the values of schedules, such as the learning rate, as metrics of the step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from spanax.trace.jaxpr.graph import Graph
from spanax.trace.jaxpr.marks import METRIC, marked
from spanax.trace.variables import Leaf

LEARNING_RATE = "learning_rate"
INJECTED = f"hyperparams.{LEARNING_RATE}"
"""The path of the learning rate in the state of `optax.inject_hyperparams`."""


def logged(schedule: Callable[[Any], Any], name: str = LEARNING_RATE) -> Callable[[Any], Any]:
    """Returns the same schedule; every step logs its value as a metric.

    A schedule called inside a loop or a branch (`optax.MultiSteps`) is not logged.

    Args:
      schedule: an optax schedule, a function from a count of updates to a number.
      name: the name of the metric.

    Example:
      >>> import numpy as np, optax, spanax
      >>> from flax import nnx
      >>> batch = np.ones((8, 4), "float32")
      >>> program = spanax.trace(
      ...     build=lambda rngs: nnx.Linear(4, 2, rngs=rngs),
      ...     optimizer=optax.adamw(spanax.logged(optax.linear_schedule(0.5, 0.0, 4))),
      ...     batch=batch,
      ...     loss=lambda model, x: (model(x) ** 2).mean(),
      ... )
      >>> run = spanax.start(program, spanax.plan(program, spanax.cluster("cpu:8"), layout="data"))
      >>> [float(run.step(batch)["learning_rate"]) for _ in range(2)]
      [0.5, 0.375]
    """
    return lambda count: marked(jnp.asarray(schedule(count)), METRIC + name)


def injected_rate(leaves: Sequence[Leaf], values: Sequence[Any]) -> dict[str, Any]:
    """Returns the learning rate of `optax.inject_hyperparams` as a metric; empty unless the state has exactly one."""
    rates = [value for leaf, value in zip(leaves, values, strict=True) if leaf.path.endswith(INJECTED)]
    return {LEARNING_RATE: rates[0]} if len(rates) == 1 else {}


def with_logged(graph: Graph, num_state: int, result: Any) -> tuple[Graph, Any]:
    """Returns the graph with the values of logged schedules as results, and the structure of its results.

    Args:
      graph: the graph of a step.
      num_state: the number of outputs that are the new state.
      result: the structure of the other outputs.
    """
    known = {*graph.body.inputs, *graph.constants, *(value for op in graph.body.ops for value in op.outputs)}
    marks = {mark.removeprefix(METRIC): value for mark, value in graph.marks.items() if mark.startswith(METRIC)}
    logged_values = {name: value for name, value in marks.items() if value in known}
    metrics = jax.tree.unflatten(result, graph.body.outputs[num_state:])
    if not logged_values or not isinstance(metrics, Mapping):
        return graph, result
    outputs, result = jax.tree.flatten(logged_values | dict(metrics))
    body = replace(graph.body, outputs=(*graph.body.outputs[:num_state], *outputs))
    return replace(graph, body=body), result
