"""The plan of a training job: as requested, or replanned for a run resumed on other devices."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from spanax.entries.folder import Folder
from spanax.entries.names import PLAN
from spanax.errors import SpanaxError, first_line
from spanax.hardware.cluster import local
from spanax.plan.choose import plan as make_plan
from spanax.plan.defaults import default_dtype
from spanax.plan.plan import Plan
from spanax.trace.program import Program
from spanax.train.config import TrainConfig
from spanax.train.record import folder as run_folder
from spanax.train.record.telemetry import Telemetry


def choose_plan(program: Program, config: TrainConfig, devices: Sequence[Any], telemetry: Telemetry) -> Plan:
    """Returns the plan that the settings request.

    A run resumed on another number of devices, to which its layout does not apply, is replanned with a warning.

    Raises:
      SpanaxError: no plan satisfies the settings.
    """
    folder = telemetry.folder
    if config.resume and config.dtype is None:
        program = in_recorded_dtype(program, folder, devices)
    place = partial(
        make_plan,
        program,
        attention=config.attention,
        loss_chunks=config.loss_chunks,
        pad=config.pad,
        offload=config.offload,
    )
    try:
        return place(local(devices), layout=config.layout, mesh=config.mesh, schedule=config.step_schedule)
    except SpanaxError as error:
        before = run_folder.recorded(folder) if config.resume else {}
        if not before or before.get("devices") == len(devices) or before.get("layout") != config.layout or config.mesh:
            raise
        plan = _replanned(place, devices)
        reason = first_line(error)
        num_idle = len(devices) - plan.mesh.size
        idle = f"; {num_idle} devices idle" if num_idle else ""
        telemetry.warn(
            f"{before.get('devices')} devices before, {len(devices)} now: {reason} Continuing with {plan.title}{idle}"
        )
        replanned = {"event": "replanned", "reason": reason, "idle": num_idle, "before": before.get("devices")}
        telemetry.report(replanned | placement(plan))
        return plan


def placement(plan: Plan) -> dict[str, Any]:
    """Returns the layout, the mesh and the number of devices of a plan, as JSON values."""
    return {"layout": plan.layout.name, "mesh": dict(plan.mesh.axes), "devices": plan.mesh.size}


def in_recorded_dtype(program: Program, folder: Path, devices: Sequence[Any]) -> Program:
    """Returns the program in the compute dtype of the run that is resumed, whatever the default of the devices."""
    if Folder.of(folder).kind(PLAN) is None:
        return program
    dtype = Plan.of_run(folder).schedule.compute_dtype
    if dtype == default_dtype(program, local(devices)):
        return program
    return program.variant(compute_dtype=dtype or "float32")


def _replanned(place: Callable[..., Plan], devices: Sequence[Any]) -> Plan:
    """Returns the planner's choice for all devices, or for the most devices to which a layout applies."""
    for count in range(len(devices), 1, -1):
        try:
            return place(local(devices[:count]))
        except SpanaxError:
            continue  # the warning of `choose_plan` has the number of idle devices
    return place(local(devices[:1]))
