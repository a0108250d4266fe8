"""The loop of a run: steps, evaluations and checkpoints, and what is measured of them."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spanax.errors import DataError
from spanax.run.bad_step_policy import BadStepPolicy
from spanax.run.config import TrainConfig
from spanax.run.data.batches import Batches
from spanax.run.data.text.bigram import bigram_loss
from spanax.run.evaluation import Means, by_name, num_fewer
from spanax.run.profile import INPUT, STEP, Profile, marked
from spanax.run.record.heartbeat import Pulse
from spanax.run.record.time_ledger import Ledger
from spanax.run.run import Run
from spanax.run.state.saves import Saves
from spanax.run.step.guard import STEP_OK
from spanax.trace.program import Program

Event = dict[str, Any]

MAX_BIGRAM_TOKENS = 1 << 25
"""A bigram is fitted on so many tokens at most; more would take longer than the evaluation itself."""


@dataclass(frozen=True)
class Call:
    """Steps that the devices were given at once.

    Attributes:
      first: the number of the first.
      batches: the index of the batch of each.
      metrics: what they returned: stacked, where they are several.
      is_new: whether the call waited for its program to be compiled.
    """

    first: int
    batches: tuple[int, ...]
    metrics: dict[str, Any]
    is_new: bool


@dataclass(eq=False)
class Loop:
    """The steps of one run that are left.

    Attributes:
      held_out: opens the held-out batches, or returns None where there are none.
      saves: its checkpoints.
      tell: takes every event.
      remedy: what is done about bad steps.
      is_over: says whether to stop, the same on every process, when asked for the first, second, ... time.
      pulse: gives the sign of life of this process.
      ledger: accounts for its wall time.
      profile: traces some of the steps.
    """

    run: Run
    data: Batches
    held_out: Callable[[], Batches | None]
    config: TrainConfig
    saves: Saves
    tell: Callable[[Event], None]
    remedy: BadStepPolicy
    is_over: Callable[[int], bool]
    pulse: Pulse
    ledger: Ledger
    profile: Profile | None = None
    _seconds: list[float] = field(default_factory=list)
    _compiling: list[float] = field(default_factory=list)
    _ready: list[tuple[int, Any]] = field(default_factory=list)
    _sizes: set[int] = field(default_factory=set)
    _num_asked: int = 0
    _loss: float | None = None
    _num_good: int = 0
    _num_bad: int = 0
    _evaluated: Event = field(default_factory=dict)
    _clock: float = 0.0

    def run_to_end(self) -> Event:
        """Take the steps that are left, evaluate and save when due; return the `done` or the `preempted` event."""
        steps = self.config.steps or 0
        self.run.warn = lambda line: self.tell({"event": "warning", "message": line})
        if self.profile is not None:
            self.profile.prepare(self.run)
        began = self._clock = time.perf_counter()
        waited = self.data.wait_seconds
        # Metrics are fetched once the next call is under way, so that the devices never wait for them.
        behind: deque[Call] = deque()
        while self.run.num_steps < steps:
            if self.profile is not None:
                self.profile.before(self.run)
            behind.append(self._call())
            step = self.run.num_steps
            evaluates, saves = (
                _is_due(step, self.config.eval_every, steps),
                _is_due(step, self.config.save_every, steps),
            )
            is_gone = self._reported(behind, 0 if self.run.is_simulated or evaluates or saves else 1)
            if self.profile is not None:
                self.profile.after(self.run)
            if is_gone:
                continue
            if evaluates:
                self._evaluate()
            if saves:
                self._save()
            if evaluates or saves:
                self._clock = time.perf_counter()
            if self.run.num_steps < steps and self._is_over():
                # Where the last step turns out bad, the run is back at a checkpoint, and there is nothing to save.
                self._reported(behind, 0)
                return self._preempted()
        self.remedy.check_good(self._num_good, self._num_bad)
        if not self._evaluated:
            self._evaluate()
        self._finish_saving()
        spent, wait = time.perf_counter() - began, self.data.wait_seconds - waited
        taken = self._seconds or self._compiling
        median = statistics.median(taken or [math.nan])
        return {
            "event": "done",
            "steps": self.run.num_steps,
            "train_loss": self._loss,
            "val_loss": self._evaluated.get("val_loss"),
            **{name: value for name, value in self._evaluated.items() if name.startswith("val_")},
            "bigram_loss": self._evaluated.get("bigram_loss"),
            **(self._rates(median) if taken else {"tokens_per_second": None, "examples_per_second": None}),
            "step_seconds_median": median if taken else None,
            "data_wait_fraction": wait / spent if taken else None,
            "seconds": spent,
        }

    def _call(self) -> Call:
        """Give the devices the next steps: as many as go in one call before something falls due."""
        first, count = self.run.num_steps + 1, self._num_ahead()
        is_new = count not in self._sizes
        self._beat("compile" if is_new else "step")
        batches = self._next_batches(count)
        if len(batches) < count:  # the data ends: what is left goes step by step
            count, is_new = 1, 1 not in self._sizes
            self._ready = batches[1:]
        if is_new:
            self.ledger.enter("compile")
        else:
            self.ledger.take(first)
        self._sizes.add(count)
        indices, arrays = zip(*batches[:count], strict=True)
        with marked(STEP):
            metrics = self.run.step(arrays[0]) if count == 1 else self.run.steps(arrays)
        return Call(first, indices, metrics, is_new)

    def _is_over(self) -> bool:
        """Whether to stop here: not with batches in hand that no step was taken on."""
        # Processes meet at a number that none of them leaves out, so not at that of a step.
        self._num_asked += not self._ready
        return not self._ready and self.is_over(self._num_asked)

    def _num_ahead(self) -> int:
        """All that a call may take, where nothing is due before its end; else one step."""
        step, count = self.run.num_steps, self.config.steps_per_call
        due = [self.config.steps or 0]
        due += [step - step % every + every for every in (self.config.eval_every, self.config.save_every) if every]
        if self.profile is not None and step < self.profile.last:
            due.append(max(step, self.profile.first - 1))  # traced steps go one by one
        return count if step + count <= min(due) else 1

    def _next_batches(self, count: int) -> list[tuple[int, Any]]:
        """So many batches, each behind its index; less where the data ends, and at least one."""
        batches, self._ready = self._ready[:count], self._ready[count:]
        with self.ledger.within("data"), marked(INPUT):
            while len(batches) < count and (batch := next(self.data, None)) is not None:
                batches.append((self.data.last_index, batch))
        if not batches:
            raise DataError(f"the data ended before step {self.run.num_steps + 1}.", where=self.data.source)
        return batches

    def _reported(self, behind: deque[Call], num_left: int) -> bool:
        """Report all but so many calls, and see to bad steps; whether the run went back, and the rest is no more."""
        while len(behind) > num_left:
            call = behind.popleft()
            arrays = {name: np.asarray(leaf) for name, leaf in by_name(call.metrics).items()}
            num_steps, now = len(call.batches), time.perf_counter()
            seconds, self._clock = (now - self._clock) / num_steps, now
            taken = self._compiling if call.is_new else self._seconds
            for at, batch in enumerate(call.batches):
                taken.append(seconds)
                values = {name: (array[at] if num_steps > 1 else array).tolist() for name, array in arrays.items()}
                if self._is_undone(call.first + at, batch, values, seconds):
                    behind.clear()
                    self._ready.clear()
                    return True
        return False

    def _is_undone(self, step: int, batch: int, values: Event, seconds: float) -> bool:
        """Report a step, and see to it if it is bad; whether the run went back."""
        self._report(step, {name: value for name, value in values.items() if name != STEP_OK}, seconds)
        reason = self.run.judge(step, values)
        if reason is None:
            self._loss, self._num_good = values.get("loss"), self._num_good + 1
            return False
        self._num_bad += 1
        self._beat("restore")
        with self.ledger.within("restore"):
            has_gone_back = self.remedy.treat(step, batch, values, reason)
        if has_gone_back:
            self._clock = time.perf_counter()
        return has_gone_back

    def _report(self, step: int, values: Event, seconds: float) -> None:
        """Tell of a step; it takes from the last call's metrics to its own, as long as each beside it."""
        if step % self.config.log_every == 0 or step == self.config.steps:
            event: Event = {"event": "step", "step": step, **values, "step_seconds": seconds}
            self.tell(event | self._rates(seconds) | {"data_wait_seconds": self.data.wait_seconds})

    def _rates(self, seconds: float) -> Event:
        """Both alike where nothing in a batch is a sequence."""
        counts = num_tokens(self.run.program), num_examples(self.run.program)
        return {"tokens_per_second": counts[0] / seconds, "examples_per_second": counts[1] / seconds}

    def _preempted(self) -> Event:
        """Save where the run was asked to stop, so that no step of it is lost."""
        self._finish_saving()
        return {"event": "preempted", "step": self.run.num_steps}

    def _evaluate(self) -> None:
        """The mean of each metric over the first held-out batches, and the loss of a bigram on the same tokens."""
        held_out = self.held_out() if self.run.program.evaluation is not None else None
        if held_out is None:
            return
        self._beat("evaluate")
        with closing(held_out), self.ledger.within("evaluate"):
            pairs = zip(range(self.config.eval_batches), held_out, strict=False)
            means, size = Means(), num_examples(self.run.program)
            for _, batch in pairs:
                means.add(self.run.evaluate(batch), num_fewer(self.run.program, batch) or size)
            if not means.num_examples:
                return
            values = {f"val_{name}": value for name, value in means.values().items()}
            self._evaluated = {"event": "eval", "step": self.run.num_steps, "examples": means.num_examples, **values}
            if self.data.tokens is not None and held_out.tokens is not None:
                num_scored = means.num_examples * num_tokens(self.run.program) // size
                scored = held_out.tokens.ids[: num_scored + 1]
                vocab_size = max(self.data.tokens.vocab_size, held_out.tokens.vocab_size)
                fitted = self.data.tokens.ids[:MAX_BIGRAM_TOKENS]
                self._evaluated["bigram_loss"] = bigram_loss(fitted, scored, vocab_size)
        self.tell(self._evaluated)

    def _save(self) -> None:
        self._beat("save")
        with self.ledger.within("save"):
            self.remedy.check_state()
            saving = self.saves.start(self.run, self.data)
        if saving is not None:
            self.remedy.saved(saving)

    def _finish_saving(self) -> None:
        self._beat("save")
        with self.ledger.within("save"):
            if not self.saves.covers(self.run.num_steps):
                self.remedy.check_state()
            self.saves.finish(self.run, self.data)

    def _beat(self, phase: str) -> None:
        if not self.pulse.is_due(phase):
            return
        # What a watcher measures a silence by: the median of the last steps, for as many as come without a beat.
        seconds = self.config.steps_per_call * statistics.median((self._seconds or self._compiling or [0.0])[-16:])
        self.pulse.beat(phase, self.run.num_steps, step_seconds=seconds, seconds=self.ledger.seconds())


def num_tokens(program: Program) -> int:
    """Tokens in a global batch: examples times sequence, or the examples where nothing is a sequence."""
    leaf = max(program.batch, key=lambda leaf: "seq" in leaf.axes)
    return num_examples(program) * dict(zip(leaf.axes, leaf.shape, strict=True)).get("seq", 1)


def num_examples(program: Program) -> int:
    """Examples in a global batch."""
    leaf = max(program.batch, key=lambda leaf: "seq" in leaf.axes)
    return dict(zip(leaf.axes, leaf.shape, strict=True)).get("batch", leaf.shape[0] if leaf.shape else 1)


def _is_due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)
