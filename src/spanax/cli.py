"""The command line: one command a verb, the same words as the library, no logic of its own."""

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO, Union

import tyro
from tyro.conf import Positional

from spanax.commands.error_text import explained
from spanax.commands.launch import KINDS, SAYS, launch
from spanax.commands.requests import (
    CheckCommand,
    CompareCommand,
    DoctorCommand,
    InspectCommand,
    PlanCommand,
    ReportCommand,
)
from spanax.commands.weights import INTEROP, carry_out
from spanax.documents import json_line
from spanax.entries.names import CONFIG
from spanax.errors import PREEMPTED, SpanaxError, WriteError
from spanax.frames import user_frames
from spanax.printable import printable_lines
from spanax.run.config import OF_PLAN, TrainConfig, check, with_settings
from spanax.run.record.folder import read_config, recorded
from spanax.usage import described, wants_colours


@dataclasses.dataclass(frozen=True)
class AxesCommand:
    """Print the named axes of a workload: its sizes, how often each can be split, and where it occurs.

    Attributes:
      workload: a name, or file.py:name.
      batch: examples in a batch.
      seq: tokens in an example.
      json: print one JSON object, with every leaf.
      traceback: show the full traceback of an error.
    """

    workload: Positional[str]
    batch: int | None = None
    seq: int | None = None
    json: bool = False
    traceback: bool = False


@dataclasses.dataclass(frozen=True)
class ProbeCommand:
    """Measure the devices present: matmuls, memory, every collective; writes a cluster file for spanax plan --on.

    Attributes:
      out: the file.
      devices: simulate so many on the CPU where there are fewer.
      seconds: about how long to measure.
    """

    out: Path = Path("cluster.toml")
    devices: int | None = None
    seconds: float = 30.0


@dataclasses.dataclass(frozen=True)
class CheckpointCommand:
    """Look at checkpoints without starting JAX.

    Attributes:
      action: show lists the steps; verify holds every file against its checksum, and exits with 65 if any differs.
      directory: the folder of steps, or a run folder.
      json: print one JSON object.
    """

    action: Positional[Literal["show", "verify"]]
    directory: Positional[Path]
    json: bool = False


COMMANDS: dict[str, Callable[..., Any]] = {
    "train": TrainConfig,
    "plan": PlanCommand,
    "check": CheckCommand,
    "axes": AxesCommand,
    "probe": ProbeCommand,
    "compare": CompareCommand,
    "inspect": InspectCommand,
    "checkpoint": CheckpointCommand,
    "report": ReportCommand,
    "doctor": DoctorCommand,
    **INTEROP,
}


SUMMARY = "Train plain Flax NNX models on any devices. Also: --version, --print-completion {bash,zsh,fish}."
SHELLS = ("bash", "zsh", "fish")


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0, 2 for a wrong request, the codes in `errors`, 130 after Ctrl-C."""
    argv = list(sys.argv[1:] if args is None else args)
    tyro._experimental_options["ansi_codes"] = wants_colours(sys.stdout, sys.stderr)
    try:
        _run(argv)
    except KeyboardInterrupt:
        print("spanax: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _is_of_stdout(error):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing more is to be flushed there
            return
        sys.exit(_print_error(error, full="--traceback" in argv))


def _print_error(error: Exception, *, full: bool) -> int:
    """The exit code of an error, after printing it."""
    text, code = explained(error, full=full)
    print(text, file=sys.stderr, flush=True)
    return code


def _is_of_stdout(error: BrokenPipeError) -> bool:
    """Whether the reader of standard output has closed it, rather than one of a pipe of the user's code."""
    if not user_frames(error):
        return True
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return True
    return False


def _check_readable(argv: Sequence[str]) -> None:
    """Raises if a word, or the folder that relative paths are in, is not UTF-8: no record could name it."""
    for what, text in (*(("an argument", word) for word in argv), ("the working folder", os.getcwd())):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise SpanaxError(f"{what} is not UTF-8: {ascii(text)}.") from None


def _run(argv: list[str]) -> None:
    _check_readable(argv)
    if argv == ["--version"]:
        from importlib.metadata import version

        print(f"spanax {version('spanax')}")
        return
    if argv[:1] == ["launch"]:
        sys.exit(launch(argv[1:]))
    name = argv[0] if argv else ""
    if name not in COMMANDS:
        _overview(argv)
    kind = COMMANDS[name]
    command = tyro.cli(kind, prog=f"spanax {name}", description=described(kind, name), args=argv[1:])
    if isinstance(command, TrainConfig):
        _train(check(_with_files(command, argv[1:])))
    elif name in INTEROP:
        print(printable_lines(carry_out(command)))
    else:
        own: dict[Any, Callable[[Any], None]] = {
            PlanCommand: _plan, CheckCommand: _check, AxesCommand: _axes, ProbeCommand: _probe,
            CompareCommand: _compare, InspectCommand: _inspect, CheckpointCommand: _checkpoint,
            ReportCommand: _report, DoctorCommand: _doctor,
        }  # fmt: skip
        own[kind](command)


def _overview(argv: Sequence[str]) -> None:
    """What is said of all commands together, and what shells need to complete them; none is carried out."""
    if argv[:1] == ["--print-completion"]:
        if argv[1:] not in [[shell] for shell in SHELLS]:
            raise SpanaxError(f"cannot complete for '{' '.join(argv[1:])}'.", fix=f"one of {', '.join(SHELLS)}")
        argv = ["--tyro-print-completion", *argv[1:]]
    commands = [Annotated[kind, tyro.conf.subcommand(name)] for name, kind in COMMANDS.items()]
    everything: Any = Union[(*commands, Annotated[KINDS, tyro.conf.subcommand("launch", description=SAYS)])]  # noqa: UP007
    description = described(SUMMARY, "")
    tyro.cli(everything, prog="spanax", description=description, args=argv)


def _with_files(config: TrainConfig, argv: Sequence[str]) -> TrainConfig:
    """The settings again, over those of a file: of --config, or of the run that is resumed."""
    settled, folder = TrainConfig(), Path(config.out or "")
    before = recorded(folder) if config.resume else {}
    if before:
        settled = with_settings(settled, _moved(before, config), str(folder / CONFIG))
    if config.config is not None:
        file = Path(config.config)
        settings = read_config(file)
        settled = with_settings(settled, _moved(settings, config) if file == folder / CONFIG else settings, str(file))
    if not before and config.config is None:
        return config
    again: TrainConfig = tyro.cli(TrainConfig, prog="spanax train", default=settled, args=argv)
    return again


def _moved(settings: dict[str, Any], config: TrainConfig) -> dict[str, Any]:
    """The settings of a run that is resumed elsewhere: a new place is said whole, so the old one goes with it."""
    is_said = any(value is not None for value in (config.layout, config.mesh, config.plan))
    is_resized = config.devices is not None and config.devices != settings.get("devices")
    dropped: tuple[str, ...] = ("layout", "mesh", "plan") if is_said else ("mesh", "plan") if is_resized else ()
    if config.plan is not None:
        dropped = (*dropped, *OF_PLAN)  # the new plan contains them
    return {key: value for key, value in settings.items() if key not in dropped}


def _train(config: TrainConfig) -> None:
    from spanax.run.compilation_cache import keep_programs
    from spanax.run.distributed.processes import Hosts, obey_supervisor

    obey_supervisor()
    keep_programs()

    from functools import partial

    from spanax.models.workloads import load
    from spanax.run.distributed.devices import devices
    from spanax.run.trainer import train
    from spanax.show.events import reporter

    stream = _clean_stdout() if config.json or Hosts.of().num_hosts > 1 else sys.stdout
    with _leaving_no_one_waiting(config.traceback), reporter(as_json=config.json, stream=stream) as emit:
        done = train(partial(load, config.workload), config, devices(config.devices), emit)
        if config.profile is not None:
            from spanax.show.profile_event import profile_event

            emit(profile_event(Path(done["out"])))
    if done["event"] == "preempted":
        sys.exit(PREEMPTED)


@contextmanager
def _leaving_no_one_waiting(full: bool) -> Iterator[None]:
    """In a group, end at an error at once: at its ordinary end JAX would wait for the others, and they for this one."""
    try:
        yield
    except Exception as error:
        import jax

        # Also a group that JAX found by itself.
        if not jax.distributed.is_initialized():
            raise
        os._exit(_print_error(error, full=full))


def _plan(command: PlanCommand) -> None:
    from functools import partial

    from spanax.commands.plan import answer, compare
    from spanax.models.workloads import load

    if command.diff is not None:
        print(printable_lines("\n".join(compare(*command.diff))))
        return
    text, data = answer(partial(load, command.workload), command)
    print(json_line(data) if command.json else printable_lines(text))
    if data.get("best") is None and "answer" not in data:
        sys.exit(2)


def _check(command: CheckCommand) -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # no accelerator is wanted, and looking for one may take minutes

    from functools import partial

    from spanax.check.finding import Severity
    from spanax.commands.check import answer
    from spanax.models.workloads import load

    text, data = answer(partial(load, command.workload), command)
    print(json_line(data) if command.json else printable_lines(text))
    if command.fail_on and any(
        Severity.of(one["severity"]) >= Severity.of(command.fail_on) for one in data["findings"]
    ):
        sys.exit(1)


def _probe(command: ProbeCommand) -> None:
    from spanax.hardware.probe import probe
    from spanax.run.distributed.devices import devices

    if not command.out.parent.is_dir() or command.out.is_dir():  # better said before the measuring than behind it
        raise WriteError(f"cannot write '{command.out}'.", fix="--out cluster.toml, in a folder that is there")
    command.out.write_text(probe(devices(command.devices), seconds=command.seconds))
    print(f"measured; spanax plan ... --on {command.out}")


def _compare(command: CompareCommand) -> None:
    from functools import partial

    from spanax.commands.compare import answer
    from spanax.commands.progress import progress
    from spanax.models.workloads import load
    from spanax.run.distributed.devices import devices

    stream = _clean_stdout() if command.json else sys.stdout
    with progress(sys.stderr) as tell:
        text, data = answer(partial(load, command.workload), command, devices(command.devices), tell=tell)
    print(json_line(data) if command.json else printable_lines(text), file=stream)


def _inspect(command: InspectCommand) -> None:
    from spanax.commands.inspect import answer
    from spanax.models.workloads import load
    from spanax.run.distributed.devices import devices

    text, data = answer(command, load, devices)
    print(json_line(data) if command.json else text)


def _axes(command: AxesCommand) -> None:
    from spanax.models.workloads import load
    from spanax.show.axes import axes_json, axes_text

    began = time.perf_counter()
    workload = load(command.workload, batch_size=command.batch, seq_len=command.seq)
    program = workload.trace(learning_rate=workload.learning_rate, num_steps=workload.num_steps)
    seconds = time.perf_counter() - began
    if command.json:
        print(json_line({"workload": command.workload, **axes_json(program), "trace_seconds": seconds}))
    else:
        print(printable_lines(axes_text(program)))


def _checkpoint(command: CheckpointCommand) -> None:
    from spanax.show.checkpoints import show, verify

    text, problems = (show if command.action == "show" else verify)(command.directory, as_json=command.json)
    print(printable_lines(text))
    if problems and command.action == "verify":
        sys.exit(65)


def _report(command: ReportCommand) -> None:
    if command.run.is_file() or command.out is not None:
        from spanax.show.page.pages import answer

        print(printable_lines(answer(command)))
        return
    from spanax.commands.report import report, report_text, sections

    found = report(command.run)
    print(json_line(found.to_json()) if command.json else printable_lines(report_text(sections(found))))


def _doctor(command: DoctorCommand) -> None:
    from spanax.doctor.diagnosis import diagnose
    from spanax.show.doctor import is_well, verdicts_json, verdicts_text

    found = diagnose(out=command.out, hosts=command.hosts, timeout=command.timeout)
    in_colours = wants_colours(sys.stdout)
    print(json_line(verdicts_json(found)) if command.json else verdicts_text(found, in_colours=in_colours))
    if not is_well(found):
        sys.exit(1)


def _clean_stdout() -> TextIO:
    """Standard output for ourselves alone: C++ libraries (Gloo) print there too, and go to standard error now."""
    sys.stdout.flush()
    ours = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return ours
