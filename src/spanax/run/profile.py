"""Profile: a trace of some steps of a run, with the program they ran, in a folder that is read offline."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from spanax.entries.folder import Folder
from spanax.entries.names import PROFILE, PROGRAM, TRACE_FOLDER
from spanax.errors import WriteError
from spanax.run.run import Run

WINDOW, INPUT, STEP = "spanax window", "spanax input", "spanax step"
"""Names in the trace: all that was traced, waiting for a batch, and one step as the host sees it."""


@dataclass(eq=False)
class Profile:
    """Traces the steps from `first` to `last`, both included, into `profile/` of a run folder."""

    first: int
    last: int
    folder: Path
    _window: Any = field(default=None, repr=False)

    def prepare(self, run: Run) -> None:
        """Compile the step, and keep XLA's program: the trace names its operations.

        Raises:
          EntryError: something other than a folder has its name.
          WriteError: the folder cannot be written.
        """
        place = Folder.of(self.folder)
        try:
            place.remove_folder(PROFILE)
            place.make(PROFILE)
            modules = run.compile().runtime_executable().hlo_modules()
            place.replace(PROGRAM, [modules[0].as_serialized_hlo_module_proto()], is_durable=False)
        except OSError as error:
            raise WriteError(f"cannot write the profile '{self.folder / PROFILE}'.", where=str(error)) from None

    def before(self, run: Run) -> None:
        """Start the trace if the step that comes is the first one, or the first that is left of a resumed run."""
        if self._window is not None or not self.first <= run.num_steps + 1 <= self.last:
            return
        jax.block_until_ready(run.state)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every Python call of the host would slow it down, and hide what matters
        trace = Folder.of(self.folder).inner(PROFILE).checked_path() / TRACE_FOLDER  # JAX opens files by path
        jax.profiler.start_trace(str(trace), profiler_options=options)
        self._window = jax.profiler.TraceAnnotation(WINDOW)
        self._window.__enter__()

    def after(self, run: Run) -> None:
        """Stop the trace if that was the last step, once the devices are done with it."""
        if self._window is not None and run.num_steps >= self.last:
            jax.block_until_ready(run.state)
            self._window.__exit__(None, None, None)
            self._window = None
            jax.profiler.stop_trace()


def marked(name: str) -> Any:
    """What the host does while this lasts, by a name in the trace; next to free where nothing is traced."""
    return jax.profiler.TraceAnnotation(name)
