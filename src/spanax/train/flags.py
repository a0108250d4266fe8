"""Flags that several commands share: sizes of a workload, precision, and the requested layout."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg
from tyro.constructors import PrimitiveConstructorSpec

from spanax.errors import PipelineError, RangeError
from spanax.trace.optimizers.recipe import AS_DEFINED, Recipe
from spanax.units import count_of
from spanax.usage import flag

if TYPE_CHECKING:
    from spanax.plan.plan import Plan, Schedule
    from spanax.trace.program import Program
    from spanax.trace.workload import Workload

Load = Callable[..., Any]
"""Builds a workload, given `batch_size`, `seq_len`, `num_layers` and `embed_dim`."""

MIN: dict[str, float] = {
    "devices": 1, "steps": 1, "num_epochs": 1, "steps_per_call": 1, "global_batch_size": 1, "seq_len": 1, "layers": 1,
    "embed": 1, "microbatches": 1, "virtual_stages": 1, "learning_rate": 0.0, "warmup_steps": 0, "weight_decay": 0.0,
    "max_grad_norm": 1e-6, "ema": 0.0, "seed": 0, "save_every": 0, "keep_last": 1, "eval_every": 0, "eval_batches": 1,
    "sample_every": 1, "log_every": 1, "spike_factor": 1.1, "max_bad_steps": 0, "top": 1, "limit": 1, "hosts": 1,
    "processes": 1, "devices_per_process": 1, "devices_per_host": 1, "cpus_per_host": 1, "restarts": 0,
    "backoff_seconds": 0.0,
}  # fmt: skip

POSITIVE = (
    "tokens", "examples", "target_mfu", "budget_hours", "save_seconds", "stuck_seconds", "quiet_seconds",
    "stop_seconds",
)  # fmt: skip
"""Numbers without a least value."""

MAX: dict[str, float] = {
    "steps_per_call": 1024, "seq_len": 1 << 24, "seed": (1 << 63) - 1, "learning_rate": 1e6, "weight_decay": 1e6,
    "ema": 0.999999,
}  # fmt: skip
"""Upper limits beyond any use, which would fail later; 10**12 for all other numbers."""

USUAL = {
    "devices": "8", "steps": "100", "num_epochs": "1", "global_batch_size": "32", "seq_len": "128", "layers": "12",
    "embed": "768", "microbatches": "4", "virtual_stages": "2", "learning_rate": "3e-4", "warmup_steps": "100",
    "weight_decay": "0.1", "max_grad_norm": "1", "ema": "0.999", "spike_factor": "10", "sample_every": "200",
    "tokens": "300e9", "examples": "1e6", "target_mfu": "40", "budget_hours": "500", "top": "5", "limit": "100",
    "devices_per_process": "4", "cpus_per_host": "8", "restarts": "3",
}  # fmt: skip
"""Usual values of numbers without a default, for the `fix` of an error."""


def check_numbers(flags: Any) -> None:
    """Raises RangeError if a number of a dataclass of flags is out of its range."""
    for field in fields(flags):
        value = getattr(flags, field.name)
        if value is None or field.name not in (*MIN, *POSITIVE):
            continue
        least = MIN.get(field.name, 0)
        most = MAX.get(field.name, math.inf if field.name in POSITIVE else 10**12)
        if not least <= value <= most or (value == 0 and field.name in POSITIVE):
            name = flag(field.name)
            bound = f"<= {most:g}" if value > most else f">{'=' * (field.name in MIN)} {least:g}"
            usual = USUAL.get(field.name, field.default)
            raise RangeError(f"{name} is {value}; expected a number {bound}.", fix=f"{name} {usual}")


@dataclass(frozen=True)
class BatchSizes:
    """Sizes of the batch.

    Attributes:
      global_batch_size: number of examples per step, over all devices.
      seq_len: sequence length in tokens.
    """

    global_batch_size: int | None = None
    seq_len: int | None = None

    def load(self, load: Load, **more: Any) -> Any:
        """Returns the workload at the requested sizes; `more` are further arguments of `load`.

        Raises:
          RangeError: a size is below 1.
        """
        check_numbers(self)
        return load(**self._arguments(), **more)

    def _arguments(self) -> dict[str, int]:
        sizes = {"batch_size": self.global_batch_size, "seq_len": self.seq_len}
        return {name: size for name, size in sizes.items() if size is not None}


@dataclass(frozen=True)
class Sizes(BatchSizes):
    """Sizes of the batch and the model.

    Attributes:
      layers: number of layers, instead of the workload's.
      embed: model width, instead of the workload's.
    """

    layers: int | None = None
    embed: int | None = None

    def _arguments(self) -> dict[str, int]:
        sizes = {"num_layers": self.layers, "embed_dim": self.embed}
        return super()._arguments() | {name: size for name, size in sizes.items() if size is not None}


@dataclass(frozen=True)
class Precision:
    """Dtypes of computation and optimizer state.

    Attributes:
      dtype: compute dtype: float32, bfloat16 or float16; parameters keep the dtype of the model. Default: bfloat16 on
        accelerators, unless the model sets its own dtypes.
      quantize: int8, fp8 or nvfp4, in which the matmuls of weights are computed, but for the last, which computes the
        logits, and routers of experts; all others are in --dtype. With --lora, how the frozen weights are stored: nf4,
        in 4 bits, or int8.
      optimizer_state: dtype of the optimizer's moments, float32 or bfloat16.
    """

    dtype: str | None = None
    quantize: str | None = None
    optimizer_state: str = "float32"

    def check_dtype(self, lora: str | None = None) -> None:
        """Raises SpanaxError if the compute dtype or the quantization is unknown, or the adapters are invalid."""
        from spanax.trace.jaxpr.remat_policies import known_dtype, known_quantization

        known_dtype(self.dtype)
        if lora is None:
            known_quantization(self.quantize)
            return
        from spanax.adapters.lora import LoRA
        from spanax.adapters.packed import known_format

        LoRA.parse(lora)
        if self.quantize is not None:
            known_format(self.quantize)


@dataclass(frozen=True)
class LayoutRequest:
    """The requested layout; the planner chooses what is not requested.

    Attributes:
      layout: data, zero1, zero2, fsdp, hsdp, tensor, data+tensor, fsdp+tensor, context, ring, ulysses,
        spatial, expert, pipeline, pipeline+tensor, 3d, or another name that spanax plan lists, such as pipeline+fsdp;
        `+seq` after a tensor layout also shards the sequence. Default: inferred from --mesh, or the fastest that fits.
      mesh: sizes of the mesh axes, slowest first, such as fsdp=4,model=2.
      remat: what the backward pass recomputes: none; dots, all but the results of matmuls; full, all but the inputs of
        each layer; or all but a list, attention.1+dot_general.2-3@host, those with @host in host memory. With a number,
        in the first layers only: full:8, or full:8,dots. Default: the fastest that fits; on CPUs, with a layout or
        mesh, as written in the model.
      attention: plain, as written in the model; flash, the platform's kernel, else blocks of keys; auto, the same or
        plain. Default: auto on accelerators, plain on CPUs.
      loss_chunks: number of token chunks for the logits, or auto, if memory is short. Default: auto on
        accelerators, 1 on CPUs.
      pad: axes to pad if a mesh axis does not divide them, such as heads,vocab; parameters keep their shapes; none pads
        nothing. Default: without layout and mesh, if a step is 10 % faster; otherwise none.
      offload: state to store in host memory: optimizer, whose arrays are copied to the devices only for the update; or
        none, for activations too. Default: none; without layout and mesh, what makes a layout fit if nothing fits
        otherwise.
      accumulate: how to combine gradients of microbatches: exact, the gradient of the batch; or mean, the mean over
        microbatches. Default: exact.
      microbatches: parts of the batch over which gradients are accumulated; the microbatches of a pipeline. Default:
        on CPUs with a layout or mesh, 1, and with stages at most four per stage; with --solve-for batch, 1; otherwise
        the fastest.
      pipeline_schedule: schedule of a mesh with a `pipe` axis: gpipe, 1f1b, interleaved or zero-bubble. Default: the
        fastest but gpipe; on CPUs, 1f1b.
      virtual_stages: groups of layers per stage of the interleaved schedule. Default: the fastest; 2 for
        --pipeline-schedule interleaved.
    """

    layout: str | None = None
    mesh: str | None = None
    remat: str | None = None
    attention: str | None = None
    loss_chunks: str | None = None
    pad: str | None = None
    offload: str | None = None
    accumulate: str | None = None
    microbatches: int | None = None
    pipeline_schedule: str | None = None
    virtual_stages: int | None = None

    @property
    def step_schedule(self) -> "Schedule | None":
        """The requested microbatches and stages; None without any."""
        from spanax.plan.pipeline.stages import requested_schedule

        return requested_schedule(
            microbatches=self.microbatches, schedule=self.pipeline_schedule, chunks=self.virtual_stages
        )

    def placed(self, layout: str | None, mesh: str | None) -> "LayoutRequest":
        """Returns the request of another layout or mesh, without a schedule of stages if it has none."""
        from spanax.plan.presets import requests_stages

        request = replace(self, layout=layout, mesh=mesh)
        return (
            request if requests_stages(layout, mesh) else replace(request, pipeline_schedule=None, virtual_stages=None)
        )

    def beside(self, name: str) -> "LayoutRequest":
        """Returns the request of another layout, such as `fsdp+tensor`, or mesh, such as `fsdp=4,model=2`."""
        return self.placed(None, name) if "=" in name else self.placed(name, None)

    def check_layout(self, why: str | None = None) -> None:
        """Raises SpanaxError if the value of a flag is unknown, or that of --why, which may be what has stages."""
        from spanax.plan.pipeline.schedules import check_known
        from spanax.plan.presets import check_names, requests_stages
        from spanax.trace.jaxpr.remat_policies import (
            known_accumulation,
            known_attention,
            known_chunks,
            known_offload,
            known_policy,
        )

        compared = [self] if why is None else [self, self.beside(why)]
        for each in compared:
            check_names(each.layout, None)
        check_known(self.pipeline_schedule or "1f1b")
        self.check_stages(any(requests_stages(each.layout, each.mesh) for each in compared))
        known_policy(self.remat)
        known_attention(self.attention)
        known_chunks(self.loss_chunks or 1)
        known_offload(self.offload)
        known_accumulation(self.accumulate or "exact")

    def check_stages(self, has_stages: bool) -> None:
        """Raises SpanaxError if a flag of stages is set, and a request or its plan has none."""
        of_stages = {"--pipeline-schedule": self.pipeline_schedule, "--virtual-stages": self.virtual_stages}
        for name, value in of_stages.items():
            if value is not None and not has_stages:
                raise PipelineError(
                    f"{name} {value} is for a pipeline, and there are no stages.",
                    fix=f"--layout pipeline or a mesh with 'pipe', on several devices, or leave {name} out",
                )

    def trace(
        self,
        workload: "Workload",
        precision: Precision,
        *,
        planned: "Plan | None" = None,
        learning_rate: float = 1e-3,
        num_steps: int = 100,
        recipe: Recipe = AS_DEFINED,
    ) -> "Program":
        """Returns the training step of a workload, traced with the requested rematerialization and precision.

        A plan from a file, `planned`, determines the compute dtype and the quantization of matmuls; with adapters, that
        of `precision` is the storage of frozen weights.
        """
        dtypes = precision if planned is None else planned.schedule
        return workload.trace(
            learning_rate=learning_rate,
            num_steps=num_steps,
            compute_dtype=dtypes.dtype if isinstance(dtypes, Precision) else dtypes.compute_dtype,
            quantize=dtypes.quantize if recipe.lora is None else precision.quantize,
            remat=self.remat,
            optimizer_state=precision.optimizer_state,
            accumulate=self.accumulate,
            recipe=recipe,
        )


Count = Annotated[
    float | None,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="N",
        instance_from_str=lambda words: count_of(words[0]),
        is_instance=lambda value: value is None or isinstance(value, float | int),
        str_from_instance=lambda value: ["None" if value is None else f"{value:g}"],
    ),
]
"""A number such as 1e12, 300B or 1T."""

BatchSizeFlags = Annotated[BatchSizes, arg(name="")]
SizeFlags = Annotated[Sizes, arg(name="")]
PrecisionFlags = Annotated[Precision, arg(name="")]
RecipeFlags = Annotated[Recipe, arg(name="")]
LayoutFlags = Annotated[LayoutRequest, arg(name="")]
