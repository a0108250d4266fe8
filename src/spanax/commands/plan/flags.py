"""The flags of `spanax plan`, and what they request."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction

from spanax.errors import ConflictError, MissingError
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
from spanax.usage import flag, require

if TYPE_CHECKING:
    from spanax.hardware.cluster import Cluster
    from spanax.plan.candidate import Search
    from spanax.plan.candidates.request import Request
    from spanax.trace.program import Program

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
      generate: plan generation instead of training: prefill, decode step, caches, and the largest batch that fits, for
        --global-batch-size sequences of --seq-len tokens; --dtype is that of the parameters. Not for flags of training.
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
    generate: bool = False
    price: Annotated[tuple[str, ...], UseAppendAction] = ()
    budget_hours: float | None = None
    save_seconds: float = 60.0
    calibrate: Annotated[tuple[Path, ...], UseAppendAction] = ()
    out_cluster: Path | None = None
    compile: bool = True
    json: bool = False
    traceback: bool = False


def clusters(command: PlanCommand) -> list[str]:
    """Returns the names of --on, which may be repeated, and have commas."""
    return [name.strip() for names in command.on for name in names.split(",") if name.strip()]


def check(command: PlanCommand) -> None:
    """Raises SpanaxError if a flag is missing, out of its range, or contradicts another."""
    require("plan", command.workload, ",".join(clusters(command)), "a100-80gb:8")
    command.request.check_layout(command.why)
    command.precision.check_dtype(command.recipe.lora)
    for flags in (command.recipe, command.request, command):
        check_numbers(flags)
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


def priced(
    command: PlanCommand, load: Load, machine: "Cluster", program: "Program | None" = None
) -> "tuple[Search, Program]":
    """Returns all priced layouts that the flags allow, and the program; traces it, unless it is an argument."""
    from spanax.plan.choose import searched

    began = time.perf_counter()
    program = program or traced(command, load)
    trace_seconds = time.perf_counter() - began
    is_page = command.html is not None
    top = max(command.top, MAX_ON_PAGE if is_page else 1)
    search = searched(program, machine, request_of(command), top=top, each=is_page)
    command.request.check_stages(search.best is None or search.best.num_stages > 1)
    return replace(search, trace_seconds=trace_seconds + search.trace_seconds), program


def traced(command: PlanCommand, load: Load) -> "Program":
    """Returns the train step of the workload."""
    workload = command.sizes.load(load)
    return command.request.trace(workload, command.precision, recipe=command.recipe)


def request_of(command: PlanCommand) -> "Request":
    """Returns what a search is asked for."""
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
