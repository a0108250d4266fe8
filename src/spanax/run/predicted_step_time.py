"""Pricing: what a run is expected to take, worked out beside its first steps.

A report holds the run against it; the run itself can do without, and does not wait for it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from spanax.errors import first_line
from spanax.hardware.cluster import local
from spanax.plan.evaluate import evaluate
from spanax.plan.plan import Plan
from spanax.trace.program import Program


@dataclass(eq=False)
class StepTimePrediction:
    """A plan that gets its price in time.

    Attributes:
      program: what the plan was made for.
      plan: the plan, with its price as soon as that is known.
      devices: what it runs on.
    """

    program: Program
    plan: Plan
    devices: list[Any]

    def find(self, write: Callable[[str], None], warn: Callable[[str], None]) -> None:
        """Work it out and write the plan anew, as JSON; a failure is no more than a warning."""
        try:
            cost = evaluate(self.program, self.plan, local(self.devices[: self.plan.mesh.size]))
            self.plan = replace(self.plan, price=cost.prediction)
            write(self.plan.to_json())
        except Exception as error:
            warn(f"the plan has no price: {first_line(error)}")
