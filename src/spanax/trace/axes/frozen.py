"""Finds frozen weights: arrays that are not parameters but act as weights (a quantized base under LoRA)."""

from collections.abc import Sequence

from spanax.trace.jaxpr.graph import CONTRACTIONS, Graph
from spanax.trace.jaxpr.provenance import Origin, feeds, origins
from spanax.trace.variables import Leaf


def frozen(graph: Graph, leaves: Sequence[Leaf]) -> frozenset[int]:
    """Returns the inputs in other state that are weights: 2D or larger, and factors of products with activations.

    Example:
      >>> import jax, numpy as np
      >>> from spanax.trace.jaxpr.graph import from_jaxpr
      >>> shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 4), (16, 4), (16, 8))]
      >>> graph = from_jaxpr(jax.make_jaxpr(lambda base, mask, x: x @ (2 * base) + mask)(*shapes))
      >>> base, mask = (Leaf(name, (8, 4), np.dtype("float32"), "other") for name in ("base", "mask"))
      >>> frozen(graph, [base, mask]) == {graph.body.inputs[0]}
      True
    """
    pairs = list(zip(graph.body.inputs, leaves, strict=False))
    candidates = [value for value, leaf in pairs if leaf.kind == "other" and sum(size > 1 for size in leaf.shape) > 1]
    if not candidates:
        return frozenset()
    of_batch = origins(graph, {value: Origin.BATCH for value in graph.body.inputs[len(leaves) :]})
    targets = [False] * len(graph.avals)
    for op in graph.ops():
        if op.name in CONTRACTIONS and of_batch[op.inputs[0]] != of_batch[op.inputs[1]]:
            for value in op.inputs[:2]:
                targets[value] = not of_batch[value]
    feeding = feeds(graph, targets)
    return frozenset(value for value in candidates if feeding[value] or targets[value])
