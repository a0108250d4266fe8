"""The command line: parses the flags of a command, runs it, prints its answer, and exits with its code."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn, Union

import tyro

from spanax.commands import (
    check,
    compare,
    evaluate,
    generate,
    inspect,
    launch,
    machine,
    models,
    report,
    train,
    weights,
)
from spanax.commands.answer import Answer
from spanax.commands.plan import answer as plan
from spanax.commands.plan.flags import PlanCommand
from spanax.compat import color_help
from spanax.entries.local_path import check_local_paths
from spanax.errors import FormatError, UnknownNameError
from spanax.frames import user_frames
from spanax.show.error_text import print_error
from spanax.train.compilation_cache import drop_untrusted_folder
from spanax.train.config import TrainConfig
from spanax.usage import described, parse_flags, wants_colors


@dataclass(frozen=True)
class Verb:
    """A command.

    Attributes:
      flags: the dataclass of its flags.
      answer: runs it, given the flags.
      parse: returns the flags, given the arguments. Default: by tyro.
      summary: the first line of its help. Default: that of `flags`.
    """

    flags: Any
    answer: Callable[[Any], Answer]
    parse: Callable[[Sequence[str]], Any] | None = None
    summary: str | None = None


COMMANDS: dict[str, Verb] = {
    "train": Verb(TrainConfig, train.answer, train.parse),
    "plan": Verb(PlanCommand, plan.answer),
    "check": Verb(check.CheckCommand, check.answer),
    "generate": Verb(generate.GenerateCommand, generate.answer),
    "evaluate": Verb(evaluate.EvaluateCommand, evaluate.answer),
    "models": Verb(models.ModelsCommand, models.answer),
    "axes": Verb(models.AxesCommand, models.axes_answer),
    "probe": Verb(machine.ProbeCommand, machine.probe_answer),
    "compare": Verb(compare.CompareCommand, compare.answer),
    "inspect": Verb(inspect.InspectCommand, inspect.answer),
    "checkpoint": Verb(inspect.CheckpointCommand, inspect.checkpoint_answer),
    "report": Verb(report.ReportCommand, report.answer),
    "doctor": Verb(machine.DoctorCommand, machine.doctor_answer),
    "import": Verb(weights.ImportCommand, weights.import_answer),
    "export": Verb(weights.ExportCommand, weights.export_answer),
    "export-rules": Verb(weights.ExportRulesCommand, weights.rules_answer),
    "launch": Verb(launch.LaunchFlags, launch.answer, launch.parse, launch.SUMMARY),
}

SUMMARY = "Train plain Flax NNX models on any devices. Also: --version, --print-completion {bash,zsh,fish}."
SHELLS = ("bash", "zsh", "fish")


def main(args: Sequence[str] | None = None) -> None:
    """Runs a command line and exits: 0, 2 for an invalid request, the codes in `errors`, 130 after Ctrl-C."""
    argv = list(sys.argv[1:] if args is None else args)
    color_help(wants_colors(sys.stdout, sys.stderr))
    try:
        _run(argv)
    except KeyboardInterrupt:
        print("spanax: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and not _is_in_group() and _is_of_stdout(error):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # avoids a second error from flushing at exit
            return
        leave(error, full="--traceback" in argv)


def leave(error: Exception, *, full: bool) -> NoReturn:
    """Prints an error and exits; at once in a group of processes: a regular exit would wait for the others."""
    if not _is_in_group():
        sys.exit(print_error(error, full=full))
    from spanax.processes.lockstep import fail

    fail(error)
    os._exit(print_error(error, full=full))


def _is_in_group() -> bool:
    """Returns whether JAX has joined a group of processes, also one that it detected by itself."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def _is_of_stdout(error: BrokenPipeError) -> bool:
    """Whether the reader of standard output has closed it, rather than a pipe of the user's code."""
    if not user_frames(error):
        return True
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return True
    return False


def _check_encoding(argv: Sequence[str]) -> None:
    """Raises if an argument or the working folder is not UTF-8: files of a run could not record it."""
    for name, text in (*(("an argument", word) for word in argv), ("the working folder", os.getcwd())):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise FormatError(f"{name} is not UTF-8: {ascii(text)}.") from None


def _run(argv: list[str]) -> None:
    _check_encoding(argv)
    drop_untrusted_folder()  # JAX reads it at import, in every command
    if argv == ["--version"]:
        from importlib.metadata import version

        print(f"spanax {version('spanax')}")
        return
    name = argv[0] if argv else ""
    if name not in COMMANDS:
        _overview(argv)
    command = parse(name, argv[1:])
    check_local_paths(command)
    answer = COMMANDS[name].answer(command)
    output = answer.to_json() if getattr(command, "json", False) and answer.data is not None else answer.to_text()
    if output:
        print(output, file=answer.stream)
    if answer.exit_code:
        sys.exit(answer.exit_code)


def parse(name: str, argv: Sequence[str]) -> Any:
    """Returns the flags of a command.

    Raises:
      SpanaxError: a flag has an invalid value.
      SystemExit: the arguments cannot be parsed, or request help.
    """
    verb = COMMANDS[name]
    if verb.parse is not None:
        return verb.parse(argv)
    return parse_flags(verb.flags, name, argv)


def _overview(argv: Sequence[str]) -> None:
    """Prints the help or the completion script of all commands, or reports an unknown command, and exits.

    Raises:
      SpanaxError: the shell is unknown.
    """
    if argv[:1] == ["--print-completion"]:
        if argv[1:] not in [[shell] for shell in SHELLS]:
            raise UnknownNameError(f"cannot complete for '{' '.join(argv[1:])}'.", fix=f"one of {', '.join(SHELLS)}")
        argv = ["--tyro-print-completion", *argv[1:]]
    commands = [
        Annotated[verb.flags, tyro.conf.subcommand(name, description=verb.summary)] for name, verb in COMMANDS.items()
    ]
    everything: Any = Union[tuple(commands)]  # noqa: UP007
    parse_flags(everything, "", argv, prog="spanax", description=described(SUMMARY, ""))
