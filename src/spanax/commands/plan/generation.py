"""`spanax plan --generate`: the layouts in which a model generates."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from spanax.commands.answer import Answer
from spanax.commands.plan.flags import PlanCommand
from spanax.errors import ConflictError
from spanax.train.flags import LayoutRequest, Load, Precision
from spanax.usage import flag


def generation(command: PlanCommand, load: Load, names: Sequence[str]) -> Answer:
    """Returns the layouts of a generation on each cluster; the exit code is 2 if nothing fits on any.

    Raises:
      SpanaxError: a flag is for training, or the model cannot generate.
    """
    from spanax.decoding.programs import generation_programs
    from spanax.hardware.cluster import cluster
    from spanax.plan.advice.generation import generation_plan, most_sequences
    from spanax.show.generation import clusters_text, generation_json, generation_text

    _check(command)
    clusters = [cluster(name) for name in names]
    num_devices = max(each.num_devices for each in clusters)
    programs = generation_programs(command.sizes.load(load), command.precision.dtype, num_devices)
    request = command.request
    plans = [generation_plan(programs, machine, layout=request.layout, mesh=request.mesh) for machine in clusters]
    answers = [(plan, most_sequences(plan)) for plan in plans]
    objects = [generation_json(plan, most, command.top) for plan, most in answers]
    exit_code = 2 * (not any(plan.best for plan in plans))
    if len(answers) > 1:
        return Answer(clusters_text(answers), {"clusters": objects}, exit_code=exit_code)
    return Answer(generation_text(*answers[0], command.top), objects[0], exit_code=exit_code)


def _check(command: PlanCommand) -> None:
    """Raises SpanaxError if a flag is set that generation does not have."""
    known = ("workload", "on", "sizes", "top", "generate", "compile", "json", "traceback")
    plain = PlanCommand(
        **{name: getattr(command, name) for name in known},
        precision=Precision(dtype=command.precision.dtype),
        request=LayoutRequest(layout=command.request.layout, mesh=command.request.mesh),
    )
    names = [flag(name) for name in _differing(command, plain)]
    if names:
        raise ConflictError(f"--generate plans no training, which {names[0]} is for.", fix=f"leave out {names[0]}")


def _differing(given: Any, plain: Any) -> Iterator[str]:
    """Yields the names of fields of dataclasses, and of those in them, that differ."""
    for name in (field.name for field in fields(given)):
        value = getattr(given, name)
        usual = getattr(plain, name)
        if is_dataclass(value):
            yield from _differing(value, usual)
        elif value != usual:
            yield name
