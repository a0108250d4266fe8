"""`spanax export-rules`: prints a layout as logical axis names and rules."""

from dataclasses import dataclass
from functools import partial

from tyro.conf import Positional

from spanax.commands.answer import Answer
from spanax.commands.weights.host_memory import use_host_memory
from spanax.train.flags import BatchSizeFlags, BatchSizes


@dataclass(frozen=True)
class ExportRulesCommand:
    """Print a layout as logical axis names and rules, for MaxText and Flax.

    Attributes:
      workload: a name, or file.py:name.
      mesh: sizes of the mesh axes, slowest first.
      layout: name of the layout. Default: what the names of the mesh axes imply.
      json: print one JSON object.
      traceback: show the full traceback of an error.
    """

    workload: Positional[str]
    mesh: str
    layout: str | None = None
    sizes: BatchSizeFlags = BatchSizes()
    json: bool = False
    traceback: bool = False


def answer(command: ExportRulesCommand) -> Answer:
    """Returns the rules of the planned layout.

    Raises:
      SpanaxError: the workload, layout or mesh is invalid.
    """
    use_host_memory()
    import spanax
    from spanax.interop.rules import export_rules
    from spanax.models.workloads import load

    workload = command.sizes.load(partial(load, command.workload))
    program = workload.trace(learning_rate=workload.learning_rate, num_steps=workload.num_steps)
    mesh = spanax.MeshShape.of(command.mesh)
    plan = spanax.plan(program, spanax.cluster(f"cpu:{mesh.size}"), layout=command.layout, mesh=mesh)
    rules = export_rules(plan)
    return Answer(str(rules), {"workload": command.workload, **rules.to_json()})
