"""Starts or restores the run of a training job while its step compiles."""

from concurrent.futures import Executor, Future
from functools import partial

import jax

from spanax.entries.folder import Folder
from spanax.entries.names import CHECKPOINTS
from spanax.plan.place import as_planned
from spanax.train.job.job import Job
from spanax.train.record import folder as run_folder
from spanax.train.record.telemetry import Telemetry
from spanax.train.run import Run
from spanax.train.state.restore import restore
from spanax.train.state.start import start
from spanax.train.store import checkpoint, manifest


def begin(job: Job, telemetry: Telemetry, worker: Executor) -> Run:
    """Returns a new run or, with --resume, the restored one, with its step compiled.

    `worker` compiles the step while the state is initialized.
    """
    telemetry.beat("restore", 0)
    ledger = telemetry.ledger
    program = as_planned(job.program, job.plan)
    run = Run(program, job.plan, job.mesh, [], guard=job.config.guard, measures_load=True)
    if job.config.eval_every and run.program.run_evaluate is None:
        _ = run.program.evaluation  # an error in it is raised before the first step
    with ledger.within("restore" if job.config.resume else ledger.bucket):
        compiled = _compile(run, job, worker)
        run.go_back(partial(start_or_restore, job, telemetry, resume=job.config.resume))
    telemetry.beat("compile", run.num_steps)
    with ledger.within("compile"):
        compiled.result()
    return run


def start_or_restore(job: Job, telemetry: Telemetry, *, resume: bool) -> Run:
    """Returns the run restored from its newest intact checkpoint, or a new one."""
    config = job.config
    plan = job.plan
    if resume:
        for change in run_folder.changed_versions(telemetry.folder):
            telemetry.warn(f"the environment has changed since the run was last started: {change}")
        steps = Folder.of(telemetry.folder).inner(CHECKPOINTS)
        if manifest.steps(steps):
            return restore(job.program, plan, steps, devices=job.devices, warn=telemetry.warn, guard=config.guard)
        telemetry.warn(f"'{telemetry.folder}' has no finished checkpoint: starting from step 0")
    return start(
        job.program,
        plan,
        seed=config.seed,
        devices=job.devices,
        guard=config.guard,
        init=config.init,
        partial=config.init_partial,
    )


def _compile(run: Run, job: Job, worker: Executor) -> Future[None]:
    """Compiles the step in the background; later, if several processes must compile in the same order."""
    prepare = partial(run.prepare, min(job.config.steps_per_call, job.config.steps or 1))
    compiled = worker.submit(prepare if jax.process_count() == 1 else lambda: None)
    worker.submit(checkpoint.orbax_v1)  # otherwise the first save blocks for seconds
    worker.submit(lambda: run.program.computation)
    return compiled
