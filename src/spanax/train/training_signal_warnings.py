"""Warnings at the first step about parameters that do not train."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from spanax.trace.analysis.training_signal import CERTAIN, Flaw, flaws
from spanax.trace.program import Program

GRAD_NORM = "grad_norm"


def warn_user(line: str) -> None:
    """Issues a Python warning at the line that called `run.step`."""
    warnings.warn(line, stacklevel=6)


@dataclass(eq=False)
class FirstStep:
    """Warns after the first step of a run about flaws of its program and about a gradient of zero."""

    _is_over: bool = False
    _norm: Any = None
    _step: int = 0

    def take(self, program: Program, step: int, metrics: Mapping[str, Any], warn: Callable[[str], None]) -> None:
        """Checks the metrics of the first step as soon as they are computed; called after each step."""
        if self._is_over:
            return
        if self._norm is None:
            problems = flaws(program.step, program.leaves, has_loss=program.has_evaluation)
            for problem in problems:
                if problem.flaw in CERTAIN:
                    warn(f"{problem.message} {problem.fix}")
            self._norm = metrics.get(GRAD_NORM)
            self._step = step
            is_known = any(problem.flaw is Flaw.NO_GRADIENT for problem in problems)
            self._is_over = is_known or not isinstance(self._norm, jax.Array)
        if not self._is_over and self._norm.is_ready():
            self._is_over = True
            if np.asarray(self._norm).flat[0] == 0:
                warn(
                    f"the gradient norm of step {self._step} is 0, so no parameter is trained. Check the loss for dead "
                    "units, masks that are all zero, and weights that are zero."
                )
