"""`spanax check`: compares a layout with XLA, without the devices."""

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from spanax.commands.answer import Answer
from spanax.errors import SpanaxError, first_line
from spanax.trace.optimizers.recipe import Recipe
from spanax.train.flags import (
    LayoutFlags,
    LayoutRequest,
    Load,
    Precision,
    PrecisionFlags,
    RecipeFlags,
    SizeFlags,
    Sizes,
    check_numbers,
)
from spanax.usage import require

if TYPE_CHECKING:
    from spanax.check.parity.parity import Parity
    from spanax.check.report import Report
    from spanax.hardware.cluster import Cluster
    from spanax.plan.plan import Plan
    from spanax.trace.program import Program


@dataclass(frozen=True)
class CheckCommand:
    """Compile a layout with XLA, without the devices, and compare bytes, FLOPs and collectives with the predicted ones.

    Attributes:
      workload: a name, or file.py:name.
      on: the devices: v5e:4x4, v5p:8x8x8, h100:8x8, cpu:8; or a cloud's name: p5.48xlarge, v5litepod-16.
      plan: a plan file instead of a layout.
      level: 0 shapes, 1 the partitioner's passes, 2 simulated devices, 3 the chips' own compiler. Default: the highest
        available.
      timeout: time limit of a compiler, in seconds.
      codegen: also generate machine code; takes minutes and adds no figures.
      inputs_only: constrain only the state and the batch, as a jit with in_shardings does.
      cache: --no-cache compiles again, instead of using the cached report of the same program.
      collectives: list every collective: bytes, mesh axes, tensors, and source line.
      explain_collective: show the details of one collective, by its number in that list.
      profiled: a run folder with a profile; adds findings on the measured steps.
      parity: run the same steps in this layout and on one device, both simulated, and compare the results.
      steps: number of steps for --parity.
      fail_on: exit with 1 if a rule reports this severity or worse: error, warning or info.
      out: write the certificate to this file.
      json: print one JSON object.
      traceback: show the full traceback of an error.
    """

    workload: Positional[str] = ""
    on: str = ""
    sizes: SizeFlags = Sizes()
    precision: PrecisionFlags = Precision()
    recipe: RecipeFlags = Recipe()
    request: LayoutFlags = LayoutRequest()
    plan: Path | None = None
    level: Literal[0, 1, 2, 3] | None = None
    timeout: float = 900.0
    codegen: bool = False
    inputs_only: bool = False
    cache: bool = True
    collectives: bool = False
    explain_collective: int | None = None
    profiled: Path | None = None
    parity: bool = False
    steps: int = 3
    fail_on: Literal["error", "warning", "info"] | None = None
    out: Path | None = None
    json: bool = False
    traceback: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """All flags by name."""
        return {**vars(self), **vars(self.sizes), **vars(self.precision), **vars(self.recipe), **vars(self.request)}


def answer(command: CheckCommand, load: Load | None = None) -> Answer:
    """Returns the report with the findings; the exit code is 1 if one is as severe as --fail-on.

    Args:
      command: the flags.
      load: builds the workload, given its sizes. Default: `command.workload` by name.

    Raises:
      SpanaxError: the request is invalid.
      CompilerError: the compiler crashed, rejected the program or exceeded the timeout.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # uses no accelerator, and looking for one may take minutes

    from spanax.check.check import check
    from spanax.check.compilers.target import other_compiler
    from spanax.check.finding import most_severe_first
    from spanax.check.lint.lint import lint, lint_profile, source_text, without_allowed
    from spanax.check.profile import read_profile
    from spanax.models.workloads import load as load_by_name
    from spanax.processes.devices import DEFAULT_SIMULATED, simulate
    from spanax.processes.gpu_memory import setting_text

    machine = _machine(command)
    # Before the workload, whose file may make arrays and start JAX with fewer devices.
    devices = simulate(DEFAULT_SIMULATED) if command.parity else []
    load = load or partial(load_by_name, command.workload)
    program, plan = _planned(command, load, machine)
    source = source_text(command.workload)
    without_allowed([], source, plan.allow)  # reports unknown codes before compilation
    profile_findings = lint_profile(read_profile(command.profiled)) if command.profiled is not None else []
    report = check(
        program,
        plan,
        machine,
        level=command.level,
        timeout=command.timeout,
        codegen=command.codegen,
        inputs_only=command.inputs_only,
        cache=command.cache,
    )
    findings = most_severe_first([*lint(program, plan, machine, report), *profile_findings])
    report = replace(report, findings=tuple(without_allowed(findings, source, plan.allow)))
    notes = [] if command.out is None else _certify(command.out, report, program, plan, machine)
    environment = machine.memory_setting(report.compiled.peak_bytes or report.upper_bytes or 0) if report.fits else {}
    notes += [setting_text(environment, is_set=False)] if environment else []
    notes += [note] if report.level == 3 and (note := other_compiler(machine)) else []
    parity = _parity(command, load, program, plan, devices) if command.parity else None
    reply = _answer(command, report, parity, notes)
    return replace(reply, data=reply.data | {"environment": environment})


def _machine(command: CheckCommand) -> "Cluster":
    """Returns the requested devices, after checks that need no workload."""
    from spanax.hardware.cluster import cluster

    require("check", command.workload, command.on, "v5e:4x4")
    command.request.check_layout()
    command.precision.check_dtype(command.recipe.lora)
    check_numbers(command.recipe)
    return cluster(command.on)


def _planned(command: CheckCommand, load: Load, machine: "Cluster") -> "tuple[Program, Plan]":
    """Returns the program and the plan to check: that of --plan, or the best for the requested layout."""
    from spanax.plan.choose import plan
    from spanax.plan.plan import Plan
    from spanax.train.config import check_alone, planned_settings

    request = command.request
    loaded = None
    if command.plan is not None:
        loaded = Plan.load(command.plan)
        check_alone({name: command.settings[name] for name in planned_settings(command.recipe.lora)})
    program = request.trace(command.sizes.load(load), command.precision, planned=loaded, recipe=command.recipe)
    chosen = loaded or plan(
        program,
        machine,
        layout=request.layout,
        mesh=request.mesh,
        schedule=request.step_schedule,
        attention=request.attention,
        loss_chunks=request.loss_chunks,
        pad=request.pad,
        offload=request.offload,
    )
    request.check_stages(chosen.schedule.num_stages > 1)
    return program, chosen


def _certify(path: Path, report: "Report", program: "Program", plan: "Plan", machine: "Cluster") -> list[str]:
    """Writes the certificate with the plan's predicted cost; returns a note if the cost cannot be predicted."""
    from spanax.plan.evaluate import evaluate

    notes: list[str] = []
    try:
        plan = replace(plan, price=evaluate(program, plan, machine).prediction)
    except SpanaxError as error:
        notes.append(f"note: the certificate has no predicted cost: {first_line(error)}")
    replace(report, plan=plan).save(path)
    return [*notes, f"the certificate is in {path}"]


def _parity(command: CheckCommand, load: Load, program: "Program", plan: "Plan", devices: list[Any]) -> "Parity":
    """Returns the differences between the planned layout and one device, both on simulated devices."""
    from spanax.check.parity.shrink import parity_of

    trace = partial(
        command.request.trace,
        precision=command.precision,
        planned=plan,
        recipe=command.recipe,
    )
    return parity_of(load, trace, program, plan, steps=command.steps, devices=devices[: plan.mesh.size])


def _answer(command: CheckCommand, report: "Report", parity: "Parity | None", notes: list[str]) -> Answer:
    from spanax.check.finding import Severity
    from spanax.show.check import collective_text, collectives_text, parity_text, report_json, report_text

    findings = report.findings
    data = report_json(report) | {"findings": [finding.to_json() for finding in findings]}
    lines = [report_text(report)]
    lines += ["", *map(str, findings)] if findings else ["no findings"]
    if command.collectives:
        lines += ["", collectives_text(report.collectives)]
    if command.explain_collective is not None:
        lines += ["", collective_text(report.collectives, command.explain_collective)]
    if parity is not None:
        lines, data = [*lines, "", parity_text(parity)], data | {"parity": parity.to_json()}
    lines += ["", *notes] if notes else []
    limit = Severity(command.fail_on) if command.fail_on else None
    is_failed = limit is not None and any(finding.severity >= limit for finding in findings)
    return Answer("\n".join(lines), data, exit_code=1 if is_failed else 0)
