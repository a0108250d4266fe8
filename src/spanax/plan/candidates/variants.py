"""Enumerates the variants of a program that a search prices: remat policies, and ring attention."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from spanax.errors import SpanaxError, first_line
from spanax.plan.reason import Code, Reason
from spanax.plan.space import AXES, Family, Rejections
from spanax.trace.jaxpr.remat_policies import RING
from spanax.trace.program import Program

T = TypeVar("T")

REMAT = ("none", "dots", "full")

MOST_IN_RING = 64
"""The most devices of a ring that a search prices: which blocks are masked is evaluated for each pair of devices."""


def programs_of(program: Program, remat: Sequence[str] | None, rejected: Rejections) -> dict[str, Program]:
    """Returns the program under each policy, in one microbatch; counts unsupported policies in `rejected`.

    Raises:
      SpanaxError: the program supports none of the requested policies.
    """
    programs = dict[str, Program]()
    errors = list[SpanaxError]()
    for name in REMAT if remat is None else remat:
        try:
            policy = program.options.remat if name == program.remat else name
            programs[name] = program.variant(remat=policy, microbatches=1)
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
    return family.select(np.flatnonzero((sizes > 1) & (sizes <= MOST_IN_RING)))


class Variants:
    """The variants of a program that a search prices: under each remat policy, and there with ring attention.

    Args:
      program: the program.
      remat: the policies; None prices those of `REMAT` that the program supports.
      rejected: counts unsupported variants by reason.
      is_lazy: traces the first policy, which the program must support, and the others when they are needed.

    Attributes:
      programs: the traced programs by policy.
      trace_seconds: the time it took to trace all variants.
    """

    def __init__(self, program: Program, remat: Sequence[str] | None, rejected: Rejections, *, is_lazy: bool):
        self._program = program
        self._rejected = rejected
        self.is_lazy = is_lazy
        self.trace_seconds = 0.0
        policies = REMAT if remat is None else tuple(remat)
        self.programs = self._timed(lambda: programs_of(program, policies[:1] if is_lazy else remat, rejected))
        self.policies = policies if is_lazy else tuple(self.programs)
        self._rings: dict[str, Program | None] = {}

    def under(self, policy: str) -> Program | None:
        """Returns the program under a policy, in one microbatch; None where it does not support that."""
        if policy not in self.programs:
            try:
                self.programs |= self._timed(lambda: programs_of(self._program, (policy,), self._rejected))
            except SpanaxError:  # `programs_of` counts it in `rejected`
                return None
        return self.programs[policy]

    def in_ring(self, policy: str) -> Program | None:
        """Returns the program under a policy with ring attention; None where it does not support that."""
        if policy not in self._rings:
            program = self.under(policy)
            self._rings[policy] = program and self._timed(lambda: self._in_ring(program))
        return self._rings[policy]

    def _in_ring(self, program: Program) -> Program | None:
        try:
            return program.variant(context=RING)
        except SpanaxError as error:
            self._rejected[Reason(Code.NO_RING, detail=first_line(error))] += 1
            return None

    def _timed(self, trace: Callable[[], T]) -> T:
        start = time.perf_counter()
        try:
            return trace()
        finally:
            self.trace_seconds += time.perf_counter() - start
