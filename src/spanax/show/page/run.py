"""Builds the page of a run: curves, time account, faults, and predicted next to measured times."""

from collections.abc import Sequence

from spanax.check.measure.run_record import RunRecord
from spanax.plan.prediction import Prediction
from spanax.printable import printable
from spanax.show.page import plan as of_plan
from spanax.show.page.document import Page
from spanax.show.page.parts.bars import Bar, stacked
from spanax.show.page.parts.blocks import Block, Figure, findings_list
from spanax.show.page.parts.curves import Curve, chart
from spanax.show.page.parts.markup import Node, el, fill
from spanax.show.page.parts.tables import table
from spanax.show.report import MEANING, Section, duration_text, faults_section
from spanax.train.record.time_account import TimeAccount
from spanax.train.record.time_ledger import BUCKETS
from spanax.units import count_text

COMMUNICATION = ("activations between devices", "weights between devices", "gradient sync")
"""Categories of predicted time that a profile counts as communication."""


def run_page(run: RunRecord) -> Page:
    """Returns the page of a run."""
    plan = run.plan
    lead = f"{plan.layout.name} on {plan.mesh}: {plan.why}." if plan is not None else "No plan."
    title, blocks = printable(run.report.workload) or "a run", [*_blocks(run), *_of_plan(run)]
    return Page("run", title, lead, _figures(run), blocks, next=run.report.how_to_go_on)


def _figures(run: RunRecord) -> list[Figure]:
    times, loss, held_out = run.report.account, run.metrics.loss.retained, run.metrics.held_out.retained
    step_seconds = run.metrics.median_step_seconds
    figures = [Figure("goodput", f"{100 * times.goodput:.1f} %", f"of {duration_text(times.wall_seconds)}")]
    num_attempts = len(times.attempts)
    figures.append(Figure("steps", f"{times.reached:,}", f"{num_attempts} attempt{'s' * (num_attempts > 1)}"))
    if loss:
        detail = f"held out {held_out[-1][1]:.4g}" if held_out else f"at first {loss[0][1]:.4g}"
        figures.append(Figure("loss", f"{loss[-1][1]:.4g}", detail))
    if step_seconds is not None:
        speed = run.metrics.median_speed
        rate = f"{count_text(speed)} {run.metrics.counted}/s, medians" if speed is not None else "median"
        figures.append(Figure("step time", of_plan.seconds_text(step_seconds), rate))
    if times.faults:
        figures.append(Figure("faults", str(len(times.faults)), f"ended: {times.attempts[-1].outcome}", is_bad=True))
    return figures


def _blocks(run: RunRecord) -> list[Block]:
    times, metrics = run.report.account, run.metrics
    blocks = []
    losses = [Curve("loss", metrics.loss.retained), Curve("held-out loss", metrics.held_out.retained, is_dotted=True)]
    curves = [chart("Loss", losses, lambda value: f"{value:.4g}")] if metrics.loss.retained else []
    for name, points in metrics.evaluated.items():
        if points.retained:
            curve = Curve(printable(name), points.retained, is_dotted=True)
            curves.append(chart(f"Held-out {curve.name}", [curve], lambda value: f"{value:.4g}"))
    if metrics.speed.retained:
        speeds = [Curve(f"{metrics.counted} per second", metrics.speed.retained)]
        curves.append(chart("Tokens per second", speeds, count_text, from_zero=True))
    if curves:
        blocks.append(Block("Curves", [el("div", *curves, class_="pair")]))
    blocks.append(Block("Goodput", _goodput(times), "Wall time of the run by category, from its first start."))
    if (faults := faults_section(times)) is not None:
        blocks.append(Block("Faults and recovery", [_table(faults)]))
    if run.findings:
        blocks.append(Block("Findings", [findings_list(run.findings)]))
    if run.notes:
        blocks.append(Block("Files that could not be read", [el("ul", *(el("li", note) for note in run.notes))]))
    return blocks


def _goodput(times: TimeAccount) -> list[Node]:
    seconds = {bucket: times.seconds.get(bucket, 0.0) for bucket in BUCKETS}
    parts = {f"{bucket}: {MEANING[bucket]}": value for bucket, value in seconds.items() if value >= 0.05}
    bars = stacked("time of the run", [Bar("all attempts", parts)], duration_text)
    return [bars, _attempts(times)]


def _attempts(times: TimeAccount) -> Node:
    """Returns the attempts on a timeline and in a table."""
    began, ended = times.attempts[0].began, max(attempt.ended for attempt in times.attempts)
    total = max(ended - began, 1e-9)
    line = el("div", class_="track times", role="img", aria_label=f"{len(times.attempts)} attempts on a timeline")
    rows: list[Sequence[str]] = []
    for number, attempt in enumerate(times.attempts, 1):
        lasted = duration_text(attempt.ended - attempt.began)
        label = f"attempt {number}, {lasted}, {attempt.outcome}"
        left, width = (100 * part / total for part in (attempt.began - began, attempt.ended - attempt.began))
        style = f"left:{left:.2f}%;width:{width:.2f}%"
        good = "good" if attempt.outcome in ("finished", "running") else "ended"
        fill(line, el("span", class_=f"seg {good}", style=style, title=label))
        mesh = attempt.place.get("mesh")
        sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.items()) if isinstance(mesh, dict) else ""
        devices = printable(attempt.place.get("devices", ""))
        after = duration_text(attempt.began - began)
        steps = f"{attempt.first_step:,}–{attempt.last_step:,}"
        rows.append([str(number), after, lasted, attempt.outcome, steps, devices, printable(sizes)])
    heads = ("attempt", "began after", "lasted", "ended", "steps", "devices", "mesh")
    return el("div", line, table("attempts", heads, rows, {1, 2, 4, 5}))


def _table(part: Section) -> Node:
    heads = [name or ("details" if index else "") for index, name in enumerate(part.columns)]
    return table(part.title, heads, [list(row) for row in part.rows])


def _of_plan(run: RunRecord) -> list[Block]:
    """Returns the sections of the plan, with measured times where available."""
    if run.plan is None:
        return []
    blocks, price = of_plan.blocks(run.plan), run.plan.price
    if run.profile is not None:
        measured = of_plan.step_bars([Bar("measured", dict(run.profile.to_json()["seconds"]))])
        note = f"Measured: {run.profile.num_steps} steps, mean over all devices."
        blocks.insert(0, Block("Measured step time", [measured], note, is_half=True))
    if price is not None and (rows := _compared(price, run)):
        heads = ("per step", "predicted", "measured", "error")
        note = f"Predicted for {price.cluster}; measured: median of the last steps, and the profile."
        blocks.insert(0, Block("Predicted and measured", [table("predicted, measured", heads, rows, {1, 2, 3})], note))
    return blocks


def _compared(price: Prediction, run: RunRecord) -> list[Sequence[str]]:
    pairs: list[tuple[str, float, float | None]] = [("step", price.step_seconds, run.metrics.median_step_seconds)]
    if run.profile is not None:
        between = sum(price.seconds.get(name, 0) for name in COMMUNICATION)
        computing = sum(seconds for name, seconds in price.seconds.items() if name not in (*COMMUNICATION, "pipeline"))
        pairs += [
            ("computation", computing, run.profile.compute),
            ("communication", between, run.profile.communication),
        ]
    return [
        (
            name,
            of_plan.seconds_text(predicted),
            of_plan.seconds_text(measured),
            f"{100 * (predicted / measured - 1):+.0f} %",
        )
        for name, predicted, measured in pairs
        if measured
    ]
