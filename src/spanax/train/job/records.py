"""The records of a training run: config.toml, plan.json, env.json and tokenizer.json in its folder."""

from dataclasses import dataclass, replace
from typing import Any

from spanax.errors import SpanaxError, WriteError, first_line
from spanax.hardware.cluster import local
from spanax.plan.evaluate import evaluate
from spanax.processes.processes import from_first
from spanax.train.data.text.conversations import Conversations
from spanax.train.data.text.tokens import Tokens
from spanax.train.job.job import Job
from spanax.train.record import folder as run_folder
from spanax.train.record.run_lock import RunLock
from spanax.train.record.telemetry import Telemetry


@dataclass(eq=False)
class Records:
    """Writes the records of a run, and writes them again if the run folder is removed.

    Attributes:
      job: the settings, the plan and the devices to record.
      tokens: the tokens of the training data, with their tokenizer; None for other data.
      lock: the lock of the first process on the run folder; None on other processes.
      telemetry: receives warnings.
    """

    job: Job
    tokens: Tokens | None
    lock: RunLock | None
    telemetry: Telemetry

    def write(self) -> None:
        """Writes all records."""
        job = self.job
        devices = list(job.devices)
        tokens = self.tokens
        tokenizer = tokens.tokenizer.to_json() if tokens and tokens.tokenizer else None
        template = tokens.template if isinstance(tokens, Conversations) else None
        run_folder.write_records(
            self.telemetry.folder,
            job.config.record(),
            job.plan.to_json(),
            devices,
            self._size(devices),
            tokenizer,
            None if template is None else template.record,
        )

    def renew(self) -> None:
        """Makes the run folder again if it was removed; called on every process.

        Raises:
          WriteError: another run locked the folder, or it cannot be written.
        """
        from_first(self._renewed, WriteError)

    def predict_step_time(self) -> None:
        """Adds the predicted step time to plan.json; a failure is only a warning.

        The run does not need it, but `spanax report` compares it with the measured step time.
        """
        try:
            job = self.job
            cost = evaluate(job.program, job.plan, local(job.devices[: job.plan.mesh.size]))
            self.job = replace(job, plan=replace(job.plan, price=cost.prediction))
            run_folder.write_plan(self.telemetry.folder, self.job.plan.to_json())
        except Exception as error:
            self.telemetry.warn(f"cannot predict the step time of the plan: {first_line(error)}")

    def _size(self, devices: list[Any]) -> str:
        """Returns the size of the cluster of the plan's devices; empty if the catalog has no such cluster."""
        try:
            return local(devices[: self.job.plan.mesh.size]).size
        except SpanaxError:
            return ""  # such as half a node: the run is recorded, and cannot be used for calibration

    def _renewed(self) -> str:
        if self.lock is not None and self.lock.renew():
            self.write()
            self.telemetry.warn(f"the run folder '{self.lock.folder}' was removed, and has been created again")
        return "locked"
