"""Formats the schedule of a pipeline as text and JSON."""

from typing import Any

from spanax.plan.pipeline.ticks import Ticks


def ticks_text(table: Ticks) -> str:
    """Returns the schedule with one row per stage, its idle fraction, and the activations in memory.

    Example:
      >>> from spanax.plan.pipeline.ticks import ticks
      >>> print(ticks_text(ticks("1f1b", 2, 2)))
      1f1b: 2 stages, 2 microbatches, 9 ticks
      stage 0: F0 F1 .  .  B0 W0 .  B1 W1
      stage 1: .  F0 B0 W0 F1 B1 W1 .  .
      F forward, B gradient of the input, W of the weights; a number is the microbatch
      33 % of all ticks are idle; activations of at most 2 microbatches are in memory at once
      >>> ticks_text(ticks("interleaved", 2, 4, 2)).rpartition("; ")[2]
      'activations of at most 2.5 microbatches are in memory at once'
    """
    counts = f"{table.num_stages} stages, {table.num_microbatches} microbatches"
    chunks = f" in {table.num_chunks} chunks per stage" if table.num_chunks > 1 else ""
    second = "W of the weights" if table.is_split else "and of the weights"
    memory = f"activations of at most {table.num_in_flight / table.num_chunks:g} microbatches are in memory at once"
    return "\n".join(
        [
            f"{table.schedule}: {counts}{chunks}, {table.num_ticks} ticks",
            str(table),
            f"F forward, B gradient of the input, {second}; a number is the microbatch"
            + (", and after it the chunk" if chunks else ""),
            f"{100 * table.bubble_fraction:.0f} % of all ticks are idle; {memory}",
        ]
    )


def ticks_json(table: Ticks) -> dict[str, Any]:
    """Returns the object of `spanax inspect --schedule --json`: for each tick the task of every stage, or null."""
    return {
        "name": table.schedule,
        "stages": table.num_stages,
        "microbatches": table.num_microbatches,
        "chunks": table.num_chunks,
        "ticks": [[None if task is None else task._asdict() for task in row] for row in table.tasks],
        "num_ticks": table.num_ticks,
        "idle_ticks": list(table.num_idle),
        "bubble_fraction": table.bubble_fraction,
        "activations_in_flight": table.num_in_flight,
    }
