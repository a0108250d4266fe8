"""The trainer: from a configuration to a run folder.

Read this file first: it names every part of Spanax in the order in which a run meets it.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from spanax.documents import json_line
from spanax.entries.folder import Folder
from spanax.entries.names import CHECKPOINTS, PLAN
from spanax.errors import SpanaxError, WriteError, first_line
from spanax.hardware.cluster import local
from spanax.plan.choose import plan as make_plan
from spanax.plan.defaults import default_dtype
from spanax.plan.pipeline.stages import check_requested_schedule, requested_schedule
from spanax.plan.plan import Plan
from spanax.plan.sharding.place import as_planned
from spanax.run.bad_step_policy import BadStepPolicy
from spanax.run.compiler_options import flagged
from spanax.run.config import TrainConfig, profiled_steps
from spanax.run.data.batches import Batches, batches
from spanax.run.data.examples import TooFew
from spanax.run.data.open_source import is_named
from spanax.run.distributed.ports import is_public, open_ports, public_warning
from spanax.run.distributed.preemption import listening
from spanax.run.distributed.processes import Hosts, from_first, is_first, is_supervised
from spanax.run.loop import Event, Loop
from spanax.run.predicted_step_time import StepTimePrediction
from spanax.run.profile import Profile
from spanax.run.record import folder as run_folder
from spanax.run.record import time_account
from spanax.run.record.events import Events
from spanax.run.record.heartbeat import Pulse
from spanax.run.record.run_lock import RunLock, claimed
from spanax.run.record.time_ledger import Ledger, process_age_seconds
from spanax.run.record.trackers import RunInfo, Trackers
from spanax.run.run import Run, start
from spanax.run.state.program_digest import check_same_model
from spanax.run.state.restore import restore
from spanax.run.state.saves import Saves
from spanax.run.store import checkpoint, manifest
from spanax.run.tracking import made, summary
from spanax.run.workload_tracing import source_of, trace_workload
from spanax.trace.program import Program
from spanax.trace.workload import Workload


def train(
    load: Callable[..., Workload], config: TrainConfig, devices: list[Any], emit: Callable[[Event], None]
) -> Event:
    """Train a workload and return the last event: `done`, or `preempted` where a signal asked it to stop.

    In a run of several processes each of them calls this, with the devices of all; the first one leads.

    Args:
      load: makes the workload, given `batch_size`, `seq_len` and `vocab_size`.
      config: the settings; what is None takes the workload's own.
      devices: the devices to use.
      emit: called on the first process with every event: `start`, `warning`, `step`, `eval`, `save`, `done`,
        `preempted`.

    Raises:
      SpanaxError: the settings do not go together; also its kinds DataError and WriteError.
    """
    with ExitStack() as stack:
        is_leader, hosts = is_first(), Hosts.of()
        emit = emit if is_leader else _unheard
        folder, claim = _claimed(config, stack)
        reached = time_account.reached(folder)
        ledger = Ledger(hosts.attempt, reached, process_age_seconds())
        events = _events(folder, hosts.attempt) if is_leader else _unheard
        pulse = Pulse(folder, jax.process_index(), hosts.attempt)
        pulse.beat("start", 0, seconds=ledger.seconds())
        planned = None if config.plan is None else _planned(config, len(devices))
        workload, config, program = trace_workload(load, replace(config, devices=len(devices)), planned)
        if config.resume:
            _check_same(folder, program, load, config, planned, emit)
        steps = profiled_steps(config)
        profile = None if steps is None else Profile(*steps, folder)
        plan = flagged(planned or _chosen(program, config, folder, devices, emit, events), config.xla_flags, devices)
        check_requested_schedule(config.schedule, plan)
        read = partial(
            batches, plan=plan, mesh=plan.mesh.build(devices), tokenizer=config.tokenizer or "bytes", seed=config.seed,
            field=config.field, epochs=None,
        )  # fmt: skip
        data = stack.enter_context(closing(read(source_of(config, workload))))
        pulse.beat("restore", 0, seconds=ledger.seconds())
        begin = partial(_begun, program, plan, folder=folder, devices=devices, emit=emit)
        beside = stack.enter_context(ThreadPoolExecutor(1, "spanax-beside"))
        run = Run(as_planned(program, plan), plan, plan.mesh.build(devices), [], guard=config.guard)
        with ledger.within("restore" if config.resume else ledger.bucket):
            compiled = _compiled(run, config, beside)
            run.go_back(partial(begin, config))
        pulse.beat("compile", run.num_steps, seconds=ledger.seconds())
        with ledger.within("compile"):
            compiled.result()
        if run.position is not None:
            data.restore(run.position)
        pricing = StepTimePrediction(program, plan, devices)
        records = lambda: run_folder.write_records(folder, config.record(), pricing.plan.to_json(), devices)  # noqa: E731
        about = RunInfo(folder, config.record(), summary(run), run.num_steps, reached)
        tell = _telling(about, made(config.track), records, emit, events, stack) if is_leader else _unheard
        events("begin", pid=os.getpid(), hosts=jax.process_count(), **_placed(plan), step=run.num_steps)
        for event in _first_events(run, config, folder, data):
            tell(event)
        held_out = partial(_held_out, read, config, workload, tell)
        is_over = stack.enter_context(listening())
        remedy = BadStepPolicy(run, data, partial(begin, replace(config, resume=True)), tell, events)
        renew = partial(from_first, partial(_renewed, claim, records, tell), WriteError)
        saves = Saves(Folder.of(folder).inner(CHECKPOINTS), config, tell, renew, saved=run.num_steps)
        if is_leader and planned is None:
            warn = lambda line: tell({"event": "warning", "message": line})  # noqa: E731
            beside.submit(pricing.find, partial(run_folder.write_plan, folder), warn)
        loop = Loop(run, data, held_out, config, saves, tell, remedy, is_over, pulse, ledger, profile)
        last = loop.run_to_end() | {"out": str(folder)}
        ledger.enter("idle")
        tell(last)
        events("end", how=last["event"], step=run.num_steps)
        events("ledger", **ledger.record(run.num_steps))
        pulse.beat("end", run.num_steps, seconds=ledger.seconds())
        return last


def _held_out(
    read: Callable[..., Batches], config: TrainConfig, workload: Workload, tell: Callable[[Event], None]
) -> Batches | None:
    """The held-out batches, from their start; None where the workload has none, or no example."""
    source = source_of(config, workload)
    if is_named(source):
        try:
            return read(source, split="validation", shuffle=False, epochs=1, drop_remainder=False)
        except TooFew as error:
            tell({"event": "warning", "message": f"no held-out loss: {first_line(error)}"})
            return None
    if workload.validation is None:
        return None
    return read(workload.validation, shuffle=False, epochs=1, drop_remainder=False)


def _planned(config: TrainConfig, num_devices: int) -> Plan:
    """The plan of --plan, which must be for as many devices."""
    plan = Plan.load(config.plan or "")
    if plan.mesh.size != num_devices:
        raise SpanaxError(
            f"the plan is for {plan.mesh.size} devices, and there are {num_devices}.",
            where=f"--plan {config.plan}, mesh {plan.mesh}",
            fix=f"--devices {plan.mesh.size}, or a plan for {num_devices}",
        )
    return plan


def _check_same(
    folder: Path,
    program: Program,
    load: Callable[..., Workload],
    config: TrainConfig,
    planned: Plan | None,
    emit: Callable[[Event], None],
) -> None:
    """Raises if a run that is resumed has other settings, or another model unless --accept-changed-model is set."""
    run_folder.check_same_run(folder, config.record())
    before = {name: value for name, value in run_folder.recorded(folder).items() if name in ("lr", "steps")}
    is_changed = any(value != getattr(config, name) for name, value in before.items())
    check_same_model(
        Folder.of(folder).inner(CHECKPOINTS),
        program,
        as_before=(lambda: trace_workload(load, replace(config, **before), planned)[2]) if is_changed else None,
        accepts=config.accept_changed_model,
        warn=lambda line: emit({"event": "warning", "message": line}),
    )


def _in_recorded_dtype(program: Program, folder: Path, devices: list[Any]) -> Program:
    """Returns the program in the compute dtype of the run that is resumed, whatever the devices prefer."""
    if Folder.of(folder).kind(PLAN) is None:
        return program
    dtype = Plan.of_run(folder).schedule.compute_dtype
    if dtype == default_dtype(program, local(devices)):
        return program
    return program.with_compute_dtype(dtype or "float32")


def _chosen(
    program: Program,
    config: TrainConfig,
    folder: Path,
    devices: list[Any],
    emit: Callable[..., None],
    events: Callable[..., None],
) -> Plan:
    """The plan as asked for; of a run resumed on other devices, where its layout cannot be had, the planner's own.

    Raises:
      SpanaxError: what was asked for cannot be had.
    """
    if config.resume and config.dtype is None:
        program = _in_recorded_dtype(program, folder, devices)
    schedule = requested_schedule(microbatches=config.microbatches, schedule=config.schedule, chunks=config.chunks)
    place = partial(make_plan, program, attention=config.attention, loss_chunks=config.loss_chunks)
    try:
        return place(local(devices), layout=config.layout, mesh=config.mesh, schedule=schedule)
    except SpanaxError as error:
        before = run_folder.recorded(folder) if config.resume else {}
        if not before or before.get("devices") == len(devices) or before.get("layout") != config.layout or config.mesh:
            raise
        plan = _replanned(place, devices)
        reason = first_line(error)
        idle = len(devices) - plan.mesh.size
        emit(
            {
                "event": "warning",
                "message": f"{before.get('devices')} devices before, {len(devices)} now: {reason} Going on with "
                f"{plan.layout.name} on {plan.mesh}" + (f"; {idle} devices idle" if idle else ""),
            }
        )
        events("replanned", reason=reason, idle=idle, before=before.get("devices"), **_placed(plan))
        return plan


def _replanned(place: Callable[..., Plan], devices: list[Any]) -> Plan:
    """The planner's choice for these devices, or for as many of them as it finds a layout for."""
    for count in range(len(devices), 1, -1):
        try:
            return place(local(devices[:count]))
        except SpanaxError:
            continue  # the warning of `_chosen` tells how many devices stay idle
    return place(local(devices[:1]))


def _claimed(config: TrainConfig, stack: ExitStack) -> tuple[Path, RunLock | None]:
    """The run folder, known to all, and the claim of the first process on it."""
    held: list[RunLock] = []

    def claim() -> str:
        folder = Path(config.out or f"runs/{_short(config.workload)}-{time.strftime('%Y%m%d-%H%M%S')}")
        held.append(stack.enter_context(claimed(folder, resume=config.resume, is_supervised=is_supervised())))
        return str(folder)

    return Path(from_first(claim, WriteError)), next(iter(held), None)


def _renewed(claim: RunLock | None, records: Callable[[], None], tell: Callable[[Event], None]) -> str:
    """The run folder, made again where somebody removed it while the run went on."""
    if claim is not None and claim.renew():
        records()
        tell({"event": "warning", "message": f"the run folder '{claim.folder}' was removed, and is made again"})
    return "held"


def _telling(
    about: RunInfo,
    trackers: dict[str, Any],
    records: Callable[[], None],
    emit: Callable[[Event], None],
    events: Callable[..., None],
    stack: ExitStack,
) -> Callable[[Event], None]:
    """Writes the run's records, and returns what takes its events: into its metrics and to its trackers, and emits."""
    records()
    metrics = run_folder.open_metrics(about.folder, about.step)

    def tell(event: Event) -> None:
        nonlocal metrics
        if event["event"] == "rolled_back":
            with suppress(WriteError):  # a full disk keeps the lines of steps that are taken again
                metrics = run_folder.open_metrics(about.folder, event["step"])
        metrics.write(json_line(event))
        if event["event"] == "save_failed":
            events(**event)
        try:
            emit(event)
        except BrokenPipeError:
            raise
        except OSError:
            pass  # standard output may be a file on the same full disk; the metrics have it
        told.take(event)

    told = Trackers(trackers, about, lambda line: tell({"event": "warning", "message": line}))
    stack.callback(told.end)
    return tell


def _events(folder: Path, attempt: int) -> Callable[..., None]:
    """What tells the events of this attempt, once the last sign of life of the one before is among them."""
    events = Events(folder, attempt=attempt)
    time_account.keep_beat(events)
    return events.tell


def _unheard(*args: Any, **values: Any) -> None:
    """What takes the events of a process that does not lead."""


def _compiled(run: Run, config: TrainConfig, beside: Executor) -> Future[None]:
    """Its step compiles while its state is made, unless several processes must do all in one order."""
    prepare = partial(run.prepare, min(config.steps_per_call, config.steps or 1))
    compiled = beside.submit(prepare if jax.process_count() == 1 else lambda: None)
    beside.submit(checkpoint.warm_up)
    beside.submit(lambda: run.program.computation)
    return compiled


def _begun(
    program: Program, plan: Plan, config: TrainConfig, folder: Path, devices: list[Any], emit: Callable[[Event], None]
) -> Run:
    """The run from its newest good checkpoint, or a new one."""
    if config.resume:
        for change in run_folder.changed_versions(folder):
            emit({"event": "warning", "message": f"the run was last in another environment: {change}"})
        if unsealed := run_folder.check_records(folder):
            message = f"{', '.join(unsealed)} of '{folder}' have no checksum: not every cut or change would show"
            emit({"event": "warning", "message": message})
        checkpoints = Folder.of(folder).inner(CHECKPOINTS)
        if manifest.steps(checkpoints):
            warn = lambda line: emit({"event": "warning", "message": line})  # noqa: E731
            return restore(program, plan, checkpoints, devices=devices, warn=warn, guard=config.guard)
        emit({"event": "warning", "message": f"'{folder}' has no finished checkpoint: starting from step 0"})
    return start(
        program, plan, seed=config.seed, devices=devices, guard=config.guard, init=config.init,
        partial=config.init_partial,
    )  # fmt: skip


def _first_events(run: Run, config: TrainConfig, folder: Path, data: Batches) -> Iterator[Event]:
    """The events before the first step: the start, what a partial init loaded, and what listens to everybody."""
    yield _start_event(run, config, folder, data)
    if jax.process_count() > 1 and (addresses := [address for address in open_ports() if is_public(address)]):
        message = public_warning(addresses)
        if not is_first():  # its events go nowhere, and its standard error into its log
            print(f"spanax: {message}", file=sys.stderr)
        yield {"event": "warning", "message": message}
    if config.init_partial and run.loaded is not None:
        yield {"event": "init", **asdict(run.loaded)}


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
        "data": [asdict(each) | {"epochs": each.epochs(config.steps or 0)} for each in data.shares],
    }


def _placed(plan: Plan) -> dict[str, Any]:
    return {"layout": plan.layout.name, "mesh": dict(plan.mesh.axes), "devices": plan.mesh.size}


def _short(workload: str) -> str:
    return workload.rpartition(":")[2]
