"""Marks: names for values of a traced program. A graph records and removes them, at no cost."""

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

NAME = "name"
PREFIX = "spanax:"
GRADIENT = "gradient:"
METRIC = "metric:"

LOSS_CHUNKS = "spanax_loss_chunks"
"""Name of the scan of a chunked loss in the name stack, and of its gradients in remat policies."""

LAYER_PARTS = "spanax_layer_parts"
"""Name of the operations that partition arrays stacked along layers, or concatenate their parts, in the name stack."""

PADDING = "spanax_padding"
"""Name of the operations that pad a dim of an uneven axis, or cut it, in the name stack."""


def marked(value: Any, mark: str) -> Any:
    """Returns the same value; `Graph.marks` records it under its mark.

    Example:
      >>> from spanax.trace.jaxpr.graph import from_jaxpr
      >>> graph = from_jaxpr(jax.make_jaxpr(lambda x: marked(2 * x, "double") + 1)(1.0))
      >>> [op.name for op in graph.ops()], list(graph.marks)
      (['mul', 'add'], ['double'])
    """
    return checkpoint_name(value, PREFIX + mark)


def marked_gradients(gradients: Any) -> Any:
    """Returns the gradients, each marked with the path of its parameter."""

    def mark(path: Any, gradient: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        return marked(gradient, GRADIENT + name)

    return jax.tree_util.tree_map_with_path(mark, gradients)


def mark_of(eqn: Any) -> str | None:
    """Returns the mark that an equation sets on its operand; None for other equations."""
    name = eqn.params.get("name") if eqn.primitive.name == NAME else None
    return name.removeprefix(PREFIX) if isinstance(name, str) and name.startswith(PREFIX) else None
