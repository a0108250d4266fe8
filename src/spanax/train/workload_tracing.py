"""Traces a workload with the settings of a training configuration."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from spanax.adapters.lora import RATE
from spanax.entries.local_path import check_local_paths
from spanax.errors import DataError, MissingError, RangeError, WorkloadError
from spanax.plan.plan import Plan
from spanax.trace.program import Program
from spanax.trace.workload import Workload
from spanax.train.config import TrainConfig
from spanax.train.data.batches import batches
from spanax.train.data.destination import flat
from spanax.train.data.open_source import WINDOWS, opened, vocab_size
from spanax.train.data.source import Options
from spanax.train.data.text.chat_template import ChatTemplate, recorded_template
from spanax.train.data.text.conversations import Conversations
from spanax.train.data.text.tokenizer import TrainedTokenizer
from spanax.train.record.folder import saved_template, saved_tokenizer
from spanax.train.state import weights


def trace_workload(
    load: Callable[..., Workload], config: TrainConfig, planned: Plan | None, platform: str
) -> tuple[Workload, TrainConfig, Program]:
    """Returns the workload in the configured sizes, the configuration with defaults filled in, and the program.

    A plan from a file, `planned`, determines the compute dtype and the quantization of matmuls. Frozen weights are
    stored in the compute dtype, which is by default that of the checkpoint on CPUs, and bfloat16 on other platforms.

    Raises:
      SpanaxError: the workload has no data, or the step cannot be traced.
      DataError: the tokens need a larger vocabulary than the model has.
    """
    workload, config = _with_defaults(load, config)
    if planned is not None and config.lora is None:
        config = replace(config, quantize=planned.schedule.quantize)  # for the record of the run
    if config.lora is not None and planned is None and config.dtype is None:
        config = replace(config, dtype=_stored_dtype(config) if platform == "cpu" else "bfloat16")
    program = config.trace(
        workload,
        config,
        planned=planned,
        learning_rate=config.learning_rate or 0.0,
        num_steps=config.steps or 0,
        recipe=config,
    )
    return workload, config, program


def _stored_dtype(config: TrainConfig) -> str:
    """Returns the dtype of the weights that adapters are trained for.

    Raises:
      MissingError: there are none.
    """
    if config.init is None:
        raise MissingError("--lora has no weights to adapt.", fix="--init runs/base, or a folder of spanax import")
    return weights.Source.of(config.init).dtype


def _with_defaults(load: Callable[..., Workload], config: TrainConfig) -> tuple[Workload, TrainConfig]:
    """Returns the workload in the configured sizes with the tokenizer's vocabulary, and the settings with defaults."""
    workload = config.load(load)
    default_rate = workload.learning_rate * (1 if config.lora is None else RATE)
    config = replace(
        config,
        learning_rate=default_rate if config.learning_rate is None else config.learning_rate,
        tokenizer=config.tokenizer or workload.tokenizer,
        init=config.init or workload.init,
    )
    source = source_of(config, workload)
    check_local_paths(replace(config, data=str(source) if isinstance(source, str | Path) else None))  # of the workload
    if workload.vocab_size is not None:
        options = Options(tokenizer_of(config), field=config.field, chat_template=template_of(config))
        leaves = list(flat(workload.batch))
        parts = [part for part, _ in opened(source, leaves, options)]
        if set(leaves) == WINDOWS and any(isinstance(part, Conversations) for part in parts):
            load = partial(load, is_chat=True)
            workload = config.load(load)
        num_tokens = vocab_size(parts)
        if num_tokens not in (None, workload.vocab_size):
            workload = config.load(load, vocab_size=num_tokens)
        if num_tokens is not None and num_tokens > (workload.vocab_size or 0):
            raise DataError(
                f"the tokens need a vocabulary of {num_tokens}, and the model has {workload.vocab_size}.",
                where=f"--data {source} --tokenizer {config.tokenizer}",
                fix=f"--tokenizer bpe:{workload.vocab_size}, or a model with that vocabulary",
            )
    steps = config.steps or _steps_of_epochs(config, workload, source) or workload.num_steps
    if (config.warmup_steps or 0) >= steps:
        raise RangeError(
            f"--warmup-steps {config.warmup_steps} is not below --steps {steps}.",
            fix=f"--warmup-steps {max(steps // 10, min(1, steps - 1))}",
        )
    return workload, replace(config, steps=steps)


def _steps_of_epochs(config: TrainConfig, workload: Workload, source: Any) -> int | None:
    """Returns the number of batches in --num-epochs passes over the training data; None without that flag.

    Raises:
      SpanaxError: the data is an iterable, whose length is unknown.
    """
    if config.num_epochs is None:
        return None
    options: dict[str, Any] = {"tokenizer": tokenizer_of(config), "chat_template": template_of(config)}
    options |= {"field": config.field, "prefetch": 0}
    with closing(batches(source, workload.batch, epochs=config.num_epochs, **options)) as data:
        if data.num_batches is None:
            fix = "a source with a length, or a number of steps instead"
            raise DataError("--num-epochs needs data with a length, and this is an iterable.", fix=fix)
        return data.num_batches


def tokenizer_of(config: TrainConfig) -> str | TrainedTokenizer:
    """Returns the tokenizer of the settings, or the one that a run to resume has saved.

    Raises:
      DataError: the saved tokenizer is missing, or does not match its checksum.
    """
    name = config.tokenizer or "bytes"
    saved = saved_tokenizer(Path(config.output_dir)) if config.resume and config.output_dir else None
    return name if saved is None else TrainedTokenizer(name, saved)


def template_of(config: TrainConfig) -> str | ChatTemplate | None:
    """Returns the chat template of the settings, or the one that a run to resume has recorded.

    Raises:
      DataError: the record is missing, or does not match its checksum.
    """
    saved = saved_template(Path(config.output_dir)) if config.resume and config.output_dir else {}
    return recorded_template(saved) or config.chat_template


def source_of(config: TrainConfig, workload: Workload) -> Any:
    """Returns the training data: --data, or the workload's source.

    Raises:
      SpanaxError: there is neither.
    """
    source = config.data if config.data is not None else workload.source
    if source is None:
        custom = "source=... in your spanax.Workload"
        raise WorkloadError(
            f"workload '{config.workload}' has no data.",
            fix=custom if workload.vocab_size is None else f"--data PATH, or {custom}",
        )
    return source
