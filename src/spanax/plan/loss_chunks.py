"""Chooses whether logits are materialized at once or in chunks of tokens, and the number of chunks."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from spanax.errors import SpanaxError, first_line
from spanax.hardware.cluster import Cluster
from spanax.plan.candidate import Search, plan_of
from spanax.plan.evaluate import candidate_of, memory_of
from spanax.plan.plan import Plan
from spanax.trace.program import Program
from spanax.units import bytes_text

TRIED = (8, 4, 2)
"""Chunks by which it is found out how much the logits hold; the first that divides the tokens."""

LARGE, SMALL = 0.1, 0.05
"""Shares of the peak: logits below the first stay whole, and twice the chunks are to save the second."""

SLOWER = 0.05
"""What fits as it is takes no more chunks than those with which a step is to take so much longer: each adds to the
gradient of the head, and its matmuls have fewer rows."""

MOST = 64
"""No more chunks are tried."""


def in_chunks(program: Program, cluster: Cluster, make: Callable[[Program], Plan]) -> Plan:
    """The plan of a program with its logits in as many chunks as suit it; whole where chunks save little.

    Args:
      program: with its logits whole.
      cluster: the devices.
      make: plans a program.

    Raises:
      SpanaxError: there is no plan.
    """
    whole = make(program)
    count, told = suiting_chunks(program, whole, cluster)
    made = whole if count == 1 else make(program.with_loss_chunks(count))
    return replace(made, why=f"{made.why}; {told}")


def found_in_chunks(find: Callable[[Program], Search], program: Program, cluster: Cluster) -> Search:
    """What a search finds of a program with its logits in as many chunks as suit the best of it."""
    found = find(program)
    ahead = next(iter((*found.candidates, *found.nearest)), None)
    if ahead is None:
        return found
    count, told = suiting_chunks(program, plan_of(found, ahead), cluster)
    return replace(found if count == 1 else find(program.with_loss_chunks(count)), logits=told)


def suiting_chunks(program: Program, plan: Plan, cluster: Cluster) -> tuple[int, str]:
    """In how many chunks of tokens the logits of a plan go best, and why.

    The number is the smallest power of two of which the double saves little more, or takes long, by its price.

    Example:
      >>> import jax, optax, spanax
      >>> from flax import nnx
      >>> program = spanax.trace(
      ...     build=lambda rngs: nnx.Linear(16, 4096, rngs=rngs),
      ...     optimizer=optax.sgd(0.1),
      ...     batch={"x": jax.ShapeDtypeStruct((4096, 16), "float32"), "y": jax.ShapeDtypeStruct((4096,), "int32")},
      ...     loss=lambda model, batch: optax.softmax_cross_entropy_with_integer_labels(
      ...         model(batch["x"]), batch["y"]
      ...     ).mean(),
      ... )
      >>> machine = spanax.cluster("cpu:8")
      >>> suiting_chunks(program, spanax.plan(program, machine, layout="data"), machine)[0]
      2
    """
    peak_bytes = partial(_peak_bytes, plan=plan, cluster=cluster)
    divided = _divided(program, peak_bytes)
    if isinstance(divided, str):
        return 1, f"logits whole: {divided}"
    tried, before = divided.loss_chunks, _peak_bytes(program, plan, cluster, 1)
    logits = (before - _peak_bytes(program, plan, cluster, tried)) * tried / (tried - 1)
    if logits < LARGE * before:
        return 1, f"logits whole: in chunks a device would hold {max(0.0, logits / before):.0%} less"
    count, held, slower, seconds = 1, before, 0.0, _step_seconds(program, plan, cluster, 1)
    while count < MOST and not isinstance(_divided(program, peak_bytes, [2 * count]), str):
        after = _peak_bytes(program, plan, cluster, 2 * count)
        slower = _step_seconds(program, plan, cluster, 2 * count) / seconds - 1
        fits = cluster.memory_bytes is None or held <= cluster.memory_bytes
        if held - after < SMALL * before or (fits and slower > SLOWER):
            break
        count, held = 2 * count, after
    if count > 1:
        return count, f"logits in {count} chunks: {bytes_text(before - held)} less"
    return 1, f"logits whole: 2 chunks {f'take {slower:.0%} longer' if slower > SLOWER else 'save little'}"


def chunks_to_try(found: Search) -> tuple[int, int]:
    """Returns the number of chunks that suits the leanest layout of a search in which nothing fits, and bytes saved.

    One chunk and no bytes where chunks save little.
    """
    program = next(iter(found.programs.values()))
    if found.best or not found.nearest or program.loss_chunks > 1:
        return 1, 0
    plan = plan_of(found, found.nearest[0])
    count, _ = suiting_chunks(program, plan, found.cluster)
    return count, saved_bytes(program, _asked(plan, count), found.cluster) if count > 1 else 0


def saved_bytes(program: Program, plan: Plan, cluster: Cluster) -> int:
    """Bytes of one device at the fullest moment that a plan saves by having its logits in chunks."""
    counts = (1, plan.schedule.loss_chunks)
    before, after = (_peak_bytes(program, plan, cluster, count) for count in counts)
    return round(before - after)


def _peak_bytes(program: Program, plan: Plan, cluster: Cluster, count: int) -> float:
    return float(memory_of(program, _asked(plan, count), cluster).peak_bytes[0])


def _step_seconds(program: Program, plan: Plan, cluster: Cluster, count: int) -> float:
    """What a step is to take in so many chunks; the same for any where nobody knows how fast the chip is."""
    if not cluster.chip.peak_flops:
        return 1.0
    return candidate_of(program, _asked(plan, count), cluster).step_seconds


def _asked(plan: Plan, count: int) -> Plan:
    return replace(plan, schedule=replace(plan.schedule, loss_chunks=count))


def _divided(program: Program, check: Callable[..., Any], counts: Sequence[int] = TRIED) -> Program | str:
    """Returns the program in the first possible of these numbers of chunks, or why none is.

    Args:
      program: with its logits in one chunk.
      check: raises where a plan cannot have the program in `count` chunks.
      counts: the numbers that are tried.
    """
    why = ""
    for count in counts:
        try:
            check(program, count=count)
            return program.with_loss_chunks(count)
        except SpanaxError as error:
            why = first_line(error)  # the plan names it
    return why
