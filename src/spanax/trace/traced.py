"""A traced function: its graph, its axes and the structure of its results."""

from dataclasses import dataclass
from typing import Any

import jax

from spanax.trace.axes.axes import Axes
from spanax.trace.jaxpr.graph import Graph


@dataclass(frozen=True, eq=False)
class Traced:
    """A traced function of (state, batch) with its axes: the train step, or the evaluation."""

    graph: Graph
    axes: Axes
    result: Any
    has_remat: bool = False

    @property
    def num_results(self) -> int:
        """Returns the number of outputs after the new state."""
        return self.result.num_leaves

    @property
    def num_state(self) -> int:
        """Returns the number of outputs that are the new state; the others are results."""
        return len(self.graph.body.outputs) - self.num_results

    @property
    def results(self) -> Any:
        """Returns the values after the new state, in their structure."""
        return jax.tree.unflatten(self.result, self.graph.body.outputs[self.num_state :])
