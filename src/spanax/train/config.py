"""The settings of `spanax train`, as flags, in a TOML file and in the config.toml of a run."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from tyro.conf import Positional

from spanax.documents import MAX_TOML_BYTES
from spanax.entries.local_path import check_local_paths, local_path
from spanax.errors import ConflictError, FormatError, MissingError, RangeError, UnknownNameError, nearest
from spanax.hardware.flags import NONE, flags_of
from spanax.printable import is_printable
from spanax.schema import SchemaError, parsed, short
from spanax.step.guard import POLICIES, Guard, check_steps_per_call
from spanax.trace.optimizers.recipe import Recipe
from spanax.train.flags import BatchSizes, LayoutRequest, Precision, check_numbers
from spanax.train.record.folder import config_text
from spanax.train.record.trackers import check_trackers
from spanax.units import whole_number


@dataclass(frozen=True)
class TrainConfig(BatchSizes, Precision, Recipe, LayoutRequest):
    """Train a workload on the available devices, or on simulated ones.

    Attributes:
      workload: a name (gpt-nano, llama-nano, moe-nano, vit-nano, resnet-nano, gpt2, llama3-8b, ...), file.py:name,
        or a folder written by spanax import.
      plan: a plan file to use instead of --layout and --mesh.
      devices: number of devices; simulated on a CPU if there is no accelerator (then 8 by default).
      steps: total number of steps, including those before a resume; an error if the run has taken more.
      num_epochs: passes over the training data, instead of --steps.
      steps_per_call: steps dispatched to the devices at once, for models whose step is shorter than the overhead of the
        host; every step is logged, and a call ends at a save or an evaluation.
      data: a text file, a folder of text files, a .bin of tokens; a .jsonl, .csv, .parquet, .arrow or .array_record
        file, a folder or a pattern of them; a.jsonl=0.7,b.parquet=0.3 for a mixture; or `python`, the source of its
        standard library.
      field: the field of a table with the text or the tokens (of several, the first that a table has), or
        leaf=field,leaf=field.
      tokenizer: bytes, bpe, bpe:4096, or the path of a tokenizer.json.
      chat_template: chatml, or the file of a Jinja template, for conversations. Default: that of the tokenizer.
      learning_rate: peak learning rate; --lr for short. Default: that of the workload.
      seed: seed of the parameters and of the order of the data.
      output_dir: run folder. Default: runs/<workload>-<time>.
      init: a run folder or checkpoint to load the parameters from, such as one written by spanax import; the rest of
        the state is new.
      init_partial: with --init, load the weights that match by path and shape and list the others, for a model with
        additional weights, such as LoRA adapters or a new head.
      resume: continue from the newest intact checkpoint in the run folder, on any mesh.
      accept_changed_model: with --resume, continue even if the model or the loss has changed.
      save_every: steps between checkpoints; 0 saves only at the end.
      keep_last: number of newest checkpoints to keep.
      eval_every: steps between evaluations on held-out data; 0 evaluates only at the end.
      eval_batches: batches per evaluation.
      sample_every: steps between samples, which continue the prompts of --sample-prompts; also at the end.
      sample_prompts: a text file with one prompt per line.
      log_every: steps between log lines.
      track: trackers that log the metrics: tensorboard, wandb, or tensorboard,wandb.
      on_bad_step: action if a loss, gradient norm or parameter is not finite, or a spike: halt, skip (discard the
        update), rollback (restore the newest checkpoint, and skip the batch) or ignore.
      spike_factor: a loss or gradient norm above this multiple of the median of the last 64 good steps is bad,
        such as 10.
      max_bad_steps: tolerated number of consecutive bad steps, or of rollbacks to one checkpoint.
      profile: trace the steps from A to B, as A:B, and report where their time is spent.
      config: a TOML file with any of these settings; flags override it.
      xla_flags: XLA compiler options: none, default (those of the chips, see docs/training.md), or comma-separated
        name=value pairs. Default: those of the plan.
      json: write JSON lines, and nothing else, to standard output.
      traceback: show the full traceback of an error.
    """

    workload: Positional[str] = "gpt-nano"
    plan: str | None = None
    devices: int | None = None
    steps: int | None = None
    num_epochs: int | None = None
    steps_per_call: int = 1
    data: str | None = None
    field: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    learning_rate: float | None = None
    seed: int = 0
    output_dir: str | None = None
    init: str | None = None
    init_partial: bool = False
    resume: bool = False
    accept_changed_model: bool = False
    save_every: int = 100
    keep_last: int = 3
    eval_every: int = 0
    eval_batches: int = 20
    sample_every: int | None = None
    sample_prompts: str | None = None
    log_every: int = 1
    track: str | None = None
    on_bad_step: str = "halt"
    spike_factor: float | None = None
    max_bad_steps: int = 3
    profile: str | None = None
    config: str | None = None
    xla_flags: str | None = None
    json: bool = False
    traceback: bool = False

    def record(self) -> dict[str, Any]:
        """Returns the settings to record in config.toml, without those of one invocation."""
        invocation = ("output_dir", "resume", "accept_changed_model", "profile", "config", "json", "traceback")
        return {key: value for key, value in asdict(self).items() if key not in invocation}

    @property
    def guard(self) -> Guard | None:
        """The policy for bad steps; None with --on-bad-step ignore."""
        return None if self.on_bad_step == "ignore" else Guard(self.on_bad_step, self.spike_factor, self.max_bad_steps)


STATE_DTYPES = ("float32", "bfloat16")
ON_BAD_STEP = (*POLICIES, "ignore")

PLAN_SETTINGS = (
    "layout",
    "mesh",
    "dtype",
    "quantize",
    "microbatches",
    "pipeline_schedule",
    "virtual_stages",
    "remat",
    "attention",
    "loss_chunks",
    "pad",
    "offload",
)
"""Settings that a plan file determines."""


def planned_settings(lora: str | None) -> tuple[str, ...]:
    """Returns the settings that a plan file determines; with adapters, the storage of frozen weights is not one."""
    return tuple(name for name in PLAN_SETTINGS if lora is None or name != "quantize")


MAX_RECORD_BYTES = MAX_TOML_BYTES - 256
"""The maximal size of config.toml, without its checksum."""

RENAMED = {"lr": "learning_rate"}
"""Former keys of the TOML file, which are still read."""

TYPES = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}


def with_settings(config: TrainConfig, settings: Mapping[str, Any], where: str) -> TrainConfig:
    """Returns the configuration with the settings of a file.

    Raises:
      SpanaxError: a key does not exist, or a value has another type.
    """
    # `traceback` is needed before the file is read.
    known = [field.name for field in fields(TrainConfig) if field.name != "traceback"]
    settings = {RENAMED.get(key, key): value for key, value in settings.items()}
    for key in settings:
        if key not in known:
            raise UnknownNameError(f"unknown setting '{key}'.", where=where, fix=nearest(key, known))
    try:
        return parsed(TrainConfig, asdict(config) | dict(settings), is_strict=False)
    except SchemaError as error:
        expected = next(name for kind, name in TYPES.items() if kind is error.expected)
        raise FormatError(
            f"setting '{error.name}' is {short(error.value)}; it must be {expected}.", where=where
        ) from None


def check(config: TrainConfig) -> TrainConfig:
    """Returns the configuration after validating its values and their combination.

    Raises:
      SpanaxError: a value is invalid, or contradicts another.
    """
    check_numbers(config)
    _check_texts(config)
    config.check_names()
    config.check_dtype(config.lora)
    config.check_layout()
    if config.optimizer_state not in STATE_DTYPES:
        message = f"unknown optimizer state '{config.optimizer_state}'."
        raise UnknownNameError(message, fix=nearest(config.optimizer_state, STATE_DTYPES))
    if config.on_bad_step not in ON_BAD_STEP:
        message = f"unknown --on-bad-step '{config.on_bad_step}'."
        raise UnknownNameError(message, fix=nearest(config.on_bad_step, ON_BAD_STEP))
    flags_of(config.xla_flags or NONE, ())
    if config.guard is not None:
        check_steps_per_call(config.guard, config.steps_per_call)
    profiled_steps(config)
    check_trackers(config.track)
    check_local_paths(config)
    check_path("--output-dir", config.output_dir)
    if config.resume and config.output_dir is None:
        raise MissingError("--resume requires --output-dir, the run folder.", fix="--output-dir runs/NAME --resume")
    if config.steps is not None and config.num_epochs is not None:
        raise ConflictError("--steps and --num-epochs both say how long to train.", fix="one of them")
    if (config.sample_every is None) != (config.sample_prompts is None):
        missing = "--sample-every" if config.sample_every is None else "--sample-prompts"
        raise MissingError(f"{missing} is missing.", fix="--sample-every 200 --sample-prompts prompts.txt")
    if config.plan is not None:
        check_alone({name: getattr(config, name) for name in planned_settings(config.lora)})
    return config


def _check_texts(config: TrainConfig) -> None:
    """Checks that the settings can be written to config.toml and read back.

    Raises:
      SpanaxError: a setting is not UTF-8 (as an argument or file name may be), or the settings are too long.
    """
    texts = {name: value for name, value in asdict(config).items() if isinstance(value, str)}
    for name, text in texts.items():
        if any("\ud800" <= character <= "\udfff" for character in text):
            flag = f"--{name.replace('_', '-')}" if name != "workload" else "the workload"
            raise FormatError(f"{flag} is not UTF-8: {text[:200]!r}.", fix="a name in UTF-8")
    if len(config_text(config.record()).encode()) > MAX_RECORD_BYTES:
        name = max(texts, key=lambda name: len(texts[name]))
        size = f"more than {MAX_RECORD_BYTES:,} bytes, {len(texts[name]):,} characters in --{name}"
        raise FormatError(f"the settings have {size}.", fix="a folder or a pattern instead of a list of files")


def check_path(flag: str, path: str | None) -> None:
    """Checks that a path to write to can be printed and copied unambiguously.

    Raises:
      SpanaxError: it is empty, begins or ends with whitespace, has a control character, or is a URL.
    """
    if path is not None and (path != path.strip() or not path or not is_printable(path)):
        raise FormatError(
            f"{flag} is {path!r}: it is empty, begins or ends with whitespace, or has a control character.",
            fix=f"{flag} runs/NAME",
        )
    if path is not None:
        local_path(path)


def check_alone(settings: Mapping[str, Any]) -> None:
    """Checks that no setting is given that a plan file determines.

    Args:
      settings: the settings named in PLAN_SETTINGS; None for those not given.

    Raises:
      SpanaxError: a setting is given.
    """
    names = [name for name, value in settings.items() if value is not None]
    if names:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in names)
        raise ConflictError(f"--plan already determines {' and '.join(names)}.", fix=f"omit {flags}")


def profiled_steps(config: TrainConfig) -> tuple[int, int] | None:
    """Returns the first and last step to profile; None if no step is profiled.

    Raises:
      SpanaxError: --profile is not of the form A:B, or goes beyond the last step.
    """
    if config.profile is None:
        return None
    first, _, last = config.profile.partition(":")
    start = whole_number(first)
    stop = whole_number(last)
    if start is None or stop is None or not 1 <= start <= stop:
        raise FormatError(
            f"--profile is '{config.profile}'; it must be the first and the last step.", fix="--profile 10:20"
        )
    if config.steps is not None and stop > config.steps:
        raise RangeError(
            f"--profile {config.profile} goes beyond the last step, {config.steps}.",
            fix=f"--profile {max(1, config.steps - 10)}:{config.steps}",
        )
    return start, stop
