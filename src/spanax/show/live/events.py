"""Prints events of a run: as JSON lines, plain lines, or a progress bar on a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from spanax.check.finding import Finding
from spanax.documents import json_line
from spanax.printable import printable
from spanax.show.live.terminal import Numbers, Terminal
from spanax.train.store.loaded import Loaded
from spanax.units import bytes_text, count_text
from spanax.usage import resume_command

SHOWN = {
    "step",
    "loss",
    "grad_norm",
    "step_seconds",
    "tokens_per_second",
    "examples_per_second",
    "data_wait_seconds",
}
"""Numbers of a step that a line formats separately or omits."""

RESUME = "to resume"

MAX_LETTERS = 64
"""Number of letters that a line shows of a prompt, and of the text after it."""

MAX_OPERATIONS = 5
"""Number of operations of a profile that are listed."""

Event = dict[str, Any]
Emit = Callable[[Event], None]


@contextmanager
def reporter(*, as_json: bool, stream: TextIO | None = None, resume: str = RESUME) -> Iterator[Emit]:
    """Yields a callback for a run's events: JSON lines if requested, a progress bar on a terminal, else plain lines.

    A terminal that cannot move its cursor (TERM=dumb) gets plain lines. `resume` introduces the command that resumes
    the run; if it is empty, the command is not shown.

    Example:
      >>> with reporter(as_json=True, stream=sys.stdout) as emit:
      ...     emit({"event": "step", "step": 1, "loss": 2.5})
      {"event": "step", "step": 1, "loss": 2.5}
    """
    stream = sys.stdout if stream is None else stream
    console = Terminal(file=stream)
    if as_json:
        yield lambda event: print(json_line(event), file=stream, flush=True)
    elif stream.isatty() and not console.is_dumb_terminal:
        with _bar(console, resume) as emit:
            yield emit
    else:
        yield lambda event: _print_line(event, stream, resume)


def line(event: Event, resume: str = RESUME) -> str:
    """Returns one event as a line of text; empty for events that are not shown.

    Example:
      >>> line({"event": "step", "step": 3, "loss": 2.5, "tokens_per_second": 12000.0, "step_seconds": 0.1})
      'step 3  loss 2.5000  12 k tokens/s  0.100 s'
    """
    event = _printable(event)
    kind = event["event"]
    if kind == "start":
        mesh = ",".join(f"{axis}={size}" for axis, size in event["mesh"].items())
        source = f" from {event['init']}" if "init" in event else ""
        trained = f", {count_text(event['trained_parameters'])} trained" if "trained_parameters" in event else ""
        return "\n".join(
            [
                f"{event['workload']}: {count_text(event['parameters'])} parameters{source}{trained}, "
                f"layout {event['layout']} on {mesh} ({event['why']}), "
                f"{bytes_text(event['state_bytes_per_device'])} of state per device, into {event['out']}",
                *(
                    [f"listening without authentication on {', '.join(event['listens'])}"]
                    if event.get("listens")
                    else []
                ),
                *(
                    [f"{event['quantize']}: matmuls of {', '.join(event['quantized'])}"]
                    if event.get("quantized")
                    else []
                ),
                *(_data_line(share) for share in event.get("data", ())),
            ]
        )
    if kind == "init":
        lists: dict[str, Any] = {name: tuple(event[name]) for name in ("loaded", "missing", "mismatched", "unexpected")}
        return str(Loaded(event["source"], **lists))
    if kind == "step":
        return (
            f"step {event['step']}  {_loss_text(event)}{metrics_text(event)}  "
            f"{rate_text(event)}  {event['step_seconds']:.3f} s"
        )
    if kind == "eval":
        bigram = f" (a bigram: {event['bigram_loss']:.4f})" if "bigram_loss" in event else ""
        values = {name.removeprefix("val_"): value for name, value in event.items() if name.startswith("val_")}
        loss = f" loss {event['val_loss']:.4f}" if "val_loss" in event else ""
        return f"step {event['step']}  held-out{loss}{metrics_text(values)}{bigram}"
    if kind == "sample":
        prompt = event["prompt"][-MAX_LETTERS:]
        return f"step {event['step']}  after '{prompt}': {event['text'][:MAX_LETTERS]}"
    if kind == "save":
        return f"step {event['step']}  checkpoint, {event['blocked_seconds']:.3f} s blocked"
    if kind == "save_failed":
        removed = "" if event["removed"] is None else f" Step {event['removed']} was removed to make room."
        return f"WARNING: {event['reason']}{removed} The run continues, and saves again at the next scheduled step."
    if kind == "bad_step":
        return f"WARNING: step {event['step']} (batch {event['batch']}) is bad: {event['reason']}"
    if kind == "rolled_back":
        return f"step {event['step']}  restored, from step {event['from_step']}; batch {event['batch']} is skipped"
    if kind == "skipped":
        return f"step {event['step']}  not applied; batch {event['batch']} is skipped"
    if kind == "warning":
        return f"WARNING: {event['message']}"
    if kind == "preempted":
        return f"stopped after step {event['step']}, all saved" + _resume_line(event, resume)
    if kind == "done":
        steps = 2 * event["steps"]
        return _done_line(event) + _resume_line(event, resume and resume_for_longer(resume, steps), steps)
    if kind == "profile":
        return profile_text(event)
    return ""


def profile_text(event: dict[str, Any]) -> str:
    """Returns the time per step and device by category, one line each.

    Example:
      >>> parts = {"compute": 0.3, "communication": 0.1, "idle": 0.05, "host": 0.05, "input wait": 0.0}
      >>> print(profile_text({
      ...     "steps": 11, "devices": 8, "step_seconds": 0.5, "seconds": parts, "communication": {"fsdp": 0.1},
      ...     "operations": {"fusion.3": 0.2}, "out": "runs/a/profile",
      ... }))
      profile of 11 steps on 8 devices: 0.5 s per step
        compute        0.3 s  60.0 %
        communication  0.1 s  20.0 %  (fsdp 0.1 s)
        idle           0.05 s  10.0 %
        host           0.05 s  10.0 %
        input wait     0 s  0.0 %
        longest: fusion.3 0.2 s
        in runs/a/profile
    """
    step = event["step_seconds"]
    lines = [f"profile of {event['steps']} steps on {event['devices']} devices: {step:.3g} s per step"]
    for name, seconds in event["seconds"].items():
        parts = ", ".join(f"{axis} {time:.3g} s" for axis, time in event["communication"].items())
        detail = f"  ({parts})" if name == "communication" and parts else ""
        lines.append(f"  {name:13}  {seconds:.3g} s  {100 * seconds / step:.1f} %{detail}")
    longest = list(event["operations"].items())[:MAX_OPERATIONS]
    lines.append("  longest: " + ", ".join(f"{name} {seconds:.3g} s" for name, seconds in longest))
    lines.append(f"  in {event['out']}")
    lines += [str(Finding.from_json(finding)) for finding in event.get("findings", ())]
    return "\n".join(lines)


def resume_for_longer(resume: str, steps: int) -> str:
    """Returns what introduces the command that resumes a finished run; schedules of named workloads span all steps.

    Example:
      >>> resume_for_longer(RESUME, 24)
      'to resume for longer, with a learning-rate schedule over 24 steps'
    """
    return f"{resume} for longer, with a learning-rate schedule over {steps} steps"


def _printable(value: Any) -> Any:
    """Returns the value with control characters of every string escaped; names of files and fields are untrusted."""
    if isinstance(value, dict):
        return {printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(item) for item in value]
    return printable(value) if isinstance(value, str) else value


def _loss_text(event: Event) -> str:
    return f"loss {event.get('loss', float('nan')):.4f}"


def metrics_text(event: Event) -> str:
    """Returns the scalar metrics of a step; lists are only in metrics.jsonl.

    Example:
      >>> metrics_text({"loss": 2.5, "accuracy": 0.625, "by_class": [0.5, 0.75]})
      '  accuracy 0.625'
    """
    numbers = {name: value for name, value in event.items() if isinstance(value, int | float) and name not in SHOWN}
    return "".join(f"  {name} {value:.4g}" for name, value in numbers.items())


def rate_text(event: Event) -> str:
    """Returns tokens per second, or examples per second for data without sequences.

    Example:
      >>> rate_text({"tokens_per_second": 512.0, "examples_per_second": 512.0})
      '512 examples/s'
    """
    tokens = event["tokens_per_second"]
    return f"{count_text(tokens)} {'examples' if tokens == event.get('examples_per_second') else 'tokens'}/s"


def _data_line(share: Event) -> str:
    return (
        f"data: {100 * share['share']:.4g} % {share['source']}, {count_text(share['num_examples'])} examples, "
        f"{share['epochs']:.3g} epochs in total"
    )


def _done_line(event: Event) -> str:
    parts = [f"done: {event['steps']} steps in {event['seconds']:.0f} s"]
    for key, text in (("train_loss", "train loss"), ("val_loss", "held-out loss"), ("bigram_loss", "bigram")):
        if event.get(key) is not None:
            parts.append(f"{text} {event[key]:.4f}")
    if event.get("tokens_per_second") is not None:
        parts.append(rate_text(event))
        parts.append(f"data wait {100 * event['data_wait_fraction']:.1f} %")
    return ", ".join(parts)


def _resume_line(event: Event, resume: str, steps: int | None = None) -> str:
    return f"\n{resume}: {resume_command(event['out'], steps)}" if resume else ""


def _print_line(event: Event, stream: TextIO, resume: str) -> None:
    if text := line(event, resume):
        print(text, file=stream, flush=True)


@contextmanager
def _bar(console: Terminal, resume: str) -> Iterator[Emit]:
    columns = (
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        BarColumn(bar_width=8),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
        Numbers(Column(ratio=1)),
    )
    # Rich would print a standard error that is redirected to a file on the terminal.
    with Progress(*columns, console=console, expand=True, redirect_stderr=sys.stderr.isatty()) as progress:
        # A task has no total until the `start` event: each column must render one without.
        task = progress.add_task("", total=None, numbers=["compiling"])

        def emit(event: Event) -> None:
            if event["event"] == "start":
                progress.update(task, total=event["steps"], completed=event["step"])
            if event["event"] == "step":
                progress.update(task, completed=event["step"], numbers=_step_numbers(_printable(event)))
            elif text := line(event, resume):
                progress.console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)

        yield emit


def _step_numbers(event: Event) -> list[str]:
    """Returns the texts that a progress bar shows of a step, the most important first."""
    wait = f"data wait {event['data_wait_seconds']:.1f} s"
    metrics = metrics_text(event).split("  ")[1:]
    return [_loss_text(event), rate_text(event), *metrics, f"{event['step_seconds']:.3f} s", wait]
