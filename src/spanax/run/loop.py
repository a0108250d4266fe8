"""The loop of a run: steps, evaluations and checkpoints, and what is measured of them."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from spanax.errors import DataError
from spanax.run.config import TrainConfig
from spanax.run.data.batches import Batches
from spanax.run.data.bigram import bigram_loss
from spanax.run.profile import INPUT, STEP, Profile, marked
from spanax.run.record.heartbeat import Pulse
from spanax.run.record.ledger import Ledger
from spanax.run.remedy import Remedy
from spanax.run.run import Run
from spanax.run.saves import Saves
from spanax.run.step.guard import STEP_OK
from spanax.trace.program import Program

Event = dict[str, Any]

MAX_BIGRAM_TOKENS = 1 << 25
"""A bigram is fitted on so many tokens at most; more would take longer than the evaluation itself."""


@dataclass(eq=False)
class Loop:
    """The steps of one run that are left.

    Attributes:
      held_out: opens the held-out batches, or returns None where there are none.
      saves: its checkpoints.
      tell: takes every event.
      remedy: what is done about bad steps.
      is_over: says behind a step whether to stop there, the same on every process.
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
    remedy: Remedy
    is_over: Callable[[int], bool]
    pulse: Pulse
    ledger: Ledger
    profile: Profile | None = None
    _seconds: list[float] = field(default_factory=list)
    _loss: float | None = None
    _evaluated: Event = field(default_factory=dict)
    _clock: float = 0.0

    def run_to_end(self) -> Event:
        """Take the steps that are left, evaluate and save when due; return the `done` or the `preempted` event."""
        steps = self.config.steps or 0
        if self.profile is not None:
            self.profile.prepare(self.run)
        began = self._clock = time.perf_counter()
        waited = self.data.wait_seconds
        # Metrics are fetched once the next step is under way, so that the devices never wait for them.
        behind: deque[tuple[int, int, dict[str, Any]]] = deque()
        while self.run.num_steps < steps:
            if self.profile is not None:
                self.profile.before(self.run)
            self._beat("step" if self._seconds else "compile")
            batch = self._next_batch()
            if self._seconds:
                self.ledger.take(self.run.num_steps + 1)
            else:
                self.ledger.enter("compile")
            with marked(STEP):
                metrics = self.run.step(batch)
            step = self.run.num_steps
            behind.append((step, self.data.last_index, metrics))
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
            if self.run.num_steps < steps and self.is_over(self.run.num_steps):
                # Where the last step turns out bad, the run is back at a checkpoint, and there is nothing to save.
                self._reported(behind, 0)
                return self._preempted()
        if not self._evaluated:
            self._evaluate()
        self._finish_saving()
        spent, wait = time.perf_counter() - began, self.data.wait_seconds - waited
        # The first step is mostly compiling.
        median = statistics.median(self._seconds[1:] or self._seconds or [math.nan])
        return {
            "event": "done",
            "steps": self.run.num_steps,
            "train_loss": self._loss,
            "val_loss": self._evaluated.get("val_loss"),
            "bigram_loss": self._evaluated.get("bigram_loss"),
            "tokens_per_second": num_tokens(self.run.program) / median if self._seconds else None,
            "step_seconds_median": median if self._seconds else None,
            "data_wait_fraction": wait / spent if self._seconds else None,
            "seconds": spent,
        }

    def _next_batch(self) -> Any:
        with self.ledger.within("data"), marked(INPUT):
            batch = next(self.data, None)
        if batch is None:
            raise DataError(f"the data ended before step {self.run.num_steps + 1}.", where=self.data.source)
        return batch

    def _reported(self, behind: deque[tuple[int, int, dict[str, Any]]], num_left: int) -> bool:
        """Report all but so many steps, and see to bad ones; whether the run went back, and the others are no more."""
        while len(behind) > num_left:
            step, batch, metrics = behind.popleft()
            named, _ = jax.tree_util.tree_flatten_with_path(metrics)
            values = {
                jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(value).tolist()
                for path, value in named
            }
            self._report(step, {name: value for name, value in values.items() if name != STEP_OK})
            reason = self.run.judge(step, values)
            if reason is None:
                continue
            self._beat("restore")
            with self.ledger.within("restore"):
                has_gone_back = self.remedy.treat(step, batch, values, reason)
            if has_gone_back:
                self._clock = time.perf_counter()
                behind.clear()
                return True
        return False

    def _report(self, step: int, values: Event) -> None:
        """Tell of a step; it takes from the last one's metrics to its own."""
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        self._seconds.append(seconds)
        self._loss = values.get("loss")
        if step % self.config.log_every == 0 or step == self.config.steps:
            rate = num_tokens(self.run.program) / seconds
            event: Event = {"event": "step", "step": step, **values, "step_seconds": seconds}
            self.tell(event | {"tokens_per_second": rate, "data_wait_seconds": self.data.wait_seconds})

    def _preempted(self) -> Event:
        """Save where the run was asked to stop, so that no step of it is lost."""
        self._finish_saving()
        return {"event": "preempted", "step": self.run.num_steps}

    def _evaluate(self) -> None:
        """Mean loss on the first held-out batches, beside a bigram's on the same tokens."""
        held_out = self.held_out() if self.run.program.evaluation is not None else None
        if held_out is None:
            return
        self._beat("evaluate")
        with closing(held_out), self.ledger.within("evaluate"):
            pairs = zip(range(self.config.eval_batches), held_out, strict=False)
            losses = [float(self.run.evaluate(batch)["loss"]) for _, batch in pairs]
            if not losses:
                return
            self._evaluated = {"event": "eval", "step": self.run.num_steps, "val_loss": statistics.fmean(losses)}
            if self.data.tokens is not None and held_out.tokens is not None:
                scored = held_out.tokens.ids[: len(losses) * num_tokens(self.run.program) + 1]
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
        # The median of the last steps is what a watcher measures the silence of a step by.
        seconds = statistics.median(self._seconds[-16:]) if self._seconds else 0.0
        self.pulse.beat(phase, self.run.num_steps, step_seconds=seconds, seconds=self.ledger.seconds())


def num_tokens(program: Program) -> int:
    """Tokens in a global batch: examples times sequence, or the examples where nothing is a sequence."""
    leaf = max(program.batch, key=lambda leaf: "seq" in leaf.axes)
    by_name = dict(zip(leaf.axes, leaf.shape, strict=True))
    return by_name.get("batch", leaf.shape[0] if leaf.shape else 1) * by_name.get("seq", 1)


def _is_due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)
