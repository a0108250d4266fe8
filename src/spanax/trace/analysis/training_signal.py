"""Finds parameters that a step cannot train: no gradient, or no dependence on the batch.

All findings follow from the graph: which values depend on which inputs, and which are zero for all inputs.
"""

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from jax.extend import source_info_util

from spanax.trace.analysis.step_analysis import StepAnalysis
from spanax.trace.jaxpr.graph import GRADIENT, Graph
from spanax.trace.jaxpr.linear import zeros
from spanax.trace.jaxpr.provenance import Origin, feeds, origins
from spanax.trace.variables import Leaf

DRAWS = frozenset({"random_bits", "random_gamma", "rng_bit_generator", "threefry2x32"})
"""Operations that draw random numbers from a key; the last draws for the examples of a microbatch."""


class Flaw(Enum):
    """A reason why a step cannot train."""

    NO_GRADIENT = "every gradient is zero"
    NO_GRADIENT_IN_PART = "the loss uses parameters that get no gradient"
    UNUSED = "the loss does not use parameters"
    NO_BATCH = "the loss does not depend on the batch"
    SAME_NUMBERS = "every step draws the same random numbers"


class Problem(NamedTuple):
    """A flaw with the first affected parameter, a message, and a fix."""

    flaw: Flaw
    path: str
    message: str
    fix: str


CERTAIN = frozenset(Flaw) - {Flaw.UNUSED}
"""Flaws that a run warns about; a head that the loss does not use is often intended."""


def flaws(step: StepAnalysis, leaves: Sequence[Leaf], *, has_loss: bool) -> list[Problem]:
    """Returns the flaws of a train step, most severe first.

    Args:
      step: the train step.
      leaves: the leaves of its state.
      has_loss: whether its result `loss` is what it differentiates; a user-defined `train_step` may return none.
    """
    sources = _sources(step.graph, len(leaves))
    loss = _loss(step)
    learned = [loss] if loss is not None and has_loss else _updated(step.graph, leaves)
    return [*_gradients(step.graph, leaves, loss), *_batch(sources, learned, loss), *_draws(step, sources)]


def _sources(graph: Graph, num_leaves: int) -> Sequence[int]:
    """Returns the origins of every value, with all state as `PARAM`; 0 for values computed from constants alone."""
    inputs = enumerate(graph.body.inputs)
    return origins(graph, {value: Origin.PARAM if index < num_leaves else Origin.BATCH for index, value in inputs})


def _loss(step: StepAnalysis) -> int | None:
    """Returns the value that the step returns as `loss`, or None."""
    results = step.traced.results
    loss = results.get("loss") if isinstance(results, dict) else None
    return loss if isinstance(loss, int) else None


def _updated(graph: Graph, leaves: Sequence[Leaf]) -> list[int]:
    """Returns the new values of the parameters that the step changes."""
    states = zip(leaves, graph.body.inputs, graph.body.outputs, strict=False)
    return [new for leaf, old, new in states if leaf.kind == "param" and new != old]


def _gradients(graph: Graph, leaves: Sequence[Leaf], loss: int | None) -> Iterator[Problem]:
    gradients = {mark.removeprefix(GRADIENT): value for mark, value in graph.marks.items() if mark.startswith(GRADIENT)}
    are_zeros = zeros(graph) if gradients else frozenset()
    cut = [path for path, value in gradients.items() if value in are_zeros]
    if not cut:
        return
    if len(cut) == len(gradients):
        yield Problem(
            Flaw.NO_GRADIENT,
            "",
            f"the gradient of the loss is zero for all {len(cut)} parameters: nothing is trained.",
            "Use a loss that is differentiable in the parameters (no argmax, rounding, comparison or stop_gradient).",
        )
        return
    feeding = feeds(graph, [value == loss for value in range(len(graph.avals))])
    inputs = {leaf.path: value for leaf, value in zip(leaves, graph.body.inputs, strict=False)}
    used = [path for path in cut if path in inputs and feeding[inputs[path]]]
    if used:
        yield Problem(
            Flaw.NO_GRADIENT_IN_PART,
            used[0],
            f"{_named(used)} no gradient: the loss uses them only through operations without one.",
            "Remove the stop_gradient, argmax or cast to integers, or leave them out of the optimizer's `wrt`.",
        )
    if unused := [path for path in cut if path not in used]:
        yield Problem(
            Flaw.UNUSED,
            unused[0],
            f"{_named(unused)} no gradient: the loss does not use them.",
            "Use them in the loss, remove them from the model, or leave them out of the optimizer's `wrt`.",
        )


def _batch(sources: Sequence[int], learned: Sequence[int], loss: int | None) -> Iterator[Problem]:
    if learned and not any(sources[value] & Origin.BATCH for value in learned):
        what = "the loss does" if learned == [loss] else "the updates of the parameters do"
        what = f"{what} not depend on the batch: every step trains on the same numbers."
        yield Problem(Flaw.NO_BATCH, "", what, "Compute the loss from the `batch` that the function gets.")


def _draws(step: StepAnalysis, sources: Sequence[int]) -> Iterator[Problem]:
    lines: dict[str, None] = {}
    for op in step.graph.ops():
        is_constant = op.name in DRAWS and not any(sources[value] for value in op.inputs)
        # Draws without a batch dim, such as fixed random features, are often intended to be constant.
        if is_constant and step.batch_labels.intersection(*map(step.axes.classes.__getitem__, op.outputs[:1])):
            lines[source_info_util.summarize(op.eqn.source_info)] = None
    if lines:
        # Draws inside JAX's cached functions have no line in the user's code.
        places = ", ".join([line for line in lines if line][:3])
        what = f"every step draws the same random numbers, from a key made of constants{': ' * bool(places)}{places}."
        fix = "Keep an nnx.Rngs in the model (self.rngs = rngs) and draw from it, instead of nnx.Rngs(0) in the loss."
        yield Problem(Flaw.SAME_NUMBERS, "", what, fix)


def _named(paths: Sequence[str]) -> str:
    """Returns "`up.bias` and 2 more parameters get"; the verb agrees with the number."""
    count = len(paths) - 1
    more = f" and {count} more parameter{'s' if count > 1 else ''} get" if count else " gets"
    return f"`{paths[0]}`{more}"
