"""The trainer of `spanax train`: from a workload and its settings to a run folder."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax

from spanax.entries.folder import Folder
from spanax.entries.names import CHECKPOINTS
from spanax.errors import WriteError
from spanax.processes.ports import is_public, open_ports
from spanax.processes.preemption import listening
from spanax.processes.processes import Hosts, from_first, is_first
from spanax.processes.supervision import is_supervised
from spanax.trace.workload import Workload
from spanax.train.config import TrainConfig
from spanax.train.data.batches import Batches
from spanax.train.job.bad_step_policy import BadStepPolicy
from spanax.train.job.begin import begin, start_or_restore
from spanax.train.job.job import build
from spanax.train.job.loop import Loop
from spanax.train.job.plan_choice import placement
from spanax.train.job.records import Records
from spanax.train.job.samples import Generate, Samples
from spanax.train.record.run_lock import RunLock, claimed
from spanax.train.record.telemetry import Event, Telemetry, open_telemetry
from spanax.train.record.trackers import RunInfo
from spanax.train.run import Run
from spanax.train.state.saves import Saves
from spanax.train.store import checkpoint
from spanax.train.tracking import create_trackers, summary


def train(
    load: Callable[..., Workload],
    config: TrainConfig,
    devices: list[Any],
    emit: Callable[[Event], None],
    generate: Generate | None = None,
) -> Event:
    """Trains a workload and returns the last event: `done`, or `preempted` if a signal stopped the run.

    In a run of several processes, each of them calls this with the devices of all processes.

    Args:
      load: returns the workload, given `batch_size`, `seq_len` and `vocab_size`.
      config: the settings; None stands for the workload's default.
      devices: the devices to use.
      emit: called on the first process with every event: `start`, `warning`, `step`, `eval`, `sample`, `save`,
        `done`, `preempted`.
      generate: `spanax.generate`, for --sample-prompts.

    Raises:
      SpanaxError: the settings are inconsistent; also its subclasses DataError and WriteError.
    """
    with ExitStack() as stack:
        folder, lock = stack.enter_context(_run_folder(config))
        stack.callback(checkpoint.release, Folder.of(folder).inner(CHECKPOINTS))
        rank = jax.process_index()
        attempt = Hosts.of().attempt
        events = emit if is_first() else None
        telemetry = stack.enter_context(open_telemetry(folder, rank=rank, attempt=attempt, emit=events))
        job = build(load, config, devices, telemetry)
        data = stack.enter_context(closing(job.batches()))
        samples = Samples.of(job, data, generate, telemetry)
        worker = stack.enter_context(ThreadPoolExecutor(1, "spanax-background"))
        run = begin(job, telemetry, worker)
        if run.position is not None:
            data.restore(run.position)
        records = Records(job, data.tokens, lock, telemetry)
        is_finished = job.config.resume and run.num_steps >= (job.config.steps or 0)
        if samples is not None and not is_finished:
            with telemetry.ledger.within("compile"):
                samples.draw(run)  # what fails, fails before the first step
        _report_start(run, data, records, is_finished=is_finished)
        is_over = stack.enter_context(listening())
        if is_first() and config.plan is None and not is_finished:
            worker.submit(records.predict_step_time)
        last = _loop(run, data, records, is_over, samples).run_to_end() | {"out": str(folder)}
        telemetry.finish(last, run.num_steps)
        return last


@contextmanager
def _run_folder(config: TrainConfig) -> Iterator[tuple[Path, RunLock | None]]:
    """Yields the run folder on every process, and the lock on it that the first process acquires."""
    with ExitStack() as stack:
        locks: list[RunLock] = []

        def acquire() -> str:
            name = config.workload.rpartition(":")[2]
            folder = Path(config.output_dir or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")
            locks.append(stack.enter_context(claimed(folder, resume=config.resume, is_supervised=is_supervised())))
            return str(folder)

        yield Path(from_first(acquire, WriteError)), next(iter(locks), None)


def _loop(run: Run, data: Batches, records: Records, is_over: Callable[[int], bool], samples: Samples | None) -> Loop:
    """Returns the loop of a run, with its checkpoints and its policy for bad steps."""
    job = records.job
    telemetry = records.telemetry
    steps = Folder.of(telemetry.folder).inner(CHECKPOINTS)
    saves = Saves(steps, job.config, telemetry, records.renew, saved=run.num_steps)
    bad_steps = BadStepPolicy(run, data, partial(start_or_restore, job, telemetry, resume=True), telemetry)
    return Loop(job, run, data, telemetry, saves, bad_steps, is_over, samples)


def _report_start(run: Run, data: Batches, records: Records, *, is_finished: bool) -> None:
    """Writes the records of the run, opens its metrics and trackers, and reports the events before the first step.

    The records of a run that has all its steps stay those of its training.
    """
    telemetry = records.telemetry
    config = records.job.config
    if is_first():
        trackers = create_trackers(config.track)
        if not is_finished:
            records.write()
        reached = telemetry.ledger.reached
        telemetry.begin(RunInfo(telemetry.folder, config.record(), summary(run), run.num_steps, reached), trackers)
    process = {"pid": os.getpid(), "hosts": jax.process_count()}
    telemetry.report({"event": "begin", **process, **placement(records.job.plan), "step": run.num_steps})
    telemetry.report(_start_event(run, config, telemetry.folder, data))
    _warn_of_public_ports(telemetry)
    if is_finished:
        telemetry.warn(
            f"the run has all its {config.steps} steps: it trains nothing, and keeps its configuration and plan"
        )
    if config.init_partial and run.loaded is not None:
        lists = asdict(run.loaded)
        del lists["step"]
        telemetry.report({"event": "init", **lists})


def _warn_of_public_ports(telemetry: Telemetry) -> None:
    if jax.process_count() > 1 and (addresses := [address for address in open_ports() if is_public(address)]):
        listed = ", ".join(addresses)
        message = f"this process listens on every interface, without authentication: {listed} (docs/hosts.md)"
        if not is_first():  # its events are dropped, and its standard error goes to its log
            print(f"spanax: {message}", file=sys.stderr)
        telemetry.warn(message)


def _start_event(run: Run, config: TrainConfig, folder: Path, data: Batches) -> Event:
    return {
        "event": "start",
        "workload": config.workload,
        "step": run.num_steps,
        "steps": config.steps,
        **summary(run),
        **({} if config.init is None or run.num_steps else {"init": config.init}),
        **({} if jax.process_count() == 1 else {"listens": open_ports()}),
        "out": str(folder),
        "data": [asdict(share) | {"epochs": share.epochs(config.steps or 0)} for share in data.shares],
    }
