"""`spanax launch`: `spanax launch PLACE [flags] -- COMMAND` runs `train ...` or a program in several processes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Union

import tyro

from spanax.commands.answer import Answer
from spanax.errors import UnknownNameError, nearest
from spanax.launch import local, slurm, workers
from spanax.usage import described, parse_flags

LAUNCHERS: dict[str, tuple[type, Callable[[Any, Sequence[str]], int]]] = {
    "local": (local.LocalCommand, local.launch),
    "slurm": (slurm.SlurmCommand, slurm.launch),
    "workers": (workers.WorkersCommand, workers.launch),
}
"""By place: the flags, and the function that launches and returns an exit code."""

RECIPES = {"kubernetes": "a TrainJob of Kubeflow Trainer", "ray": "JaxTrainer of Ray Train"}
"""By place without a launcher: what starts the processes there."""

SUMMARY = "Run `train ...` or any program in several processes under a supervisor; the command follows `--`."

LaunchFlags: Any = Union[tuple(Annotated[flags, tyro.conf.subcommand(name)] for name, (flags, _) in LAUNCHERS.items())]  # noqa: UP007
"""The flags of any place, for help and completion."""


@dataclass(frozen=True)
class LaunchCommand:
    """The flags of a place, and the command to launch there."""

    place: str
    flags: Any
    argv: Sequence[str]


def parse(argv: Sequence[str]) -> LaunchCommand:
    """Returns the request of the arguments after `spanax launch`.

    Raises:
      SpanaxError: the place is unknown.
      SystemExit: the arguments request help, or cannot be parsed.
    """
    place = argv[0] if argv else ""
    flags = list(argv[1:])
    if place not in LAUNCHERS:
        if place in ("-h", "--help"):
            parse_flags(LaunchFlags, "launch", ["--help"], description=described(SUMMARY, "launch"))
        if place in RECIPES:
            fix = f"{RECIPES[place]}, as docs/hosts.md shows under {place.capitalize()}"
            raise UnknownNameError(f"`spanax launch` has no launcher for '{place}'.", fix=fix)
        raise UnknownNameError(f"cannot launch on '{place}'.", fix=nearest(place, LAUNCHERS))
    end = flags.index("--") if "--" in flags else len(flags)
    parsed = parse_flags(LAUNCHERS[place][0], f"launch {place}", flags[:end])
    return LaunchCommand(place, parsed, flags[end + 1 :])


def answer(command: LaunchCommand) -> Answer:
    """Launches the command; its exit code is that of the launcher.

    Raises:
      SpanaxError: the command cannot be launched.
    """
    return Answer(exit_code=LAUNCHERS[command.place][1](command.flags, command.argv))
