"""Remedy: what `spanax train` does about a step whose numbers are bad."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spanax.errors import NumbersError, WriteError
from spanax.run.data.batches import Batches
from spanax.run.run import Run
from spanax.run.step.guard import HALT, SKIP, WATCHED
from spanax.run.store.checkpoint import Pending

CURE = "a lower --lr"


@dataclass(eq=False)
class BadStepPolicy:
    """What follows on bad steps of a run.

    Attributes:
      begin: the run as a resume would have it: its newest good checkpoint, or the state it was born with.
      tell: takes events for the metrics.
      record: takes the same by name and values, for events.jsonl.
    """

    run: Run
    data: Batches
    begin: Callable[[], Run]
    tell: Callable[[dict[str, Any]], None]
    record: Callable[..., None]
    _saving: Pending | None = None
    _num_rollbacks: int = 0

    def treat(self, step: int, batch: int, values: Mapping[str, Any], reason: str) -> bool:
        """Do what the policy says about a bad step, and say whether the run went back.

        Args:
          step: its number.
          batch: the index of its batch.
          values: what it returned.
          reason: why it is bad.

        Raises:
          NumbersError: the policy is to halt, or patience is at an end.
        """
        assert self.run.guard is not None
        policy, patience = self.run.guard.policy, self.run.guard.patience
        numbers = {name: values[name] for name in WATCHED if isinstance(values.get(name), float)}
        self._say("bad_step", step=step, batch=batch, reason=reason, policy=policy, **numbers)
        what = f"step {step} went wrong: {reason}."
        if policy == HALT:
            cures = f"--resume with --on-bad-step rollback or skip, which leave the batch out; or {CURE}"
            raise self._end(what, f"batch {batch} of {self.data.source}", cures)
        if policy == SKIP:
            num_bad = step - self.run.history.last_good_step
            if num_bad > patience:
                where = f"{num_bad} bad steps in a row, the last one on batch {batch} of {self.data.source}"
                raise self._end(what, where, f"{CURE}, --on-bad-step rollback, or a higher --patience")
            self._say("skipped", step=step, batch=batch)
            return False
        if self._num_rollbacks == patience:
            where = f"{patience} rollbacks and no checkpoint since; now batch {batch} of {self.data.source}"
            raise self._end(what, where, f"{CURE}, --on-bad-step skip, or a higher --patience")
        self._go_back(step, batch)
        return True

    def check_state(self) -> None:
        """Hold the state itself against being finite, before it is saved.

        Raises:
          NumbersError: something in it is not.
        """
        bad = [] if self.run.guard is None else self.run.unsound()
        if bad:
            listed = ", ".join(f"`{path}`" for path in bad[:3]) + (", ..." if len(bad) > 3 else "")
            what = f"the state after step {self.run.num_steps} is not finite, though all it returned was."
            where = f"{len(bad)} of {len(self.run.program.leaves)} arrays: {listed}; it is not saved"
            raise self._end(what, where, f"{CURE}, or --on-bad-step ignore where an infinite parameter is meant")

    def check_good(self, num_good: int, num_bad: int) -> None:
        """Check that at least one step of a finished run was good.

        Raises:
          NumbersError: every step was skipped.
        """
        if num_bad and not num_good:
            what = f"all {num_bad} steps went wrong and were skipped: nothing was trained."
            raise self._end(what, f"the state is that of step {self.run.num_steps - num_bad}", CURE)

    def saved(self, saving: Pending) -> None:
        """A checkpoint is being written: the run has got on."""
        self._saving, self._num_rollbacks = saving, 0

    def _end(self, what: str, where: str, fix: str) -> NumbersError:
        """The error to end with, once the good step that may still be on its way to the disk is there."""
        if self._saving is not None:
            with contextlib.suppress(WriteError):
                self._saving.wait()
        return NumbersError(what, where=where, fix=fix)

    def _go_back(self, step: int, batch: int) -> None:
        if self._saving is not None:
            with contextlib.suppress(WriteError):  # told of where it was begun; then an older step is the newest
                self._saving.wait()  # all processes must find the same step the newest
        self._num_rollbacks += 1
        left_out = {*self.data.skipped, batch}
        start = {**self.data.state(), "next_index": 0, "mark": None}
        self.run.go_back(self.begin)
        self.data.restore(self.run.position or start)
        self.data.skip(*left_out)
        self._say("rolled_back", step=self.run.num_steps, from_step=step, batch=batch)

    def _say(self, event: str, **values: Any) -> None:
        self.tell({"event": event, **values})
        self.record(event, **values)
