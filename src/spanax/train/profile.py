"""Profiles some steps of a run: a JAX trace and XLA's program, for offline analysis."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from spanax.entries.folder import Folder
from spanax.entries.names import PROFILE, PROGRAM, TRACE_FOLDER
from spanax.errors import FileErrors, WriteError
from spanax.train.run import Run

WINDOW = "spanax window"
INPUT = "spanax input"
STEP = "spanax step"
"""Names in the trace: the profiled steps, waiting for a batch, and dispatching one step."""


@dataclass(eq=False)
class Profile:
    """Traces the steps from `first` to `last`, inclusive, into `profile/` of a run folder."""

    first: int
    last: int
    folder: Path
    _window: Any = field(default=None, repr=False)

    def prepare(self, run: Run) -> None:
        """Compiles the step and saves XLA's program, whose operations the trace refers to.

        Raises:
          EntryError: `profile` is not a folder.
          WriteError: the folder cannot be written.
        """
        place = Folder.of(self.folder)
        with FileErrors(WriteError, f"cannot write the profile '{self.folder / PROFILE}'."):
            place.remove_folder(PROFILE)
            place.make(PROFILE)
            modules = run.compile().runtime_executable().hlo_modules()
            place.replace(PROGRAM, [modules[0].as_serialized_hlo_module_proto()], is_durable=False)

    def before(self, run: Run) -> None:
        """Starts the trace before the first profiled step that the run has not taken."""
        if self._window is not None or not self.first <= run.num_steps + 1 <= self.last:
            return
        jax.block_until_ready(run.state)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # tracing every Python call slows the host down
        trace = Folder.of(self.folder).inner(PROFILE).checked_path() / TRACE_FOLDER  # JAX opens files by path
        jax.profiler.start_trace(str(trace), profiler_options=options)
        self._window = jax.profiler.TraceAnnotation(WINDOW)
        self._window.__enter__()

    def after(self, run: Run) -> None:
        """Stops the trace after the last profiled step is computed."""
        if self._window is not None and run.num_steps >= self.last:
            jax.block_until_ready(run.state)
            self._window.__exit__(None, None, None)
            self._window = None
            jax.profiler.stop_trace()
