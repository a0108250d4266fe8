"""TrainConfig: every setting of `spanax train`; the command line, the TOML file and config.toml are made of it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from tyro.conf import Positional

from spanax.documents import MAX_TOML_BYTES
from spanax.errors import SpanaxError, nearest
from spanax.hardware.flags import NONE, flags_of
from spanax.printable import is_printable
from spanax.run.record.folder import config_text
from spanax.run.record.trackers import check_trackers
from spanax.run.step.guard import POLICIES, Guard, check_several
from spanax.schema import SchemaError, parsed, short
from spanax.trace.rewrites.remat_policies import (
    known_accumulation,
    known_attention,
    known_chunks,
    known_dtype,
    known_policy,
)


@dataclass(frozen=True)
class TrainConfig:
    """Train a workload on the devices that are there, or on simulated ones.

    Attributes:
      workload: a name (gpt-nano, llama-nano, moe-nano, vit-nano, resnet-nano, gpt2, llama3-8b, ...), file.py:name,
        or a folder that spanax import wrote.
      layout: data, zero1, zero2, fsdp, hsdp, tensor, data+tensor, fsdp+tensor, context, ring, expert,
        pipeline, pipeline+tensor or 3d; `+seq` behind a tensor one splits the sequence too. By default it is inferred
        from --mesh, or the fastest layout that fits.
      mesh: axis sizes, slowest first, such as data=4,model=2.
      plan: a plan file to obey, instead of layout and mesh.
      devices: how many devices; simulated on a CPU where there is no accelerator (8 by default there).
      steps: how many steps to train in all, those before a resume included; an error if the run has taken more.
      steps_per_call: how many steps the devices are given at once, for models so small that the host is the slower one;
        every step is told of, and a call ends where a save or an evaluation is due.
      batch: examples in a global batch.
      seq: tokens in an example.
      data: a text file, a folder of them, a .bin of tokens; a .jsonl, .parquet, .arrow or .array_record, a folder or a
        pattern of them; a.jsonl=0.7,b.parquet=0.3 mixes; or `python`: its standard library, for a start.
      field: the field of a table that holds the text or the tokens (of several the first that a table has), or
        leaf=field,leaf=field.
      tokenizer: bytes, bpe, bpe:4096, or the path of a tokenizer.json.
      lr: the peak learning rate.
      seed: of the parameters and of the order of the data.
      dtype: what is computed in, float32, bfloat16 or float16; parameters stay as the model makes them. Left out:
        bfloat16 on accelerators, unless the model chooses dtypes itself.
      optimizer_state: what the optimizer remembers is kept in, float32 or bfloat16.
      microbatches: parts of the batch over which gradients are added up; a pipeline sends them through its stages.
      accumulate: what microbatches compute: exact, the results of the batch, or mean, the mean of theirs.
      schedule: in which order the stages of a mesh with `pipe` work: gpipe, 1f1b, interleaved or zero-bubble.
      chunks: pieces of the model on each stage, for interleaved.
      remat: what the backward pass keeps: none forgets nothing, dots keeps matmul results, full only what enters a
        layer, offload is dots in host memory. Left out: the fastest that fits; on CPUs as the model has it, where a
        layout or mesh is given.
      attention: plain, as the model wrote it; flash, by the platform's kernel; auto, by it where it can be. Left out:
        auto on accelerators, plain on CPUs.
      loss_chunks: the logits in so many chunks of tokens, or auto: where that saves much memory. Left out: auto on
        accelerators, 1 on CPUs.
      out: the run folder; runs/<workload>-<time> by default.
      init: a run folder or checkpoint that the parameters begin from, such as spanax import writes; all else is new.
      init_partial: with init, load the weights that match by path and shape, and list the others: for a model that has
        more, such as LoRA adapters or a new head.
      resume: go on from the newest good checkpoint in the run folder, on any mesh.
      accept_changed_model: with resume, go on also where the model or the loss computes something else than before.
      save_every: steps between checkpoints; 0 saves at the end only.
      keep: how many checkpoints to keep.
      eval_every: steps between evaluations on held-out data; 0 evaluates at the end only.
      eval_batches: how many batches one evaluation takes.
      log_every: steps between lines.
      track: tensorboard, wandb or both with a comma: trackers that are told what metrics.jsonl is.
      on_bad_step: what follows on a loss, gradient norm or parameter that is not finite, or a spike: halt, skip (the
        step changes nothing), rollback (to the newest checkpoint, and the batch is left out) or ignore.
      spike: a loss or gradient norm over so many times the median of the last 64 good steps is bad too; such as 10.
      patience: how many bad steps in a row, or rollbacks to one checkpoint, are borne.
      profile: trace the steps from A to B, as A:B, and say what their time goes to.
      config: a TOML file with any of these settings; flags win over it.
      xla_flags: options for XLA's compiler: none, default (those of the chips, as docs/training.md lists them), or
        name=value with commas between them; left out: those of the plan.
      json: write JSON lines, and nothing else, to standard output.
      traceback: show the full traceback of an error.
    """

    workload: Positional[str] = "gpt-nano"
    layout: str | None = None
    mesh: str | None = None
    plan: str | None = None
    devices: int | None = None
    steps: int | None = None
    steps_per_call: int = 1
    batch: int | None = None
    seq: int | None = None
    data: str | None = None
    field: str | None = None
    tokenizer: str | None = None
    lr: float | None = None
    seed: int = 0
    dtype: str | None = None
    optimizer_state: str = "float32"
    microbatches: int | None = None
    accumulate: str | None = None
    schedule: str | None = None
    chunks: int | None = None
    remat: str | None = None
    attention: str | None = None
    loss_chunks: str | None = None
    out: str | None = None
    init: str | None = None
    init_partial: bool = False
    resume: bool = False
    accept_changed_model: bool = False
    save_every: int = 100
    keep: int = 3
    eval_every: int = 0
    eval_batches: int = 20
    log_every: int = 1
    track: str | None = None
    on_bad_step: str = "halt"
    spike: float | None = None
    patience: int = 3
    profile: str | None = None
    config: str | None = None
    xla_flags: str | None = None
    json: bool = False
    traceback: bool = False

    def record(self) -> dict[str, Any]:
        """The settings that make up the run, without where it lies and how it was called."""
        how = ("out", "resume", "accept_changed_model", "profile", "config", "json", "traceback")
        return {key: value for key, value in asdict(self).items() if key not in how}

    @property
    def guard(self) -> Guard | None:
        """What watches the numbers, if anything does."""
        return None if self.on_bad_step == "ignore" else Guard(self.on_bad_step, self.spike, self.patience)


STATE_DTYPES = ("float32", "bfloat16")
ON_BAD_STEP = (*POLICIES, "ignore")

OF_PLAN = ("layout", "mesh", "dtype", "microbatches", "schedule", "chunks", "remat", "attention", "loss_chunks")
"""Settings that a plan file contains."""

LEAST: dict[str, float] = {
    "devices": 1, "steps": 1, "steps_per_call": 1, "batch": 1, "seq": 1, "microbatches": 1, "chunks": 1, "lr": 0.0,
    "seed": 0, "save_every": 0, "keep": 1, "eval_every": 0, "eval_batches": 1, "log_every": 1,
    "spike": 1.1, "patience": 0,
}  # fmt: skip

MOST: dict[str, float] = {"steps_per_call": 1024, "seq": 1 << 24, "seed": (1 << 63) - 1, "lr": 1e6}
"""What is beyond every use, and then fails somewhere inside; 10**12 of all others."""


MAX_RECORD_BYTES = MAX_TOML_BYTES - 256
"""Of all settings as TOML: so much is read back, with a seal in front."""

TYPES = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}


def with_settings(config: TrainConfig, settings: Mapping[str, Any], where: str) -> TrainConfig:
    """A configuration with the settings of a file.

    Raises:
      SpanaxError: a key that does not exist, or a value of another type.
    """
    # An error may precede the reading of the file.
    known = [field.name for field in fields(TrainConfig) if field.name != "traceback"]
    for key in settings:
        if key not in known:
            raise SpanaxError(f"unknown setting '{key}'.", where=where, fix=nearest(key, known))
    try:
        return parsed(TrainConfig, asdict(config) | dict(settings), is_strict=False)
    except SchemaError as error:
        expected = next(name for kind, name in TYPES.items() if kind is error.expected)
        raise SpanaxError(
            f"setting '{error.name}' is {short(error.value)}; it must be {expected}.", where=where
        ) from None


def check(config: TrainConfig) -> TrainConfig:
    """The configuration, if its values are possible and go together.

    Raises:
      SpanaxError: they are not, or do not.
    """
    for name, least in LEAST.items():
        value = getattr(config, name)
        flag, most = f"--{name.replace('_', '-')}", MOST.get(name, 10**12)
        if value is not None and value > most:
            raise SpanaxError(f"{flag} is {value}; it takes a number up to {most:g}.", fix=f"{flag} {most:g}")
        if value is not None and not value >= least:
            raise SpanaxError(f"{flag} is {value}; it takes a number from {least:g}.", fix=f"{flag} {least:g}")
    _check_texts(config)
    known_dtype(config.dtype)
    if config.accumulate is not None:
        known_accumulation(config.accumulate)
    if config.optimizer_state not in STATE_DTYPES:
        what = f"unknown optimizer state '{config.optimizer_state}'."
        raise SpanaxError(what, fix=nearest(config.optimizer_state, STATE_DTYPES))
    if config.on_bad_step not in ON_BAD_STEP:
        what = f"--on-bad-step is '{config.on_bad_step}'."
        raise SpanaxError(what, fix=nearest(config.on_bad_step, ON_BAD_STEP))
    known_policy(config.remat)
    known_attention(config.attention)
    flags_of(config.xla_flags or NONE, ())
    known_chunks(config.loss_chunks or 1)
    if config.guard is not None:
        check_several(config.guard, config.steps_per_call)
    profiled_steps(config)
    check_trackers(config.track)
    check_path("--out", config.out)
    if config.resume and config.out is None:
        raise SpanaxError("--resume needs the run folder.", fix="--out runs/NAME --resume")
    if config.plan is not None:
        check_alone({name: getattr(config, name) for name in OF_PLAN})
    return config


def _check_texts(config: TrainConfig) -> None:
    """Checks that the run can be resumed: that its record can be written and read back.

    Raises:
      SpanaxError: a setting is not UTF-8 (as an argument or file name may be), or all of them are too long.
    """
    texts = {name: value for name, value in asdict(config).items() if isinstance(value, str)}
    for name, text in texts.items():
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            flag = f"--{name.replace('_', '-')}" if name != "workload" else "the workload"
            raise SpanaxError(f"{flag} is not UTF-8: {text[:200]!r}.", fix="a name in UTF-8")
    if len(config_text(config.record()).encode()) > MAX_RECORD_BYTES:
        name = max(texts, key=lambda name: len(texts[name]))
        what = f"the settings have more than {MAX_RECORD_BYTES:,} bytes, {len(texts[name]):,} letters in --{name}."
        raise SpanaxError(what, fix="a folder or a pattern in place of a list of files")


def check_path(flag: str, path: str | None) -> None:
    """Checks that a path to write to reads as what it is, wherever it is printed, pasted or sent.

    Raises:
      SpanaxError: it is empty, begins or ends with a blank, or has a control character.
    """
    if path is not None and (path != path.strip() or not path or not is_printable(path)):
        raise SpanaxError(
            f"{flag} is {path!r}: it is empty, begins or ends with a blank, or has a control character.",
            fix=f"{flag} runs/NAME",
        )


def check_alone(settings: Mapping[str, Any]) -> None:
    """Checks that nothing is requested that a plan file already contains.

    Args:
      settings: by the names in OF_PLAN; None where nothing is requested.

    Raises:
      SpanaxError: something is.
    """
    names = [name for name, value in settings.items() if value is not None]
    if names:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in names)
        raise SpanaxError(f"--plan already says {' and '.join(names)}.", fix=f"leave {flags} out")


def profiled_steps(config: TrainConfig) -> tuple[int, int] | None:
    """The first and last step to be traced, if any.

    Raises:
      SpanaxError: they are no such steps, or not of this run.
    """
    if config.profile is None:
        return None
    first, _, last = config.profile.partition(":")
    is_number = first.isdigit() and last.isdigit()
    if not is_number or not 1 <= int(first) <= int(last):
        raise SpanaxError(
            f"--profile is '{config.profile}'; it takes the first and the last step.", fix="--profile 10:20"
        )
    if config.steps is not None and int(last) > config.steps:
        raise SpanaxError(
            f"--profile {config.profile} goes beyond the last step, {config.steps}.",
            fix=f"--profile {max(1, config.steps - 10)}:{config.steps}",
        )
    return int(first), int(last)
