"""A workload with the settings of a configuration, traced."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from spanax.errors import DataError, SpanaxError
from spanax.plan.plan import Plan
from spanax.run.config import TrainConfig
from spanax.run.data.elements import flat
from spanax.run.data.open_source import Reading, vocab_size
from spanax.trace.program import Program
from spanax.trace.workload import Workload


def trace_workload(
    load: Callable[..., Workload], config: TrainConfig, planned: Plan | None
) -> tuple[Workload, TrainConfig, Program]:
    """The workload in the sizes of a configuration, the configuration with nothing left open, and its program.

    Args:
      load: makes the workload, given `batch_size`, `seq_len` and `vocab_size`.
      config: the settings; what is None takes the workload's own.
      planned: the plan it is to obey, which may say what is computed in.
    """
    workload, config = _settled(load, config)
    dtype = config.dtype if planned is None else planned.schedule.compute_dtype
    program = workload.trace(
        learning_rate=config.lr or 0.0,
        num_steps=config.steps or 0,
        compute_dtype=dtype,
        remat=config.remat,
        optimizer_state=config.optimizer_state,
        accumulate=config.accumulate,
    )
    return workload, config, program


def _settled(load: Callable[..., Workload], config: TrainConfig) -> tuple[Workload, TrainConfig]:
    """The workload in the sizes asked for and with the tokenizer's vocabulary, and no setting left open."""
    sizes = {"batch_size": config.batch, "seq_len": config.seq}
    workload = load(**sizes)
    config = _filled(config, workload)
    source = source_of(config, workload)
    if workload.vocab_size is not None:
        reading = Reading(config.tokenizer or "bytes", field=config.field)
        num_tokens = vocab_size(source, list(flat(workload.batch)), reading)
        if num_tokens not in (None, workload.vocab_size):
            workload = load(**sizes, vocab_size=num_tokens)
        if num_tokens is not None and num_tokens > (workload.vocab_size or 0):
            raise DataError(
                f"the tokens need a vocabulary of {num_tokens}, and the model has {workload.vocab_size}.",
                where=f"--data {source} --tokenizer {config.tokenizer}",
                fix=f"--tokenizer bpe:{workload.vocab_size}, or a model with that vocabulary",
            )
    return workload, config


def _filled(config: TrainConfig, workload: Workload) -> TrainConfig:
    return replace(
        config,
        steps=config.steps if config.steps is not None else workload.num_steps,
        lr=config.lr if config.lr is not None else workload.learning_rate,
        tokenizer=config.tokenizer or workload.tokenizer,
        init=config.init or workload.init,
    )


def source_of(config: TrainConfig, workload: Workload) -> Any:
    """The training data: that of --data, or the workload's own.

    Raises:
      SpanaxError: there is none.
    """
    source = config.data if config.data is not None else workload.source
    if source is None:
        own = "source=... in a spanax.Workload of yours"
        raise SpanaxError(
            f"workload '{config.workload}' brings no data.",
            fix=own if workload.vocab_size is None else f"--data PATH, or {own}",
        )
    return source
