"""`spanax plan`: ranks every layout of a workload on a cluster, and answers questions of size and budget."""

import sys
from collections.abc import Sequence
from functools import partial

from spanax.commands.answer import Answer
from spanax.commands.plan.flags import PlanCommand, check, clusters, priced, request_of, traced
from spanax.commands.plan.generation import generation
from spanax.commands.plan.ranked import ranked
from spanax.commands.plan.sizes import batch_of_mfu, fewest, largest_size
from spanax.errors import ConflictError
from spanax.train.flags import Load
from spanax.usage import flag


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
    check(command)
    with waiting(sys.stderr):
        return _answer(command, load)


def _answer(command: PlanCommand, load: Load | None) -> Answer:
    from spanax.hardware.cluster import cluster
    from spanax.models.workloads import load as load_by_name
    from spanax.plan.advice.quotes import checked_prices

    load = load or partial(load_by_name, command.workload)
    names = clusters(command)
    if command.generate:
        return generation(command, load, names)
    if len(names) > 1:
        return _quoted(command, load, names)
    machine = cluster(names[0])
    checked_prices(command.price, names)
    if command.solve_for == "devices":
        return fewest(command, load, machine)
    if command.solve_for is not None:
        return largest_size(command, load, machine, command.solve_for)
    if command.target_mfu is not None:
        return batch_of_mfu(command, load, machine)
    return ranked(command, load, machine)


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
    request = request_of(command)
    program = traced(command, load)
    quotes = quoted(
        names,
        lambda machine: priced(command, load, machine, program)[0],
        lambda machine, search: decided(program, machine, request, search),
        lambda machine: largest_batch(program, machine, request),
        lambda search: fits_with(search, program, request),
    )
    quotes = quotes.priced(prices, tokens=command.tokens, examples=command.examples)
    lines = [quotes_text(quotes)]
    lines += [] if command.html is None else [write(quotes_page(quotes, command.workload), command.html)]
    return Answer("\n".join(lines), quotes_json(quotes, command.top), exit_code=2 * (not any(q.plan for q in quotes)))
