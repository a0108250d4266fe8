"""Ranks every layout of a workload, with what each flag adds to the answer."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spanax.commands.answer import Answer
from spanax.commands.plan.flags import PlanCommand, priced, request_of
from spanax.errors import ConflictError, FileErrors, SpanaxError, WriteError, first_line
from spanax.train.flags import Load

if TYPE_CHECKING:
    from spanax.hardware.cluster import Cluster
    from spanax.plan.advice.summary import Summary
    from spanax.plan.calibration.calibrate import Calibration
    from spanax.plan.candidate import Search
    from spanax.plan.plan import Plan
    from spanax.trace.program import Program

Extra = tuple[list[str], dict[str, Any]]
"""Lines of text and entries of the JSON object that a flag adds to the answer."""


def ranked(command: PlanCommand, load: Load, machine: "Cluster") -> Answer:
    """Returns the fastest layouts, and what the flags add; the exit code is 2 if nothing fits."""
    from spanax.check.best_compiled import with_best_compiled
    from spanax.plan.advice.summary import summarize
    from spanax.plan.choose import decided, fits_with
    from spanax.show.search import search_json, search_text

    request = command.request
    best = replace(command, request=request.placed(request.layout, request.mesh))  # without what is for --why alone
    search, program = priced(best, load, machine)
    calibrated: Extra = ([], {})
    if command.calibrate:
        before = search
        calibration = _calibration(command, program, machine)
        machine = calibration.cluster
        search, _ = priced(best, load, machine, program)
        calibrated = _calibrated(command, calibration, before, search)
    search, compiled = with_best_compiled(search) if command.compile else (search, ())
    summary = summarize(search, fits_with(search, program, request_of(command)))
    lines = [*calibrated[0], search_text(summary, command.top), *map(str, compiled)]
    data = search_json(summary, command.top) | calibrated[1] | {"compiled": [asdict(each) for each in compiled]}
    if search.best is None:
        lines += [] if command.html is None else [_write_page(command.html, summary, None, command)]
        return Answer("\n".join(lines), data, exit_code=2)
    plan = decided(program, machine, request_of(best), search)
    for more_lines, more_data in _extras(command, load, summary, plan, program):
        lines, data = lines + more_lines, data | more_data
    return Answer("\n".join(lines), data)


def _calibration(command: PlanCommand, program: "Program", machine: "Cluster") -> "Calibration":
    """Returns the devices of --on, calibrated on the measured steps of --calibrate."""
    from spanax.check.measure.measured_runs import Requested, measured_steps
    from spanax.models.workloads import WORKLOADS
    from spanax.models.workloads import load as load_by_name
    from spanax.plan.calibration.calibrate import calibrate

    def load_known(name: str, **sizes: Any) -> Any:
        if name not in WORKLOADS and name != command.workload:  # a run folder does not choose which code runs
            raise ConflictError(f"'{name}' is neither a workload of Spanax nor '{command.workload}'.")
        return load_by_name(name, **sizes)

    return calibrate(measured_steps(command.calibrate, Requested(program, machine, load_known)), machine)


def _calibrated(command: PlanCommand, calibration: "Calibration", before: "Search", after: "Search") -> Extra:
    """Writes the calibrated devices, if requested, and returns the comparison of before and after."""
    from spanax.hardware.cluster import cluster, cluster_text
    from spanax.show.calibration import calibration_json, calibration_text

    lines = [*calibration_text(calibration, before, after)]
    if command.out_cluster is not None and not calibration.is_applied:
        lines.append(f"{command.out_cluster} was not written: nothing was calibrated")
    elif command.out_cluster is not None:
        with FileErrors(WriteError, f"cannot write '{command.out_cluster}'."):
            command.out_cluster.write_text(cluster_text(calibration.cluster))
        cluster(str(command.out_cluster))  # raises if a number is not plausible
        lines.append(f"written to {command.out_cluster}: spanax plan {command.workload} --on {command.out_cluster}")
    return [*lines, ""], {"calibration": calibration_json(calibration, before, after)}


def _extras(command: PlanCommand, load: Load, summary: "Summary", plan: "Plan", program: "Program") -> list[Extra]:
    """Returns what each flag adds, in the order of the answer."""
    from spanax.show.search import chunked_logits, explained

    extras = list[Extra]()
    search = summary.search
    machine = search.cluster
    if command.out is not None or command.html is not None:
        extras.append((_write(command, summary, plan), {}))
    if command.explain is not None:
        extras.append(explained(search, plan, command.explain))
    if command.request.loss_chunks is not None:
        extras.append(chunked_logits(search, plan))
    if command.why is not None:
        extras.append(_why(command, load, search, plan, program, command.why))
    if command.request.layout is not None or command.request.mesh is not None:
        extras.append(_compared_with_best(command, load, search, program))
    if command.tokens is not None or command.examples is not None or command.price:
        extras.append(_run(command, search, machine))
    return extras


def _write(command: PlanCommand, summary: "Summary", plan: "Plan") -> list[str]:
    """Writes the plan with its predicted cost, and the page."""
    from spanax.plan.evaluate import with_price

    lines = []
    search = summary.search
    assert search.best is not None
    try:
        plan = with_price(plan, search, search.best)
    except SpanaxError as error:
        lines.append(f"note: the plan has no predicted cost: {first_line(error)}")
    if command.html is not None:
        lines.append(_write_page(command.html, summary, plan, command))
    if command.out is not None:
        plan.save(command.out)
        lines.append(f"written to {command.out}: spanax train {command.workload} --plan {command.out}")
    return lines


def _write_page(path: Path, summary: "Summary", plan: "Plan | None", command: PlanCommand) -> str:
    from spanax.show.page.document import write
    from spanax.show.page.plan import search_page

    return write(search_page(summary, plan, command.workload), path)


def _why(command: PlanCommand, load: Load, search: "Search", plan: "Plan", program: "Program", asked: str) -> Extra:
    """Returns the best plan beside a requested layout or mesh, or what would admit it."""
    from spanax.plan.choose import fits_with
    from spanax.show.difference import why_json, why_text

    beside = replace(command, request=command.request.beside(asked))
    try:
        other, _ = priced(beside, load, search.cluster, program)
        data = why_json(search, plan, other, fits_with(other, program, request_of(beside)))
    except SpanaxError as error:
        data = {"problem": str(error)}
    data = {"asked": asked} | data
    return ["", why_text(data)], {"why": data}


def _compared_with_best(command: PlanCommand, load: Load, search: "Search", program: "Program") -> Extra:
    """Returns warnings on a requested layout, compared with the best of all layouts."""
    from spanax.plan.advice.rules_of_thumb import warnings

    open_command = replace(command, request=replace(command.request.placed(None, None), pad=None))
    unrestricted, _ = priced(open_command, load, search.cluster, program)
    assert search.best is not None
    lines = warnings(unrestricted, search.best)
    return [f"note: {line}" for line in lines], {"warnings": lines}


def _run(command: PlanCommand, search: "Search", machine: "Cluster") -> Extra:
    """Returns the hours of a run, and its cost if the price of a device is known."""
    from spanax.plan.advice.quotes import dollars_of, prices_of
    from spanax.plan.advice.what_if import budget
    from spanax.show.quotes import run_text

    (price,) = dollars_of(prices_of(command.price), [machine])
    kind = "tokens" if command.examples is None else "examples"
    count = command.tokens if command.examples is None else command.examples
    per_step = search.tokens_per_step if command.examples is None else search.batch_size
    if count is None:
        hourly = (price or 0.0) * machine.num_devices
        return [f"{hourly:,.4g} dollars per hour, {price} per device"], {"dollars_per_hour": hourly}
    if per_step is None:
        raise ConflictError("--tokens: a batch of this model has no tokens.", fix=f"--examples {count:g}")
    total = budget(search, per_step, count, hours=command.budget_hours, save_seconds=command.save_seconds)
    cost = None if price is None else price * total.device_hours
    data = {"budget_hours": command.budget_hours, "dollars_per_device_hour": price, "cost_dollars": cost}
    return [run_text(total, kind, cost)], {"budget": asdict(total) | data}
