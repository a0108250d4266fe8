"""What can be asked of the commands that look at a plan or run: the flags, and what they mean."""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True)
class CompareCommand:
    """Run every legal layout of a workload on the devices present, in turn, and hold each against its price.

    Attributes:
      workload: a name, or file.py:name.
      mesh: only the layouts on this mesh.
      on: prices by this cluster file, such as spanax probe writes; the catalogue's numbers if left out.
      steps: how many steps of each layout are counted.
      devices: how many devices; simulated on a CPU where there is no accelerator (8 by default there).
      batch: examples in a step.
      seq: tokens in an example.
      layers: as many layers instead of the workload's own.
      embed: as wide instead of the workload's own.
      dtype: what is computed in, float32 or bfloat16.
      top: only so many layouts, the best by price.
      json: print one JSON object.
    """

    workload: Positional[str]
    mesh: str | None = None
    on: Path | None = None
    steps: int = 10
    devices: int | None = None
    batch: int | None = None
    seq: int | None = None
    layers: int | None = None
    embed: int | None = None
    dtype: str = "float32"
    top: int | None = None
    json: bool = False


@dataclass(frozen=True)
class InspectCommand:
    """Show where the arrays of a plan or a run lie, drawn on the mesh. No device is touched, but for --hlo.

    Attributes:
      path: a plan file, or a run folder: then what its newest checkpoint was saved from.
      leaf: draw this array.
      svg: write the drawing to this file; of every kind of parameter and the batch, without --leaf.
      hlo: write the train step to this file, as it goes to XLA: with its shardings, and the paths of its arrays.
      workload: what the plan was made for, for --hlo; a run folder knows.
      json: print one JSON object.
    """

    path: Positional[Path]
    leaf: str | None = None
    svg: Path | None = None
    hlo: Path | None = None
    workload: str | None = None
    json: bool = False
