"""Run: the page of a run: its curves, where its time went, what befell it, and the plan beside what was measured."""

from collections.abc import Sequence

from spanax.check.lint.lint import lint_profile
from spanax.commands.report import MEANING, Section, duration_text, sections
from spanax.plan.cost.prediction import Prediction
from spanax.printable import printable
from spanax.run.record.time_account import TimeAccount
from spanax.run.record.time_ledger import BUCKETS
from spanax.show.page import plan as of_plan
from spanax.show.page.document import Page
from spanax.show.page.parts.bars import Bar, stacked
from spanax.show.page.parts.blocks import Block, Figure, findings_list
from spanax.show.page.parts.curves import Curve, chart
from spanax.show.page.parts.markup import Node, el, fill
from spanax.show.page.parts.tables import table
from spanax.show.page.run_folder import RunRecord
from spanax.units import count_text

BETWEEN = ("activations between devices", "weights between devices", "gradient sync")
"""The parts of a price that a profile calls communication."""


def run_page(told: RunRecord) -> Page:
    """A run as a page."""
    plan = told.plan
    lead = f"{plan.layout.name} on {plan.mesh}: {plan.why}." if plan is not None else "Without a plan."
    title, blocks = printable(told.report.workload) or "a run", [*_blocks(told), *_of_plan(told)]
    return Page("run", title, lead, _figures(told), blocks, next=told.report.how_to_go_on)


def _figures(told: RunRecord) -> list[Figure]:
    made, loss, held_out = told.report.account, told.metrics.loss.kept, told.metrics.held_out.kept
    speed, step_seconds = told.metrics.speed.kept, told.metrics.median_step_seconds
    found = [Figure("goodput", f"{100 * made.goodput:.1f} %", f"of {duration_text(made.wall_seconds)}")]
    found.append(Figure("steps", f"{made.reached:,}", f"{len(made.attempts)} attempt{'s' * (len(made.attempts) > 1)}"))
    if loss:
        beside = f"held out {held_out[-1][1]:.4g}" if held_out else f"at first {loss[0][1]:.4g}"
        found.append(Figure("loss", f"{loss[-1][1]:.4g}", beside))
    if step_seconds is not None:
        rate = f"{count_text(speed[-1][1])} {told.metrics.counted}/s" if speed else ""
        found.append(Figure("a step", of_plan.seconds_text(step_seconds), rate))
    if made.faults:
        found.append(Figure("faults", str(len(made.faults)), f"ended: {made.attempts[-1].outcome}", is_bad=True))
    return found


def _blocks(told: RunRecord) -> list[Block]:
    made, metrics = told.report.account, told.metrics
    found = []
    losses = [Curve("loss", metrics.loss.kept), Curve("held-out loss", metrics.held_out.kept, is_dotted=True)]
    curves = [chart("Loss", losses, lambda value: f"{value:.4g}")] if metrics.loss.kept else []
    if metrics.speed.kept:
        speeds = [Curve(f"{metrics.counted} a second", metrics.speed.kept)]
        curves.append(chart("Tokens a second", speeds, count_text, from_zero=True))
    if curves:
        found.append(Block("Curves", [el("div", *curves, class_="pair")]))
    found.append(Block("Goodput", _goodput(made), "Where the time of the run went, from its first start on."))
    listed = {part.title.split(",")[0].split(" (")[0]: part for part in sections(told.report)}
    if "faults" in listed:
        found.append(Block("Faults, and what was done", [_table(listed["faults"])]))
    if told.profile is not None and (watched := lint_profile(told.profile)):
        found.append(Block("Findings", [findings_list(watched)]))
    if told.notes:
        found.append(Block("What could not be read", [el("ul", *(el("li", note) for note in told.notes))]))
    return found


def _goodput(made: TimeAccount) -> list[Node]:
    spent = {bucket: made.seconds.get(bucket, 0.0) for bucket in BUCKETS}
    words = {f"{bucket}: {MEANING[bucket]}": seconds for bucket, seconds in spent.items() if seconds >= 0.05}
    bars = stacked("time of the run", [Bar("all attempts", words)], duration_text)
    return [bars, _attempts(made)]


def _attempts(made: TimeAccount) -> Node:
    """The attempts on one line of time, and in a table."""
    began, ended = made.attempts[0].began, max(one.ended for one in made.attempts)
    whole = max(ended - began, 1e-9)
    line = el("div", class_="track times", role="img", aria_label=f"{len(made.attempts)} attempts on a line of time")
    rows: list[Sequence[str]] = []
    for number, one in enumerate(made.attempts, 1):
        lasted = duration_text(one.ended - one.began)
        told = f"attempt {number}, {lasted}, {one.outcome}"
        place = f"left:{100 * (one.began - began) / whole:.2f}%;width:{100 * (one.ended - one.began) / whole:.2f}%"
        good = "good" if one.outcome in ("finished", "running") else "ended"
        fill(line, el("span", class_=f"seg {good}", style=place, title=told))
        mesh = one.place.get("mesh")
        on = printable(",".join(f"{axis}={size}" for axis, size in mesh.items())) if isinstance(mesh, dict) else ""
        after = duration_text(one.began - began)
        steps = f"{one.first_step:,}–{one.last_step:,}"
        rows.append([str(number), after, lasted, one.outcome, steps, printable(one.place.get("devices", "")), on])
    heads = ("attempt", "began after", "lasted", "ended", "steps", "devices", "mesh")
    return el("div", line, table("attempts", heads, rows, {1, 2, 4, 5}))


def _table(part: Section) -> Node:
    heads = [name or ("what" if at else "") for at, name in enumerate(part.columns)]
    return table(part.title, heads, [list(row) for row in part.rows])


def _of_plan(told: RunRecord) -> list[Block]:
    """The plan's numbers, with what was measured beside them where it was."""
    if told.plan is None:
        return []
    found, price = of_plan.blocks(told.plan), told.plan.price
    if told.profile is not None:
        measured = of_plan.step_bars([Bar("measured", dict(told.profile.to_json()["seconds"]))])
        note = f"Measured: {told.profile.num_steps} steps, the mean of all devices."
        found.insert(0, Block("Where a step's time went", [measured], note, is_half=True))
    if price is not None and (rows := _compared(price, told)):
        heads = ("a step", "expected", "measured", "off by")
        note = f"Expected on {price.cluster}; measured here: the median of the last steps, and the profile."
        found.insert(0, Block("Expected against measured", [table("expected, measured", heads, rows, {1, 2, 3})], note))
    return found


def _compared(price: Prediction, told: RunRecord) -> list[Sequence[str]]:
    pairs: list[tuple[str, float, float | None]] = [("step", price.step_seconds, told.metrics.median_step_seconds)]
    if told.profile is not None:
        between = sum(price.seconds.get(name, 0) for name in BETWEEN)
        own = sum(seconds for name, seconds in price.seconds.items() if name not in (*BETWEEN, "pipeline"))
        pairs += [("computing", own, told.profile.compute), ("between devices", between, told.profile.communication)]
    return [
        (name, of_plan.seconds_text(ours), of_plan.seconds_text(theirs), f"{100 * (ours / theirs - 1):+.0f} %")
        for name, ours, theirs in pairs
        if theirs
    ]
