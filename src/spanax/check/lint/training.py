"""Rules on what a step learns from: gradients, the batch, and random numbers."""

from collections.abc import Iterator

from spanax.check.lint.message import Message
from spanax.check.lint.subject import LintSubject
from spanax.trace.analysis.training_signal import Flaw


def no_gradient(checked: LintSubject) -> Iterator[Message]:
    """Every gradient is zero: the loss is constant, or made of comparisons and integers."""
    yield from _of(checked, Flaw.NO_GRADIENT)


def no_gradient_in_part(checked: LintSubject) -> Iterator[Message]:
    """The loss uses parameters whose gradient is zero: a stop_gradient, an argmax or a cast to integers cuts it off."""
    yield from _of(checked, Flaw.NO_GRADIENT_IN_PART)


def batch_ignored(checked: LintSubject) -> Iterator[Message]:
    """The loss, or what a train step makes of the parameters, does not depend on the batch."""
    yield from _of(checked, Flaw.NO_BATCH)


def same_random_numbers(checked: LintSubject) -> Iterator[Message]:
    """Random numbers for each example come from a key made of constants, such as an nnx.Rngs(0) created in the loss."""
    yield from _of(checked, Flaw.SAME_NUMBERS)


def unused_parameters(checked: LintSubject) -> Iterator[Message]:
    """The loss does not use parameters that the optimizer updates."""
    yield from _of(checked, Flaw.UNUSED)


def _of(checked: LintSubject, flaw: Flaw) -> Iterator[Message]:
    for problem in checked.flaws:
        if problem.flaw is flaw:
            yield Message(problem.path, problem.message, problem.fix.rstrip("."))
