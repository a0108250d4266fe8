"""`spanax compare`: measures layouts on the devices present, and compares them with their predicted cost."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from spanax.commands.answer import Answer
from spanax.train.flags import Load, Precision, SizeFlags, Sizes, check_numbers


@dataclass(frozen=True)
class CompareCommand:
    """Measure layouts of a workload on the available devices, and compare each with its predicted cost.

    By default: the five cheapest by prediction, and the cheapest of each single strategy (data, fsdp, tensor, ...).

    Attributes:
      workload: a name, or file.py:name.
      mesh: run only the layouts on this mesh.
      on: predict for this cluster file, such as one written by spanax probe. Default: the catalog's numbers.
      steps: number of measured steps of each layout.
      devices: number of devices; simulated on the CPU without an accelerator (8 by default).
      dtype: compute dtype. Default: as in spanax plan.
      top: number of layouts, the cheapest by prediction, instead of the default selection.
      all: run all layouts.
      json: print one JSON object.
      traceback: show the full traceback of an error.
    """

    workload: Positional[str]
    mesh: str | None = None
    on: Path | None = None
    steps: int = 10
    devices: int | None = None
    sizes: SizeFlags = Sizes()
    dtype: str | None = None
    top: int | None = None
    all: bool = False
    json: bool = False
    traceback: bool = False


def answer(command: CompareCommand) -> Answer:
    """Returns measured and predicted step times; shows progress on standard error.

    Raises:
      SpanaxError: the request is invalid.
    """
    from spanax.models.workloads import load
    from spanax.processes.devices import devices
    from spanax.show.live.terminal import reserve_stdout
    from spanax.show.live.waiting import waiting

    stream = reserve_stdout() if command.json else None
    with waiting(sys.stderr):
        text, data = compared(command, partial(load, command.workload), devices(command.devices))
    return Answer(text, data, stream=stream)


def compared(command: CompareCommand, load: Load, devices: Sequence[Any]) -> tuple[str, dict[str, Any]]:
    """Returns the comparison as text and as the object of --json.

    Args:
      command: the flags.
      load: builds the workload, given its sizes.
      devices: the devices to run on.
    """
    from spanax.check.measure.compare import Comparison, check_pruning, compare, layouts
    from spanax.hardware.cluster import cluster, local
    from spanax.hardware.mesh import MeshShape
    from spanax.show.compare import compared_json, compared_text

    Precision(command.dtype).check_dtype()
    check_numbers(command)
    check_pruning(command.top, command.all)
    mesh = None if command.mesh is None else MeshShape.of(command.mesh)
    here = local(devices) if command.on is None else cluster(str(command.on), len(devices))
    program = command.sizes.load(load).trace(compute_dtype=command.dtype)
    search = layouts(program, here, mesh=mesh, top=command.top, every=command.all)
    result = Comparison(search, compare(search, steps=command.steps, devices=devices), devices[0].device_kind)
    data = compared_json(result) | {"workload": command.workload, "steps": command.steps}
    return compared_text(result), data
