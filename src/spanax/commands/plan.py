"""`spanax plan`: ranks every layout of a workload on a cluster, and answers questions of size and budget."""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction

from spanax.commands.answer import Answer
from spanax.errors import CapacityError, ConflictError, FileErrors, MissingError, SpanaxError, WriteError, first_line
from spanax.trace.optimizers.recipe import Recipe
from spanax.train.flags import (
    Count,
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
from spanax.usage import check_positive, flag, require

if TYPE_CHECKING:
    from spanax.hardware.cluster import Cluster
    from spanax.plan.advice.summary import Summary
    from spanax.plan.calibration.calibrate import Calibration
    from spanax.plan.candidate import Search
    from spanax.plan.candidates.request import Request
    from spanax.plan.plan import Plan
    from spanax.trace.program import Program

Extra = tuple[list[str], dict[str, Any]]
"""Lines of text and entries of the JSON object that a flag adds to the answer."""

FIELDS = {"batch": "global_batch_size", "seq": "seq_len", "layers": "layers", "embed": "embed"}
"""By size that can be solved for: the field of its flag."""

MAX_ON_PAGE = 400
"""Number of layouts on a page that fit, and of layouts that do not."""


@dataclass(frozen=True)
class PlanCommand:
    """Predict step time and memory of every layout of a workload on devices you have or plan to rent, and rank them.

    Attributes:
      workload: a name, or file.py:name.
      on: the devices: a100-80gb:8x8, v5p:8x8x8, cpu:8, mine.toml; or a cloud's name: p5.48xlarge, v5litepod-16.
        Several, with commas or repeated, are compared in one table.
      pipeline: always consider pipeline stages. Default: on several nodes, or if nothing fits without.
      no_pipeline: never consider pipeline stages.
      top: number of candidates to list.
      out: write the best plan to this file, for spanax train --plan.
      html: write the ranked layouts to this HTML file, in a table to sort and filter.
      why: show a layout or a mesh, such as fsdp+tensor or fsdp=4,model=2, beside the best: the time of each term, and
        what moves at which line of the model.
      explain: show one array: its sharding, the reason, and the collectives for it.
      diff: compare two plan files in the same way, and the placement of every array, without planning.
      solve_for: the largest batch, seq, layers or embed that fits, or the smallest number of devices on which it fits.
      target_mfu: the smallest batch that reaches this MFU, in percent.
      tokens: number of training tokens, such as 300B or 1e12; reports hours and device-hours.
      examples: number of training examples, instead of --tokens, for models of other data.
      price: dollars per device-hour of a chip or cluster file, such as h100=2.9; may be repeated.
      budget_hours: with --tokens, report whether this many hours suffice.
      save_seconds: seconds per checkpoint, to choose the interval of checkpoints.
      calibrate: fit the constants of the devices to the measured steps of this run folder, or of a file of spanax
        compare --json; may be repeated.
      out_cluster: with --calibrate, write the calibrated devices to this cluster file, for --on.
      compile: --no-compile only estimates memory, also where the compiler of the chips (libtpu, CUDA) is installed.
      json: print one JSON object.
      traceback: show the full traceback of an error.
    """

    workload: Positional[str] = ""
    on: Annotated[tuple[str, ...], UseAppendAction] = ()
    sizes: SizeFlags = Sizes()
    precision: PrecisionFlags = Precision()
    recipe: RecipeFlags = Recipe()
    request: LayoutFlags = LayoutRequest()
    pipeline: Annotated[bool, FlagCreatePairsOff] = False
    no_pipeline: Annotated[bool, FlagCreatePairsOff] = False
    top: int = 10
    out: Path | None = None
    html: Path | None = None
    why: str | None = None
    explain: str | None = None
    diff: tuple[Path, Path] | None = None
    solve_for: Literal["batch", "seq", "layers", "embed", "devices"] | None = None
    target_mfu: float | None = None
    tokens: Count = None
    examples: Count = None
    price: Annotated[tuple[str, ...], UseAppendAction] = ()
    budget_hours: float | None = None
    save_seconds: float = 60.0
    calibrate: Annotated[tuple[Path, ...], UseAppendAction] = ()
    out_cluster: Path | None = None
    compile: bool = True
    json: bool = False
    traceback: bool = False


def answer(command: PlanCommand, load: Load | None = None) -> Answer:
    """Returns the ranked layouts, or the answer to one question; the exit code is 2 if nothing fits.

    Args:
      command: the flags.
      load: builds the workload, given its sizes. Default: `command.workload` by name.

    Raises:
      SpanaxError: the request is invalid.
    """
    from spanax.plan.plan import Plan
    from spanax.show.difference import difference_json, difference_text
    from spanax.show.live.waiting import waiting

    if command.diff is not None:
        data = difference_json(*map(Plan.load, command.diff))
        return Answer(difference_text(data), data)
    _check(command)
    with waiting(sys.stderr):
        return _answer(command, load)


def _answer(command: PlanCommand, load: Load | None) -> Answer:
    from spanax.hardware.cluster import cluster
    from spanax.models.workloads import load as load_by_name
    from spanax.plan.advice.quotes import checked_prices

    load = load or partial(load_by_name, command.workload)
    names = _clusters(command)
    if len(names) > 1:
        return _quoted(command, load, names)
    machine = cluster(names[0])
    checked_prices(command.price, names)
    if command.solve_for == "devices":
        return _fewest_devices(command, load, machine)
    if command.solve_for is not None:
        return _largest(command, load, machine, command.solve_for)
    if command.target_mfu is not None:
        return _target_mfu(command, load, machine)
    return _ranked(command, load, machine)


def _clusters(command: PlanCommand) -> list[str]:
    """Returns the names of --on, which may be repeated, and have commas."""
    return [name.strip() for names in command.on for name in names.split(",") if name.strip()]


def _quoted(command: PlanCommand, load: Load, names: Sequence[str]) -> Answer:
    """Returns the answers of several clusters as one table; the exit code is 2 if none has a plan."""
    from spanax.plan.advice.quotes import checked_prices, quoted
    from spanax.plan.choose import decided, fits_with, largest_batch
    from spanax.show.page.document import write
    from spanax.show.page.plan import quotes_page
    from spanax.show.quotes import quotes_json, quotes_text

    single = ("out", "explain", "why", "solve_for", "target_mfu", "budget_hours", "calibrate")
    for name in (flag(name) for name in single if getattr(command, name)):
        raise ConflictError(f"{name} is for one cluster, and --on has {len(names)}.", fix=f"--on {names[0]}")
    prices = checked_prices(command.price, names)
    request = _request(command)
    program = _traced(command, load)
    quotes = quoted(
        names,
        lambda machine: _search(command, load, machine, program)[0],
        lambda machine, search: decided(program, machine, request, search),
        lambda machine: largest_batch(program, machine, request),
        lambda search: fits_with(search, program, request),
    )
    quotes = quotes.priced(prices, tokens=command.tokens, examples=command.examples)
    lines = [quotes_text(quotes)]
    lines += [] if command.html is None else [write(quotes_page(quotes, command.workload), command.html)]
    return Answer("\n".join(lines), quotes_json(quotes, command.top), exit_code=2 * (not any(q.plan for q in quotes)))


def _check(command: PlanCommand) -> None:
    require("plan", command.workload, ",".join(_clusters(command)), "a100-80gb:8")
    command.request.check_layout(command.why)
    command.precision.check_dtype()
    check_numbers(command.recipe)
    check_numbers(command.request)
    counts = {"top": "10", "tokens": "300e9", "examples": "1e6"}
    check_positive(command, **counts, target_mfu="40", budget_hours="500", save_seconds="60")
    if command.tokens is not None and command.examples is not None:
        raise ConflictError("--tokens contradicts --examples.", fix="one of them")
    questions = [flag(name) for name in ("solve_for", "target_mfu") if getattr(command, name) is not None]
    others = [flag(name) for name in ("out", "html", "explain", "why", "tokens") if getattr(command, name) is not None]
    if questions and len(questions + others) > 1:
        raise ConflictError(
            f"{questions[0]} answers one question, without {' or '.join((questions + others)[1:])}.",
            fix="one command for each",
        )
    if questions and command.calibrate:
        raise ConflictError(
            f"{questions[0]} answers one question, without --calibrate.",
            fix=f"--calibrate ... --out-cluster mine.toml, then --on mine.toml {questions[0]} ...",
        )
    if command.out_cluster is not None and not command.calibrate:
        raise MissingError("--out-cluster needs --calibrate, measured steps.", fix="--calibrate runs/a")
    if command.pipeline and command.no_pipeline:
        raise ConflictError("--pipeline contradicts --no-pipeline.", fix="one of them")
    if command.budget_hours is not None and command.tokens is None and command.examples is None:
        raise MissingError("--budget-hours needs --tokens, the number of training tokens.", fix="--tokens 300e9")


def _search(
    command: PlanCommand, load: Load, machine: "Cluster", program: "Program | None" = None
) -> "tuple[Search, Program]":
    """Returns all priced layouts that the flags allow, and the program; traces it, unless it is an argument."""
    from spanax.plan.choose import searched

    began = time.perf_counter()
    program = program or _traced(command, load)
    traced = time.perf_counter() - began
    is_page = command.html is not None
    top = max(command.top, MAX_ON_PAGE if is_page else 1)
    search = searched(program, machine, _request(command), top=top, each=is_page)
    command.request.check_stages(search.best is None or search.best.num_stages > 1)
    return replace(search, trace_seconds=traced + search.trace_seconds), program


def _traced(command: PlanCommand, load: Load) -> "Program":
    workload = command.sizes.load(load)
    dtype = command.precision.dtype
    return command.request.trace(workload, command.precision, dtype=dtype, recipe=command.recipe)


def _request(command: PlanCommand) -> "Request":
    from spanax.plan.candidates.request import Request
    from spanax.trace.jaxpr.remat_policies import known_offload

    request = command.request
    if command.solve_for == "batch" and request.microbatches is None:
        request = replace(request, microbatches=1)  # with enough microbatches, any batch fits
    pipeline = True if command.pipeline else None
    return Request(
        request.layout,
        request.mesh,
        schedule=request.step_schedule,
        attention=request.attention,
        loss_chunks=request.loss_chunks,
        pad=request.pad or ("none" if command.solve_for else None),
        pipeline=False if command.no_pipeline else pipeline,
        offload=None if request.offload is None and not command.solve_for else known_offload(request.offload),
    )


def _ranked(command: PlanCommand, load: Load, machine: "Cluster") -> Answer:
    from spanax.check.best_compiled import with_best_compiled
    from spanax.plan.advice.summary import summarize
    from spanax.plan.choose import decided, fits_with
    from spanax.show.search import search_json, search_text

    request = command.request
    best = replace(command, request=request.placed(request.layout, request.mesh))  # without what is for --why alone
    search, program = _search(best, load, machine)
    calibrated: Extra = ([], {})
    if command.calibrate:
        before = search
        calibration = _calibration(command, program, machine)
        machine = calibration.cluster
        search, _ = _search(best, load, machine, program)
        calibrated = _calibrated(command, calibration, before, search)
    search, compiled = with_best_compiled(search) if command.compile else (search, ())
    summary = summarize(search, fits_with(search, program, _request(command)))
    lines = [*calibrated[0], search_text(summary, command.top), *map(str, compiled)]
    data = search_json(summary, command.top) | calibrated[1] | {"compiled": [asdict(each) for each in compiled]}
    if search.best is None:
        lines += [] if command.html is None else [_write_page(command.html, summary, None, command)]
        return Answer("\n".join(lines), data, exit_code=2)
    plan = decided(program, machine, _request(best), search)
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
        other, _ = _search(beside, load, search.cluster, program)
        data = why_json(search, plan, other, fits_with(other, program, _request(beside)))
    except SpanaxError as error:
        data = {"problem": str(error)}
    data = {"asked": asked} | data
    return ["", why_text(data)], {"why": data}


def _compared_with_best(command: PlanCommand, load: Load, search: "Search", program: "Program") -> Extra:
    """Returns warnings on a requested layout, compared with the best of all layouts."""
    from spanax.plan.advice.rules_of_thumb import warnings

    open_command = replace(command, request=replace(command.request.placed(None, None), pad=None))
    unrestricted, _ = _search(open_command, load, search.cluster, program)
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


def _largest(command: PlanCommand, load: Load, machine: "Cluster", name: str) -> Answer:
    """Returns the largest size of that name that fits."""
    from spanax.errors import SizeError
    from spanax.plan.advice.what_if import largest
    from spanax.plan.choose import nothing_fits

    if name == "batch":
        return _largest_batch(command, load, machine)
    step = {"seq": 128, "layers": 1, "embed": 128}[name]
    default = {"seq": 512, "layers": 8, "embed": 1024}[name]
    start = getattr(command.sizes, FIELDS[name]) or default
    search_at = partial(_search_at, command, load, machine, name)

    def search_or_none(size: int) -> "Search | None":
        try:
            return search_at(size)[0]
        except SizeError:
            raise
        except SpanaxError:
            if size <= step:
                raise
            return None  # no layout divides it

    fitting = largest(search_or_none, start, step)
    if fitting is None:
        raise nothing_fits(f"not even {name} {step} fits on {machine}.", *search_at(step), _request(command))
    return _sized(f"the largest {name} that fits on {machine} is about {fitting[0]}", *fitting, name, command)


def _largest_batch(command: PlanCommand, load: Load, machine: "Cluster") -> Answer:
    """Returns the largest batch that fits, with the layouts at that batch."""
    from spanax.plan.choose import largest_batch, nothing_fits

    program = _traced(command, load)
    request = _request(command)
    found = largest_batch(program, machine, request)
    if found is None:
        raise nothing_fits(f"no batch fits on {machine}.", *_search(command, load, machine, program), request)
    size = found.batch_size
    search, _ = _search_at(command, load, machine, "batch", size)
    return _sized(f"the largest batch that fits on {machine} is {size}", size, search, "batch", command)


def _search_at(command: PlanCommand, load: Load, machine: "Cluster", name: str, size: int) -> "tuple[Search, Program]":
    """Returns the search with one size replaced, and the program."""
    sizes: dict[str, Any] = {FIELDS[name]: size}
    return _search(replace(command, sizes=replace(command.sizes, **sizes)), load, machine)


def _fewest_devices(command: PlanCommand, load: Load, machine: "Cluster") -> Answer:
    from spanax.plan.advice.what_if import fewest_devices

    search = fewest_devices(lambda cluster: _search(command, load, cluster)[0], machine)
    if search is None:
        what = f"the step does not fit on 65536 {machine.chip.name} or fewer."
        raise CapacityError(what, fix="a smaller --global-batch-size, or --remat full")
    count = search.cluster.num_devices
    return _sized(f"the fewest {machine.chip.name} on which it fits are {count}", count, search, "devices", command)


def _target_mfu(command: PlanCommand, load: Load, machine: "Cluster") -> Answer:
    """Doubles the batch until the best layout reaches the requested MFU."""
    target = command.target_mfu or 0.0
    limit = 64 * machine.num_devices
    size = command.sizes.global_batch_size or machine.num_devices
    highest = 0.0
    while (best := (search := _search_at(command, load, machine, "batch", size)[0]).best) is not None:
        highest = max(highest, 100 * (search.rates(best).mfu or 0.0))
        if highest >= target:
            return _sized(f"{target:g} % MFU is reached from a batch of {size}", size, search, "batch", command)
        if size >= limit:
            break
        size *= 2
    what = f"{target:g} % MFU is not reached on {machine} with a batch of up to {size}."
    raise CapacityError(what, where=f"the most is {highest:.1f} %")


def _sized(text: str, size: int, search: "Search", name: str, command: PlanCommand) -> Answer:
    """Returns a size as the answer, with the search at that size."""
    from spanax.plan.advice.summary import summarize
    from spanax.show.search import search_json, search_text

    summary = summarize(search)
    data = {"answer": size, "of": name} | search_json(summary, command.top)
    if command.solve_for and command.request.offload is None and search.cluster.chip.host_bytes_per_second:
        text += "; --solve-for offloads on request only (--offload optimizer)"
    return Answer(f"{text}:\n{search_text(summary, 1)}", data)
