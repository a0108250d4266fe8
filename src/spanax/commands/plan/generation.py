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
    from spanax.show.generation import generation_json, generation_text

    _check(command)
    programs = generation_programs(command.sizes.load(load), command.precision.dtype)
    texts = []
    objects = []
    for name in names:
        plan = generation_plan(programs, cluster(name), layout=command.request.layout, mesh=command.request.mesh)
        most = most_sequences(plan)
        texts.append(generation_text(plan, most, command.top))
        objects.append(generation_json(plan, most, command.top))
    data = objects[0] if len(objects) == 1 else {"clusters": objects}
    return Answer("\n\n".join(texts), data, exit_code=0 if any(each["best"] for each in objects) else 2)


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
