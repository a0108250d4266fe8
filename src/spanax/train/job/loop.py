"""The training loop: steps, evaluations and checkpoints, with their metrics and times."""

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

from spanax.errors import TooFewExamplesError
from spanax.step.guard import STEP_OK
from spanax.trace.program import Program
from spanax.train.config import TrainConfig, profiled_steps
from spanax.train.data.batches import Batches
from spanax.train.data.text.conversations import Conversations
from spanax.train.evaluation import Means, by_name, num_fewer
from spanax.train.job.bad_step_policy import BadStepPolicy
from spanax.train.job.job import Job
from spanax.train.job.samples import Samples
from spanax.train.profile import INPUT, STEP, Profile
from spanax.train.record.telemetry import Event, Telemetry
from spanax.train.run import Run
from spanax.train.state.saves import Saves


@dataclass(frozen=True)
class Call:
    """One or more train steps dispatched to the devices together.

    Attributes:
      first: the number of the first step.
      batches: the index of each step's batch.
      metrics: the metrics of the step; stacked along dim 0 for several steps.
      is_new: whether the call waited for its program to be compiled.
    """

    first: int
    batches: tuple[int, ...]
    metrics: dict[str, Any]
    is_new: bool


@dataclass(eq=False)
class Loop:
    """Takes the remaining steps of a run.

    Attributes:
      job: the settings and the held-out data.
      run: the run.
      data: the training batches.
      telemetry: receives events, heartbeats and the wall time of each phase.
      saves: writes checkpoints.
      bad_steps: handles steps with non-finite or outlying metrics.
      is_over: `is_over(n)` returns at its n-th call whether to stop, the same on every process.
      samples: continues prompts, if requested.
    """

    job: Job
    run: Run
    data: Batches
    telemetry: Telemetry
    saves: Saves
    bad_steps: BadStepPolicy
    is_over: Callable[[int], bool]
    samples: Samples | None = None
    _profile: Profile | None = field(init=False)
    _seconds: list[float] = field(default_factory=list)
    _compiling: list[float] = field(default_factory=list)
    _ready: list[tuple[int, Any]] = field(default_factory=list)
    _sizes: set[int] = field(default_factory=set)
    _num_stop_checks: int = 0
    _loss: float | None = None
    _num_good: int = 0
    _num_bad: int = 0
    _evaluated: Event = field(default_factory=dict)
    _clock: float = 0.0

    def __post_init__(self) -> None:
        steps = profiled_steps(self.config)
        self._profile = None if steps is None else Profile(*steps, self.telemetry.folder)

    @property
    def config(self) -> TrainConfig:
        """The settings of the job."""
        return self.job.config

    def run_to_end(self) -> Event:
        """Takes the remaining steps, evaluates and saves when due; returns the `done` or the `preempted` event."""
        steps = self.config.steps or 0
        self.run.warn = self.telemetry.warn
        if self._profile is not None:
            self._profile.prepare(self.run)
        start = self._clock = time.perf_counter()
        initial_wait = self.data.wait_seconds
        # Metrics are fetched after the next call is dispatched, so that the devices never wait for them.
        calls: deque[Call] = deque()
        while self.run.num_steps < steps:
            calls.append(self._call())
            evaluates = _is_due(self.run.num_steps, self.config.eval_every, steps)
            saves = _is_due(self.run.num_steps, self.config.save_every, steps)
            samples = self.samples is not None and _is_due(self.run.num_steps, self.config.sample_every or 0, steps)
            is_interrupted = evaluates or saves or samples
            is_rolled_back = self._reported(calls, 0 if self.run.is_simulated or is_interrupted else 1)
            if self._profile is not None:
                self._profile.after(self.run)
            if is_rolled_back:
                continue
            if evaluates:
                self._evaluate()
            if samples:
                self._sample()
            if saves:
                self._save()
            if is_interrupted:
                self._clock = time.perf_counter()
            if self.run.num_steps < steps and self._is_over():
                # If the last step turns out bad, the run is rolled back to a checkpoint, and nothing needs saving.
                self._reported(calls, 0)
                return self._preempted()
        self.bad_steps.check_good(self._num_good, self._num_bad)
        if not self._evaluated:
            self._evaluate()
        self._finish_saving()
        return self._done(time.perf_counter() - start, self.data.wait_seconds - initial_wait)

    def _done(self, seconds: float, wait_seconds: float) -> Event:
        """The `done` event of a loop that took so long, and waited so long for data."""
        step_seconds = self._seconds or self._compiling
        median = statistics.median(step_seconds or [math.nan])
        return {
            "event": "done",
            "steps": self.run.num_steps,
            "train_loss": self._loss,
            "val_loss": self._evaluated.get("val_loss"),
            **{name: value for name, value in self._evaluated.items() if name.startswith("val_")},
            "bigram_loss": self._evaluated.get("bigram_loss"),
            **(self._rates(median) if step_seconds else {"tokens_per_second": None, "examples_per_second": None}),
            "step_seconds_median": median if step_seconds else None,
            "data_wait_fraction": wait_seconds / seconds if step_seconds else None,
            "seconds": seconds,
        }

    def _call(self) -> Call:
        """Dispatches the next steps: up to `steps_per_call`, and only one if something is due within them."""
        if self._profile is not None:
            self._profile.before(self.run)
        first = self.run.num_steps + 1
        count = self._num_ahead()
        is_new = count not in self._sizes
        self._beat("compile" if is_new else "step")
        batches = self._next_batches(count)
        if len(batches) < count:  # at the end of the data, the remaining batches are taken step by step
            count = 1
            is_new = 1 not in self._sizes
            self._ready = batches[1:]
        if is_new:
            self.telemetry.ledger.enter("compile")
        else:
            self.telemetry.ledger.take(first)
        self._sizes.add(count)
        indices, arrays = zip(*batches[:count], strict=True)
        with jax.profiler.TraceAnnotation(STEP):
            metrics = self.run.step(arrays[0]) if count == 1 else self.run.steps(arrays)
        return Call(first, indices, metrics, is_new)

    def _is_over(self) -> bool:
        """Whether to stop after this step; never while batches that were read are still unused."""
        # Processes synchronize on a count that none of them skips; a step number may be skipped.
        self._num_stop_checks += not self._ready
        return not self._ready and self.is_over(self._num_stop_checks)

    def _num_ahead(self) -> int:
        """The number of steps of the next call: `steps_per_call` if nothing is due before its end, else one."""
        step = self.run.num_steps
        count = self.config.steps_per_call
        due = [self.config.steps or 0]
        intervals = (self.config.eval_every, self.config.save_every, self.config.sample_every)
        due += [step - step % every + every for every in intervals if every]
        if self._profile is not None and step < self._profile.last:
            due.append(max(step, self._profile.first - 1))  # profiled steps are dispatched one by one
        return count if step + count <= min(due) else 1

    def _next_batches(self, count: int) -> list[tuple[int, Any]]:
        """Pairs of index and batch: `count` of them, or fewer at the end of the data, but at least one."""
        batches, self._ready = self._ready[:count], self._ready[count:]
        with self.telemetry.ledger.within("data"), jax.profiler.TraceAnnotation(INPUT):
            while len(batches) < count and (batch := next(self.data, None)) is not None:
                batches.append((self.data.last_index, batch))
        if not batches:
            raise TooFewExamplesError(f"the data ended before step {self.run.num_steps + 1}.", where=self.data.source)
        return batches

    def _reported(self, calls: deque[Call], num_pending: int) -> bool:
        """Reports all calls but the newest `num_pending`; returns whether a bad step rolled the run back.

        A rollback discards the remaining calls.
        """
        while len(calls) > num_pending:
            call = calls.popleft()
            arrays = {name: np.asarray(leaf) for name, leaf in by_name(call.metrics).items()}
            num_steps = len(call.batches)
            now = time.perf_counter()
            seconds, self._clock = (now - self._clock) / num_steps, now
            step_seconds = self._compiling if call.is_new else self._seconds
            for index, batch in enumerate(call.batches):
                step_seconds.append(seconds)
                values = {name: (array[index] if num_steps > 1 else array).tolist() for name, array in arrays.items()}
                if self._is_rolled_back(call.first + index, batch, values, seconds):
                    calls.clear()
                    self._ready.clear()
                    return True
        return False

    def _is_rolled_back(self, step: int, batch: int, values: Event, seconds: float) -> bool:
        """Reports a step and applies the policy if it is bad; returns whether the run was rolled back."""
        self._report(step, {name: value for name, value in values.items() if name != STEP_OK}, seconds)
        reason = self.run.judge(step, values)
        if reason is None:
            self._loss, self._num_good = values.get("loss"), self._num_good + 1
            return False
        self._num_bad += 1
        self._beat("restore")
        with self.telemetry.ledger.within("restore"):
            is_rolled_back = self.bad_steps.handle(step, batch, values, reason)
        if is_rolled_back:
            self._clock = time.perf_counter()
        return is_rolled_back

    def _report(self, step: int, values: Event, seconds: float) -> None:
        """Reports the metrics of a step; its time is its share of the time between two fetches of metrics."""
        if step % self.config.log_every == 0 or step == self.config.steps:
            event: Event = {"event": "step", "step": step, **values, "step_seconds": seconds}
            self.telemetry.report(event | self._rates(seconds) | {"data_wait_seconds": self.data.wait_seconds})

    def _rates(self, seconds: float) -> Event:
        """Tokens and examples per second; equal if no leaf of the batch has a sequence dim."""
        counts = num_tokens(self.run.program), self.run.program.batch_size
        return {"tokens_per_second": counts[0] / seconds, "examples_per_second": counts[1] / seconds}

    def _preempted(self) -> Event:
        """Saves the last step before the run stops."""
        self._finish_saving()
        return {"event": "preempted", "step": self.run.num_steps}

    def _evaluate(self) -> None:
        """Reports the mean of each metric over the first held-out batches, and the workload's baseline."""
        program = self.run.program
        is_evaluated = program.has_evaluation or program.run_evaluate is not None
        held_out = self.job.held_out_batches(self.telemetry) if is_evaluated else None
        if held_out is None:
            return
        self._beat("evaluate")
        with closing(held_out), self.telemetry.ledger.within("evaluate"):
            means = Means()
            size = program.batch_size
            for _, batch in zip(range(self.config.eval_batches), held_out, strict=False):
                means.add(self.run.evaluate(batch), num_fewer(program, batch) or size)
            if not means.num_examples:
                return
            values = {f"val_{name}": value for name, value in means.values().items()}
            self._evaluated = {"event": "eval", "step": self.run.num_steps, "examples": means.num_examples, **values}
            self._evaluated |= self._baseline(held_out, means.num_examples * num_tokens(program) // size)
        self.telemetry.report(self._evaluated)

    def _sample(self) -> None:
        assert self.samples is not None
        self._beat("evaluate")
        with self.telemetry.ledger.within("evaluate"):
            self.samples.report(self.run)

    def _baseline(self, held_out: Batches, num_tokens: int) -> Event:
        """The loss of the workload's baseline on the same held-out tokens; empty for data other than text."""
        baseline = self.job.workload.baseline
        train = self.data.tokens
        validation = held_out.tokens
        if baseline is None or train is None or validation is None or isinstance(train, Conversations):
            return {}
        vocab_size = max(train.vocab_size, validation.vocab_size)
        return {"bigram_loss": baseline(train.ids, validation.ids[: num_tokens + 1], vocab_size)}

    def _save(self) -> None:
        self._beat("save")
        with self.telemetry.ledger.within("save"):
            self.bad_steps.check_state()
            saving = self.saves.start(self.run, self.data)
        if saving is not None:
            self.bad_steps.saved(saving)

    def _finish_saving(self) -> None:
        self._beat("save")
        with self.telemetry.ledger.within("save"):
            if not self.saves.covers(self.run.num_steps):
                self.bad_steps.check_state()
            self.saves.finish(self.run, self.data)

    def _beat(self, phase: str) -> None:
        # A watcher compares a silence with the median of the last steps, times the steps between two heartbeats.
        seconds = self.config.steps_per_call * statistics.median((self._seconds or self._compiling or [0.0])[-16:])
        self.telemetry.beat(phase, self.run.num_steps, step_seconds=seconds)


def num_tokens(program: Program) -> int:
    """Returns the tokens of a global batch: examples times sequence length, or the examples without a sequence.

    The steps of a loop over the batch, in dims before that of the examples, have tokens as well.
    """
    pairs = zip(program.batch, program.step.axes.examples, strict=True)
    leaf, dim = max(pairs, key=lambda pair: "seq" in pair[0].axes)
    lengths = dict(zip(leaf.axes, leaf.shape, strict=True))
    return program.batch_size * math.prod(leaf.shape[: dim or 0]) * lengths.get("seq", 1)


def _is_due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)
