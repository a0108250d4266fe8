"""`Recipe`: the optimizer of a workload, by name, with its schedule, weight decay, clipping and averaging."""

from dataclasses import dataclass
from typing import Any

from spanax.errors import UnknownNameError, nearest

OPTIMIZERS = ("adamw", "sgd", "lion", "adafactor", "muon")
SCHEDULES = ("cosine", "linear", "constant")

AVERAGED = "averaged_params"
"""The part of the path of a parameter's average before the path of the parameter."""


@dataclass(frozen=True)
class Recipe:
    """How the parameters are updated; the workload's own optimizer decides what is None.

    Attributes:
      optimizer: adamw, sgd, lion, adafactor or muon, instead of the workload's own. Set --learning-rate too: that of
        the workload is for its own optimizer.
      schedule: the learning rate after the warm-up: cosine, to a tenth (sgd: to zero); linear, to zero; or constant.
        Default: that of the optimizer, usually cosine.
      warmup_steps: steps in which the learning rate increases from zero. Default: a tenth of the steps, at most 100;
        with sgd, a twentieth.
      weight_decay: weight decay, multiplied by the learning rate. Default: 0.1; with sgd, 1e-4.
      max_grad_norm: largest global norm of the gradients; larger ones are scaled to it. Default: no limit.
      ema: decay of a moving average of the parameters, such as 0.999, which evaluations and spanax export use.
        Default: no average.
      lora: train low-rank adapters and freeze the parameters of the model: rank=16, rank=16,alpha=32, or
        rank=16,modules=q,v for the linear layers of these names; --quantize nf4 or int8 stores the frozen weights so.
        Default: train all parameters.
    """

    optimizer: str | None = None
    schedule: str | None = None
    warmup_steps: int | None = None
    weight_decay: float | None = None
    max_grad_norm: float | None = None
    ema: float | None = None
    lora: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The keywords for the optimizer that are set."""
        values = {name: getattr(self, name) for name in ("schedule", "warmup_steps", "weight_decay")}
        return {name: value for name, value in values.items() if value is not None}

    def check_names(self) -> None:
        """Raises SpanaxError if the optimizer or the schedule is unknown."""
        for name, value, known in (("optimizer", self.optimizer, OPTIMIZERS), ("schedule", self.schedule, SCHEDULES)):
            if value not in (None, *known):
                raise UnknownNameError(f"unknown {name} '{value}'.", fix=nearest(str(value), known))


AS_DEFINED = Recipe()
"""The workload's own optimizer."""
