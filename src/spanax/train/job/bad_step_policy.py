"""The policy of `spanax train` for steps whose loss, gradient norm or parameters are not finite, or a spike."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spanax.errors import NumbersError, WriteError
from spanax.step.guard import HALT, SKIP
from spanax.train.data.batches import Batches
from spanax.train.record.telemetry import Telemetry
from spanax.train.run import Run
from spanax.train.store.checkpoint import Pending

LOWER_RATE = "a lower --learning-rate"


@dataclass(eq=False)
class BadStepPolicy:
    """Halts, skips the step or rolls the run back after a bad step.

    Attributes:
      run: the run; its guard holds the policy and the patience.
      data: the training batches.
      restored: returns the run restored from its newest intact checkpoint, or its initial state if there is none.
      telemetry: receives the events.
    """

    run: Run
    data: Batches
    restored: Callable[[], Run]
    telemetry: Telemetry
    _saving: Pending | None = None
    _num_rollbacks: int = 0

    def handle(self, step: int, batch: int, values: Mapping[str, Any], reason: str) -> bool:
        """Applies the policy to a bad step, and returns whether the run was rolled back.

        Raises:
          NumbersError: the policy is to halt, or there were more bad steps than `patience`.
        """
        assert self.run.guard is not None
        policy = self.run.guard.policy
        patience = self.run.guard.patience
        numbers = {name: values[name] for name in self.run.guard.metrics if isinstance(values.get(name), float)}
        self._report("bad_step", step=step, batch=batch, reason=reason, policy=policy, **numbers)
        message = f"step {step} is bad: {reason}."
        if policy == HALT:
            fix = f"--resume with --on-bad-step rollback or skip, which both skip the batch; or {LOWER_RATE}"
            raise self._error(message, f"batch {batch} of {self.data.source}", fix)
        if policy == SKIP:
            num_bad = step - self.run.history.last_good_step
            if num_bad > patience:
                where = f"{num_bad} bad steps in a row, the last one on batch {batch} of {self.data.source}"
                raise self._error(message, where, f"{LOWER_RATE}, --on-bad-step rollback, or a higher --max-bad-steps")
            self._report("skipped", step=step, batch=batch)
            return False
        if self._num_rollbacks == patience:
            where = f"{patience} rollbacks and no checkpoint since; now batch {batch} of {self.data.source}"
            raise self._error(message, where, f"{LOWER_RATE}, --on-bad-step skip, or a higher --max-bad-steps")
        self._go_back(step, batch)
        return True

    def check_state(self) -> None:
        """Checks before a save that the state is finite.

        Raises:
          NumbersError: an array is not.
        """
        bad = [] if self.run.guard is None else self.run.unsound()
        if bad:
            listed = ", ".join(f"`{path}`" for path in bad[:3]) + (", ..." if len(bad) > 3 else "")
            message = f"the state after step {self.run.num_steps} is not finite, although its metrics are."
            where = f"{len(bad)} of {len(self.run.program.leaves)} arrays: {listed}; it is not saved"
            raise self._error(message, where, f"{LOWER_RATE}, or --on-bad-step ignore if a parameter may be infinite")

    def check_good(self, num_good: int, num_bad: int) -> None:
        """Checks that at least one step of a finished run was good.

        Raises:
          NumbersError: every step was skipped.
        """
        if num_bad and not num_good:
            message = f"all {num_bad} steps were bad and skipped; no parameter was trained."
            raise self._error(message, f"the state is that of step {self.run.num_steps - num_bad}", LOWER_RATE)

    def saved(self, saving: Pending) -> None:
        """Resets the number of rollbacks, because a new checkpoint is being written."""
        self._saving = saving
        self._num_rollbacks = 0

    def _error(self, message: str, where: str, fix: str) -> NumbersError:
        """Returns the error to raise, after waiting for a save in progress."""
        if self._saving is not None:
            with contextlib.suppress(WriteError):
                self._saving.wait()
        return NumbersError(message, where=where, fix=fix)

    def _go_back(self, step: int, batch: int) -> None:
        if self._saving is not None:
            with contextlib.suppress(WriteError):  # `Saves` reports it; an older step is then the newest
                self._saving.wait()  # all processes must restore the same step
        self._num_rollbacks += 1
        skipped = {*self.data.skipped, batch}
        start = {**self.data.state(), "next_index": 0, "mark": None}
        self.run.go_back(self.restored)
        self.data.restore(self.run.position or start)
        self.data.skip(*skipped)
        self._report("rolled_back", step=self.run.num_steps, from_step=step, batch=batch)

    def _report(self, event: str, **values: Any) -> None:
        self.telemetry.report({"event": event, **values})
