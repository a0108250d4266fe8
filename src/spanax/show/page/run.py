"""The page of a run: curves, the account of its time, faults, and predicted next to measured times."""

from collections.abc import Iterator

from spanax.check.measure.run_record import RunRecord
from spanax.plan.cost.step_time import IDLE
from spanax.plan.plan import Prediction
from spanax.printable import printable
from spanax.show.page.check import findings_part
from spanax.show.page.document import Block, Fact, Page, Part, bars, lines, table, text
from spanax.show.page.plan import array_blocks, price_blocks, seconds_text
from spanax.show.report import MEANING, Section, attempts_section, duration_text, faults_section
from spanax.train.record.time_ledger import BUCKETS
from spanax.units import count_text

COMMUNICATION = ("activations between devices", "weights between devices", "gradient sync")
"""Categories of predicted time that a profile counts as communication."""


def run_page(run: RunRecord) -> Page:
    """Returns the page of a run."""
    plan = run.plan
    lead = f"{plan.title}: {plan.why}." if plan is not None else "No plan."
    title = printable(run.report.workload) or "a run"
    return Page("run", title, lead, _facts(run), [*_blocks(run), *_plan_blocks(run)], run.report.how_to_go_on)


def _facts(run: RunRecord) -> list[Fact]:
    times = run.report.account
    loss = run.metrics.loss.retained
    held_out = run.metrics.held_out.retained
    facts = [
        Fact("goodput", f"{100 * times.goodput:.1f} %", f"of {duration_text(times.wall_seconds)}"),
        Fact("steps", f"{times.reached:,}", f"{len(times.attempts)} attempt{'s' * (len(times.attempts) > 1)}"),
    ]
    if loss:
        detail = f"held out {held_out[-1][1]:.4g}" if held_out else f"at first {loss[0][1]:.4g}"
        facts.append(Fact("loss", f"{loss[-1][1]:.4g}", detail))
    step_seconds = run.metrics.median_step_seconds
    speed = run.metrics.median_speed
    if step_seconds is not None:
        rate = "median" if speed is None else f"{count_text(speed)} {run.metrics.counted}/s, medians"
        facts.append(Fact("step time", seconds_text(step_seconds), rate))
    if times.faults:
        facts.append(Fact("faults", f"{len(times.faults)}", f"ended: {times.attempts[-1].outcome}", is_bad=True))
    return facts


def _blocks(run: RunRecord) -> Iterator[Block]:
    if curves := list(_curves(run)):
        yield Block("Curves", curves)
    times = run.report.account
    seconds = {f"{name}: {MEANING[name]}": times.seconds[name] for name in BUCKETS if times.seconds[name] >= 0.05}
    spent = bars("time of the run", {"all attempts": seconds}, duration_text)
    note = "Wall time of the run by category, from its first start."
    yield Block("Goodput", [spent, _section_part(attempts_section(times))], note)
    if (faults := faults_section(times)) is not None:
        yield Block("Faults and recovery", [_section_part(faults)])
    if run.findings:
        yield Block("Findings", [findings_part(run.findings)])
    if run.notes:
        yield Block("Files that could not be read", [text("files that could not be read", "\n".join(run.notes))])


def _curves(run: RunRecord) -> Iterator[Part]:
    metrics = run.metrics
    if metrics.loss.retained:
        yield lines("Loss", {"loss": metrics.loss.retained, "held-out loss": metrics.held_out.retained})
    for name, points in metrics.evaluated.items():
        if points.retained:
            yield lines(f"Held-out {printable(name)}", {printable(name): points.retained})
    if metrics.speed.retained:
        yield lines("Speed", {f"{metrics.counted} per second": metrics.speed.retained}, from_zero=True)


def _section_part(section: Section) -> Part:
    return table(section.title, [name or "details" for name in section.columns], section.rows)


def _plan_blocks(run: RunRecord) -> Iterator[Block]:
    """Yields the sections of the plan, with measured times where available."""
    if run.plan is None:
        return
    price = run.plan.price
    if price is not None and (rows := _compared(price, run)):
        part = table("predicted and measured", ("per step", "predicted", "measured", "error"), rows)
        note = f"Predicted for {price.cluster}; measured: median of the last steps, and the profile."
        yield Block("Predicted and measured", [part], note)
    if run.profile is not None:
        measured = bars("measured seconds per step", {"measured": run.profile.seconds}, seconds_text)
        note = f"Measured: {run.profile.steps} steps, mean over all devices."
        yield Block("Measured step time", [measured], note)
    yield from price_blocks(run.plan)
    yield from array_blocks(run.plan)


def _compared(price: Prediction, run: RunRecord) -> list[tuple[str, str, str, str]]:
    measured: dict[str, float | None] = {"step": run.metrics.median_step_seconds}
    communication = sum(price.seconds.get(name, 0) for name in COMMUNICATION)
    computation = sum(seconds for name, seconds in price.seconds.items() if name not in (*COMMUNICATION, *IDLE))
    predicted = {"step": price.step_seconds, "computation": computation, "communication": communication}
    if run.profile is not None:
        parts = run.profile.seconds
        measured |= {"computation": parts["compute"], "communication": parts["communication"]}
    return [
        (name, seconds_text(predicted[name]), seconds_text(value), f"{100 * (predicted[name] / value - 1):+.0f} %")
        for name, value in measured.items()
        if value
    ]
