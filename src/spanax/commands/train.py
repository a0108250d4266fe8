"""`spanax train`: settings from flags and files, and the training run."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from spanax.commands.answer import Answer
from spanax.entries.names import CONFIG
from spanax.errors import PREEMPTED
from spanax.train.config import TrainConfig, check, planned_settings, with_settings
from spanax.train.record.folder import read_config, recorded
from spanax.usage import parse_flags


def parse(argv: Sequence[str]) -> TrainConfig:
    """Returns the settings from flags, over those of --config or of the run to resume.

    Raises:
      SpanaxError: a setting is invalid.
      DataError: a file of settings cannot be read.
    """
    return check(with_files(parse_flags(TrainConfig, "train", argv), argv))


def with_files(config: TrainConfig, argv: Sequence[str]) -> TrainConfig:
    """Returns the settings of the files that `config` names, with the flags applied on top."""
    defaults = TrainConfig()
    folder = Path(config.output_dir or "")
    resumed = recorded(folder) if config.resume else {}
    if resumed:
        defaults = with_settings(defaults, without_replaced(resumed, config), str(folder / CONFIG))
    if config.config is not None:
        file = Path(config.config)
        settings = read_config(file)
        if file == folder / CONFIG:
            settings = without_replaced(settings, config)
        defaults = with_settings(defaults, settings, str(file))
    if not resumed and config.config is None:
        return config
    combined: TrainConfig = parse_flags(TrainConfig, "train", argv, default=defaults)
    return combined


def without_replaced(settings: dict[str, Any], config: TrainConfig) -> dict[str, Any]:
    """Returns the recorded settings without the placement and the length, where the flags request others."""
    is_moved = any(value is not None for value in (config.layout, config.mesh, config.plan))
    is_resized = config.devices is not None and config.devices != settings.get("devices")
    dropped: tuple[str, ...] = ()
    if is_moved:
        dropped = ("layout", "mesh", "plan")
    elif is_resized:
        dropped = ("mesh", "plan")
    if config.plan is not None:
        dropped = (*dropped, *planned_settings(settings.get("lora")))  # the new plan contains them
    if config.steps is not None:
        dropped = (*dropped, "num_epochs")
    elif config.num_epochs is not None or "num_epochs" in settings:
        dropped = (*dropped, "steps")  # a run records both, and the steps follow from the epochs
    return {key: value for key, value in settings.items() if key not in dropped}


def answer(config: TrainConfig) -> Answer:
    """Trains, and prints events as they happen; the exit code is `PREEMPTED` after a preemption."""
    from spanax.processes.processes import Hosts
    from spanax.processes.supervision import attach_supervisor
    from spanax.train.compilation_cache import enable_compilation_cache

    is_supervised = attach_supervisor()
    enable_compilation_cache()

    from spanax.decoding.generate import generate
    from spanax.models.workloads import load
    from spanax.processes.devices import devices
    from spanax.show.live.events import RESUME, reporter
    from spanax.show.live.terminal import reserve_stdout
    from spanax.train.trainer import train

    stream = reserve_stdout() if config.json or Hosts.of().num_hosts > 1 else sys.stdout
    # The command that started several processes is not known here; a supervisor prints its own.
    again = f"{RESUME} in {Hosts.of().num_hosts} processes" if Hosts.of().num_hosts > 1 else RESUME
    resume = "" if is_supervised else again
    with reporter(as_json=config.json, stream=stream, resume=resume) as emit:
        last = train(partial(load, config.workload), config, devices(config.devices), emit, generate)
        if config.profile is not None:
            from spanax.check.measure.run_record import profile_event

            emit(profile_event(Path(last["out"])))
    return Answer(exit_code=PREEMPTED if last["event"] == "preempted" else 0)
