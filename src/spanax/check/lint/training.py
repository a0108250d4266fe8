"""Lint rules on the training signal: gradients, use of the batch, and random numbers."""

from collections.abc import Iterator

from spanax.check.lint.message import Message
from spanax.check.lint.subject import LintSubject
from spanax.trace.analysis.training_signal import Flaw


def no_gradient(subject: LintSubject) -> Iterator[Message]:
    """Every gradient is zero: the loss is constant, or computed from comparisons or integers."""
    yield from _messages(subject, Flaw.NO_GRADIENT)


def partial_gradient(subject: LintSubject) -> Iterator[Message]:
    """The loss uses parameters whose gradient is zero, because of a stop_gradient, an argmax, or an integer cast."""
    yield from _messages(subject, Flaw.NO_GRADIENT_IN_PART)


def batch_ignored(subject: LintSubject) -> Iterator[Message]:
    """The loss, or the update of the parameters, does not depend on the batch."""
    yield from _messages(subject, Flaw.NO_BATCH)


def constant_random_key(subject: LintSubject) -> Iterator[Message]:
    """Random numbers for the examples come from a constant key, such as an nnx.Rngs(0) created in the loss."""
    yield from _messages(subject, Flaw.SAME_NUMBERS)


def unused_parameters(subject: LintSubject) -> Iterator[Message]:
    """The optimizer updates parameters that the loss does not use."""
    yield from _messages(subject, Flaw.UNUSED)


def _messages(subject: LintSubject, flaw: Flaw) -> Iterator[Message]:
    for problem in subject.flaws:
        if problem.flaw is flaw:
            yield Message(problem.path, problem.message, problem.fix.rstrip("."))
