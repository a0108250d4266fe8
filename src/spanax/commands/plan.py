"""Planning: one request to `spanax plan` answered, in text and as plain values."""

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from spanax.commands.requests import PlanCommand
from spanax.errors import SizeError, SpanaxError, first_line
from spanax.hardware.cluster import Cluster, cluster
from spanax.plan.advice.remedies import remedies
from spanax.plan.advice.rules_of_thumb import warnings
from spanax.plan.advice.what_if import budget, fewest_devices, largest
from spanax.plan.candidate import Search, shortfall
from spanax.plan.choose import Request, decided, searched
from spanax.plan.evaluate import collectives_of, evaluate
from spanax.plan.loss_chunks import saved_bytes, suiting_chunks
from spanax.plan.plan import Plan
from spanax.show.page.document import write
from spanax.show.page.search import search_page
from spanax.show.search import candidate_json, search_json, search_text
from spanax.trace.program import Program
from spanax.trace.rewrites.remat_policies import known_attention, known_chunks, known_dtype, known_policy
from spanax.trace.workload import Workload
from spanax.units import bytes_text

Data = dict[str, Any]

ON_PAGE = 400
"""So many layouts that fit, and as many that do not, are on a page."""


def answer(load: Callable[..., Workload], asked: PlanCommand) -> tuple[str, Data]:
    """What `spanax plan` prints: as text, and as the object of --json.

    Raises:
      SpanaxError: the request cannot be carried out.
    """
    _check(asked)
    machine = cluster(asked.on)
    if asked.max is not None:
        return _max(load, asked, machine)
    if asked.target_mfu is not None:
        return _target_mfu(load, asked, machine)
    if asked.min is not None:
        return _min(load, asked, machine)
    found, program = _search(load, asked, machine)
    data = search_json(found, asked.top)
    text = search_text(found, data, asked.top)
    if found.best is not None:
        made = decided(program, machine, _request(asked), found)
        extra_text, extra = _extras(load, asked, found, made, machine)
        text, data = "\n".join([text, *extra_text]), data | extra
    elif asked.html is not None:
        text += "\n" + write(search_page(found, None, asked.workload), asked.html)
    return text, data


def compare(first: Path, second: Path) -> list[str]:
    """What differs between two plan files, a line each."""
    return Plan.load(first).diff(Plan.load(second)) or ["the plans are the same"]


def _check(asked: PlanCommand) -> None:
    if not asked.workload:
        raise SpanaxError("spanax plan needs a workload.", fix="spanax plan gpt2 --on a100-80gb:8")
    if not asked.on:
        raise SpanaxError(
            "spanax plan needs to know the devices.", fix=f"spanax plan {asked.workload} --on a100-80gb:8"
        )
    known_policy(asked.remat)
    known_attention(asked.attention)
    known_chunks(asked.loss_chunks or 1)
    known_dtype(asked.dtype)
    for name in ("top", "target_mfu", "tokens", "budget_hours", "save_seconds"):
        value = getattr(asked, name)
        if value is not None and not value > 0:
            raise SpanaxError(f"--{name.replace('_', '-')} is {value}; it takes a number above 0.")
    answers = [f"--{name}" for name in ("max", "min", "target_mfu") if getattr(asked, name) is not None]
    dropped = [f"--{name}" for name in ("out", "html", "explain", "tokens") if getattr(asked, name) is not None]
    if answers and len(answers + dropped) > 1:
        raise SpanaxError(
            f"{answers[0].replace('_', '-')} answers one question, without {' or '.join((answers + dropped)[1:])}.",
            fix="one command for each",
        )
    if asked.budget_hours is not None and asked.tokens is None:
        raise SpanaxError("--budget-hours needs --tokens: how much is to be trained.", fix="--tokens 300e9")


def _search(load: Callable[..., Workload], asked: PlanCommand, machine: Cluster) -> tuple[Search, Program]:
    sizes = {"batch_size": asked.batch, "seq_len": asked.seq, "num_layers": asked.layers, "embed_dim": asked.embed}
    began = time.perf_counter()
    workload = load(**{name: size for name, size in sizes.items() if size is not None})
    program = workload.trace(
        learning_rate=1e-3, num_steps=100, compute_dtype=asked.dtype, remat=asked.remat,
        optimizer_state=asked.optimizer_state,
        accumulate=asked.accumulate,
    )  # fmt: skip
    traced = time.perf_counter() - began
    top = max(asked.top, 1 if asked.html is None else ON_PAGE)
    # In enough parts any batch fits: the largest is that which goes through in one.
    microbatches = 1 if asked.max == "batch" else None
    request = _request(asked)
    found = searched(program, machine, request, top=top, each=asked.html is not None, microbatches=microbatches)
    return replace(found, trace_seconds=traced + found.trace_seconds), program


def _request(asked: PlanCommand) -> Request:
    return Request(
        asked.layout, asked.mesh, attention=asked.attention, loss_chunks=asked.loss_chunks, pipeline=asked.pipeline
    )


def _extras(
    load: Callable[..., Workload], asked: PlanCommand, found: Search, made: Plan, machine: Cluster
) -> tuple[list[str], Data]:
    """The plan file, one array explained, the user's own layout against the best, and a whole training."""
    best = found.best
    assert best is not None
    text: list[str] = []
    data: Data = {}
    if asked.out is not None or asked.html is not None:
        try:
            program = next(iter(found.programs.values()))
            made = replace(made, price=evaluate(program, made, machine).prediction_as(best))
        except SpanaxError as error:
            text.append(f"note: the plan is without its price: {first_line(error)}")
    if asked.html is not None:
        text.append(write(search_page(found, made, asked.workload), asked.html))
    if asked.out is not None:
        made.save(asked.out)
        text.append(f"written to {asked.out}: spanax train {asked.workload} --plan {asked.out}")
    if asked.explain is not None:
        leaf = made[asked.explain]
        text.append(f"{leaf.path} {leaf.dtype}{list(leaf.shape)} {leaf.axes}: {tuple(leaf.partition_spec)}")
        text.append(f"  {leaf.local_bytes} bytes a device; {leaf.reason or 'as the layout computes with it'}")
        moved = collectives_of(found, best, leaf.path) if leaf.kind != "batch" else {}
        for axes, kinds in moved.items():
            text += [f"  {kind} over {axes}: {bytes_text(size)} a step" for kind, size in kinds.items() if size]
        if not any(size for kinds in moved.values() for size in kinds.values()):
            text.append("  nothing of it moves between devices")
        data["explained"] = asdict(leaf) | {"collectives": moved}
    if asked.loss_chunks is not None:
        line, data["logits"] = _logits(found.programs[best.remat], made, machine)
        text.append(line)
    if asked.layout is not None or asked.mesh is not None:
        free, _ = _search(load, replace(asked, layout=None, mesh=None), machine)
        lines = warnings(free, best)
        text += [f"note: {line}" for line in lines]
        data["warnings"] = lines
    if asked.tokens is not None:
        per_step = float(found.tokens_per_step or found.batch_size)
        whole = budget(found, per_step, asked.tokens, hours=asked.budget_hours, save_seconds=asked.save_seconds)
        data["budget"] = asdict(whole) | {"budget_hours": asked.budget_hours}
        enough = {None: "", True: ", within the budget", False: ", OVER the budget"}[whole.within]
        text.append(
            f"{asked.tokens:.3g} tokens take {whole.hours:.4g} hours, {whole.device_hours:.4g} device-hours{enough}; "
            f"save every {whole.checkpoint_seconds / 60:.0f} minutes"
        )
    return text, data


def _logits(program: Program, made: Plan, machine: Cluster) -> tuple[str, Data]:
    count, saved = made.schedule.loss_chunks, saved_bytes(program, made, machine)
    line = f"logits in {count} chunks of tokens: {bytes_text(saved)} a device less than whole"
    text = line if count > 1 else str(suiting_chunks(program, made, machine)[1])
    return text, {"chunks": count, "saved_bytes": saved}


def _max(load: Callable[..., Workload], asked: PlanCommand, machine: Cluster) -> tuple[str, Data]:
    name = asked.max or ""
    step = {"batch": 1, "seq": 128, "layers": 1, "embed": 128}[name]

    def at(size: int) -> Search | None:
        try:
            return _search(load, _resized(asked, name, size), machine)[0]
        except SizeError:
            raise
        except SpanaxError:
            if size <= step:
                raise
            return None  # a size that no layout divides counts as one that does not fit

    start = getattr(asked, name) or {"batch": machine.num_devices, "seq": 512, "layers": 8, "embed": 1024}[name]
    found = largest(at, start, machine.num_devices if name == "batch" else step)
    if found is None:
        smallest, _ = _search(load, _resized(asked, name, start), machine)
        raise SpanaxError(
            f"not even {name} {start} fits on {machine}: {shortfall(smallest)}.", fix="; or ".join(remedies(smallest))
        )
    size, best = found
    text = f"the largest {name} that fits on {machine} is about {size}"
    return _answered(text, size, name, best, asked)


def _min(load: Callable[..., Workload], asked: PlanCommand, machine: Cluster) -> tuple[str, Data]:
    found = fewest_devices(lambda there: _search(load, asked, there)[0], machine)
    if found is None:
        raise SpanaxError(
            f"no number of {machine.chip.name} up to 65536 is enough.", fix="a smaller batch, or --remat full"
        )
    count = found.cluster.num_devices
    text = f"the fewest {machine.chip.name} on which it fits are {count}"
    return _answered(text, count, "devices", found, asked)


def _resized(asked: PlanCommand, name: str, size: int) -> PlanCommand:
    sizes: dict[str, Any] = {name: size}
    return replace(asked, **sizes)


def _answered(text: str, size: int, name: str, found: Search, asked: PlanCommand) -> tuple[str, Data]:
    """A size as the answer, with the search that it comes from."""
    said = search_json(found, asked.top)
    return f"{text}:\n{search_text(found, said, 1)}", {"answer": size, "of": name} | said


def _target_mfu(load: Callable[..., Workload], asked: PlanCommand, machine: Cluster) -> tuple[str, Data]:
    target = asked.target_mfu or 0.0
    size = asked.batch or machine.num_devices
    best_seen = 0.0
    while True:
        found, _ = _search(load, replace(asked, batch=size), machine)
        if found.best is None:
            break
        best_seen = max(best_seen, 100 * (candidate_json(found, found.best)["mfu"] or 0.0))
        if best_seen >= target:
            text = f"{target:g} % MFU is reached from a batch of {size}"
            return _answered(text, size, "batch", found, asked)
        if size >= 64 * machine.num_devices:
            break
        size *= 2
    raise SpanaxError(
        f"{target:g} % MFU is not reached on {machine} with a batch of up to {size}.",
        where=f"the most is {best_seen:.1f} %",
    )
