"""Enumerates the forms of a program that a search prices: remat policies, and ring attention."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from spanax.errors import SpanaxError, first_line
from spanax.plan.reason import Code, Reason
from spanax.plan.space import AXES, Family, Rejections
from spanax.trace.program import Program
from spanax.trace.rewrites.remat_policies import RING

REMAT = ("none", "dots", "full")

MOST_IN_RING = 64
"""The most devices of a ring that a search prices: which blocks are masked is evaluated for each pair of devices."""


def programs_of(program: Program, remat: Sequence[str] | None, rejected: Rejections) -> dict[str, Program]:
    """Returns the program under each policy, in one microbatch; counts unsupported policies in `rejected`.

    Raises:
      SpanaxError: the program supports none of the requested policies.
    """
    programs, errors = dict[str, Program](), list[SpanaxError]()
    for name in REMAT if remat is None else remat:
        try:
            policy = program.form.remat if name == program.remat else name
            programs[name] = program.variant(replace(program.form, remat=policy, microbatches=1))
        except SpanaxError as error:
            rejected[Reason(Code.NO_REMAT, name, detail=first_line(error))] += 1
            errors.append(error)
    if remat and not programs:
        raise errors[0]
    return programs or {program.remat: program}


def in_context(family: Family, rejected: Rejections) -> Family:
    """Returns the family with only the meshes that shard sequences over at most `MOST_IN_RING` devices."""
    sizes = family.sizes[AXES.index("context")]
    rejected[Reason(Code.RING_TOO_LONG, size=MOST_IN_RING)] += int(np.count_nonzero(sizes > MOST_IN_RING))
    columns = np.flatnonzero((sizes > 1) & (sizes <= MOST_IN_RING))
    return replace(family, sizes=family.sizes[:, columns], num_stages=family.num_stages[columns])


def in_rings(programs: dict[str, Program], rejected: Rejections) -> list[Program]:
    """Returns the programs with ring attention; none, with the reason in `rejected`, where it is unsupported."""
    rings = list[Program]()
    for program in programs.values():
        try:
            rings.append(program.variant(replace(program.form, context=RING)))
        except SpanaxError as error:
            rejected[Reason(Code.NO_RING, detail=first_line(error))] += 1
            return []
    return rings
