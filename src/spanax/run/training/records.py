"""The records of a training run: config.toml, plan.json and env.json in its folder."""

from dataclasses import dataclass, field, replace

from spanax.errors import WriteError, first_line
from spanax.hardware.cluster import local
from spanax.plan.evaluate import evaluate
from spanax.plan.plan import Plan
from spanax.run.distributed.processes import from_first
from spanax.run.record import folder as run_folder
from spanax.run.record.run_lock import RunLock
from spanax.run.record.telemetry import Telemetry
from spanax.run.training.job import Job


@dataclass(eq=False)
class Records:
    """Writes the records of a run, and writes them again if the run folder is removed.

    Attributes:
      job: the settings, the plan and the devices to record.
      lock: the lock of the first process on the run folder; None on other processes.
      telemetry: receives warnings.
    """

    job: Job
    lock: RunLock | None
    telemetry: Telemetry
    _plan: Plan = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._plan = self.job.plan

    def write(self) -> None:
        """Writes all records."""
        run_folder.write_records(
            self.telemetry.folder, self.job.config.record(), self._plan.to_json(), list(self.job.devices)
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
            cluster = local(self.job.devices[: self._plan.mesh.size])
            cost = evaluate(self.job.program, self._plan, cluster)
            self._plan = replace(self._plan, price=cost.prediction)
            run_folder.write_plan(self.telemetry.folder, self._plan.to_json())
        except Exception as error:
            self.telemetry.warn(f"cannot predict the step time of the plan: {first_line(error)}")

    def _renewed(self) -> str:
        if self.lock is not None and self.lock.renew():
            self.write()
            self.telemetry.warn(f"the run folder '{self.lock.folder}' was removed, and has been created again")
        return "locked"
