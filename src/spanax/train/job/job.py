"""A training job: a workload with resolved settings, its program, its plan and its data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax

from spanax.entries.folder import Folder
from spanax.entries.names import CHECKPOINTS, CONFIG
from spanax.errors import DeviceCountError, TooFewExamplesError, WorkloadError, first_line
from spanax.plan.plan import Plan
from spanax.step.placement import flagged
from spanax.trace.program import Program
from spanax.trace.workload import Workload
from spanax.train.config import TrainConfig, profiled_steps, with_settings
from spanax.train.data.batches import Batches, batches
from spanax.train.data.open_source import is_named
from spanax.train.job.plan_choice import choose_plan
from spanax.train.program_digest import check_same_model
from spanax.train.record import folder as run_folder
from spanax.train.record.telemetry import Telemetry
from spanax.train.workload_tracing import source_of, template_of, tokenizer_of, trace_workload

OF_SCHEDULE = ("learning_rate", "steps", "schedule", "warmup_steps", "weight_decay", "max_grad_norm")
"""Settings of the optimizer that a resumed run may change."""


@dataclass(frozen=True)
class Job:
    """What `spanax train` trains.

    Attributes:
      workload: the model, its loss and its data.
      config: the settings, with the workload's defaults filled in.
      program: the traced train step.
      plan: the sharding of the program.
      devices: the devices to use.
    """

    workload: Workload
    config: TrainConfig
    program: Program
    plan: Plan
    devices: Sequence[Any]

    @cached_property
    def mesh(self) -> jax.sharding.Mesh:
        """The plan's mesh of devices."""
        return self.plan.mesh.build(self.devices)

    def read(self, source: Any, *, epochs: int | None = None, **options: Any) -> Batches:
        """Returns the sharded batches of a source, with options as in `spanax.batches`."""
        config = self.config
        return batches(
            source,
            self.plan,
            mesh=self.mesh,
            tokenizer=tokenizer_of(config),
            chat_template=template_of(config),
            seed=config.seed,
            field=config.field,
            epochs=epochs,
            **options,
        )

    def batches(self) -> Batches:
        """Returns the training batches, without end."""
        return self.read(source_of(self.config, self.workload))

    def held_out_batches(self, telemetry: Telemetry) -> Batches | None:
        """Returns the held-out batches from the first one; None if the workload has no held-out examples."""
        held_out = partial(self.read, shuffle=False, epochs=1, drop_remainder=False)
        source = source_of(self.config, self.workload)
        if is_named(source):
            try:
                return held_out(source, split="validation")
            except TooFewExamplesError as error:
                telemetry.warn(f"no held-out loss: {first_line(error)}")
                return None
        return None if self.workload.validation is None else held_out(self.workload.validation)


def build(load: Callable[..., Workload], config: TrainConfig, devices: Sequence[Any], telemetry: Telemetry) -> Job:
    """Traces a workload and chooses its plan.

    Raises:
      SpanaxError: the settings are inconsistent, or differ from those of a run that is resumed.
    """
    plan_file = None if config.plan is None else _load_plan(config.plan, len(devices))
    trace = partial(trace_workload, load, planned=plan_file, platform=devices[0].platform)
    workload, config, program = trace(replace(config, devices=len(devices)))
    if config.resume:
        _check_same_run(config, program, trace, telemetry)
    profiled_steps(config)
    plan = plan_file or choose_plan(program, config, devices, telemetry)
    plan = flagged(plan, config.xla_flags, devices)
    config.check_stages(plan.schedule.num_stages > 1)
    if workload.evaluate is not None and workload.validation is None and not is_named(source_of(config, workload)):
        raise WorkloadError(
            f"workload '{config.workload}' has an `evaluate`, and no held-out examples.",
            fix="validation=... in your spanax.Workload",
        )
    return Job(workload, config, program, plan, devices)


def _load_plan(path: str, num_devices: int) -> Plan:
    """Returns the plan of --plan.

    Raises:
      SpanaxError: it is for another number of devices.
    """
    plan = Plan.load(path)
    if plan.mesh.size != num_devices:
        raise DeviceCountError(
            f"the plan is for {plan.mesh.size} devices, but {num_devices} are available.",
            where=f"--plan {path}, mesh {plan.mesh}",
            fix=f"--devices {plan.mesh.size}, or a plan for {num_devices}",
        )
    return plan


def _check_same_run(
    config: TrainConfig,
    program: Program,
    trace: Callable[[TrainConfig], tuple[Workload, TrainConfig, Program]],
    telemetry: Telemetry,
) -> None:
    """Raises if a resumed run has other settings, or another model unless --accept-changed-model is set."""
    folder = telemetry.folder
    run_folder.check_same_run(folder, config.record())
    recorded = with_settings(TrainConfig(), run_folder.recorded(folder), str(folder / CONFIG))
    before = {name: getattr(recorded, name) for name in OF_SCHEDULE}
    is_changed = any(value != getattr(config, name) for name, value in before.items())
    check_same_model(
        Folder.of(folder).inner(CHECKPOINTS),
        program,
        as_before=(lambda: trace(replace(config, **before))[2]) if is_changed else None,
        accepts=config.accept_changed_model,
        warn=telemetry.warn,
    )
