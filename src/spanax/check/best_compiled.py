"""Compiles the best layouts of a search until one fits, where the compiler of their chips is installed."""

from collections import Counter
from dataclasses import dataclass, replace

import jax

from spanax.check.check import check, highest_level
from spanax.compat import has_backend
from spanax.displays import doing
from spanax.errors import CompilerError, first_line
from spanax.plan.candidate import Search, plan_of
from spanax.plan.reason import Code, Reason
from spanax.units import bytes_text

MOST_COMPILED = 4
"""The most layouts that are compiled; each takes as long as the first start of a training run."""

TIMEOUT_SECONDS = 120.0
"""The time limit of one compilation; `spanax check` has a longer one, and a flag to change it."""


@dataclass(frozen=True)
class CompiledMemory:
    """The memory of a layout as the compiler of the chips counts it.

    Attributes:
      layout: its name.
      mesh: its mesh.
      fits: whether it fits; None if it was not compiled.
      peak_bytes: the bytes per device.
      limit_bytes: the bytes that a device has.
      problem: why it was not compiled; empty if it was.
    """

    layout: str
    mesh: str
    fits: bool | None
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    problem: str = ""

    def __str__(self) -> str:
        if self.problem:
            return f"not compiled {self.layout} ({self.mesh}): {self.problem}"
        outcome = "" if self.fits else ", which does not fit"
        amounts = [bytes_text(each) for each in (self.peak_bytes, self.limit_bytes) if each is not None]
        return f"compiled {self.layout} ({self.mesh}): {' of '.join(amounts)}{outcome}"


def with_best_compiled(search: Search) -> tuple[Search, tuple[CompiledMemory, ...]]:
    """Returns a search without its first layouts that do not fit as compiled, and the memory of each that was compiled.

    The search is unchanged if no layout fits as compiled or if the compiler is not installed: then nothing is compiled.
    """
    if search.best is None or highest_level(search.cluster) < 3:
        return search, ()
    if not has_backend() and not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")  # lowering starts a backend; looking for a device may take minutes
    compiled = list[CompiledMemory]()
    for index, candidate in enumerate(search.candidates[:MOST_COMPILED]):
        mesh = str(candidate.whole_mesh)
        doing(f"compiling {candidate.layout} ({mesh}) for {search.cluster}")
        try:
            report = check(
                search.program_of(candidate),
                plan_of(search, candidate),
                search.cluster,
                level=3,
                timeout=TIMEOUT_SECONDS,
            )
        except (CompilerError, RuntimeError) as error:  # JAX raises RuntimeError without a backend
            compiled.append(CompiledMemory(candidate.layout, mesh, None, problem=first_line(error)))
            break
        assert report.compiled is not None
        figures = (report.compiled.peak_bytes, report.limit_bytes)
        compiled.append(CompiledMemory(candidate.layout, mesh, report.fits, *figures))
        if report.fits:
            rejected = Counter(search.rejected)
            rejected[Reason(Code.TOO_LARGE)] += index
            search = replace(search, candidates=search.candidates[index:], rejected={**+rejected})
            break
    return search, tuple(compiled)
