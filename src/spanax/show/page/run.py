"""The page of a run: its report, curves, and predicted next to measured times."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from spanax.check.measure.run_record import RunRecord
from spanax.plan.cost.step_time import IDLE
from spanax.plan.plan import Prediction
from spanax.printable import printable
from spanax.show.page.document import Block, Page, Part, bars, lines, table, text
from spanax.show.page.plan import plan_blocks, seconds_text
from spanax.show.report import report_text
from spanax.train.record.samples import Sample
from spanax.units import count_text

COMMUNICATION = ("activations between devices", "weights between devices", "gradient sync")
"""Categories of predicted time that a profile counts as communication."""


def run_page(run: RunRecord) -> Page:
    """Returns the page of a run."""
    report = report_text(replace(run.report, notes=run.notes))
    blocks = [Block("Report", [text("the report", report)]), *_curve_blocks(run), *_plan_blocks(run)]
    return Page("run", printable(run.report.workload) or "a run", blocks)


def _curve_blocks(run: RunRecord) -> Iterator[Block]:
    if curves := list(_curves(run)):
        seconds = run.report.metrics.median_step_seconds
        speed = run.report.metrics.median_speed
        medians = [] if seconds is None else [seconds_text(seconds)]
        medians += [] if speed is None else [f"{count_text(speed)} {run.report.metrics.counted}/s"]
        yield Block("Curves", curves, f"Median step: {', '.join(medians)}." if medians else "")
    if run.report.samples:
        yield _sample_block(run.report.samples)
    if run.findings:
        yield Block("Findings", [text("findings", "\n".join(map(str, run.findings)))])


def _sample_block(samples: Sequence[Sample]) -> Block:
    newest_first = sorted(samples, key=lambda sample: -sample.step)
    rows = [((str(sample.step), sample.step), sample.prompt, sample.text) for sample in newest_first]
    return Block("Samples", [table("samples", ("step", "prompt", "text"), rows)], "The newest are first.")


def _curves(run: RunRecord) -> Iterator[Part]:
    metrics = run.report.metrics
    if metrics.loss.retained:
        yield lines("Loss", {"loss": metrics.loss.retained, "held-out loss": metrics.held_out.retained})
    for name, points in metrics.evaluated.items():
        if points.retained:
            yield lines(f"Held-out {printable(name)}", {printable(name): points.retained})
    if metrics.speed.retained:
        yield lines("Speed", {f"{metrics.counted} per second": metrics.speed.retained}, from_zero=True)


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
    yield from plan_blocks(run.plan)


def _compared(price: Prediction, run: RunRecord) -> list[tuple[str, str, str, str]]:
    measured: dict[str, float | None] = {"step": run.report.metrics.median_step_seconds}
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
