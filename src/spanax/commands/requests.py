"""What can be asked of the commands that look at a plan or run: the flags, and what they mean."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg


@dataclass(frozen=True)
class PlanCommand:
    """Price every layout of a workload on devices you have or plan to rent, and say which is best and why.

    Attributes:
      workload: a name, or file.py:name.
      on: the devices: a100-80gb:8x8, v5p:8x8x8, cpu:8, mine.toml.
      batch: examples in a step.
      seq: tokens in an example.
      layers: as many layers instead of the workload's own.
      embed: as wide instead of the workload's own.
      dtype: what is computed in. Left out: bfloat16 on accelerators, unless the model chooses dtypes itself.
      optimizer_state: what the optimizer remembers is kept in, float32 or bfloat16.
      accumulate: what microbatches compute: exact, the results of the batch, or mean, the mean of theirs.
      layout: price this layout only, and hold it against the best.
      mesh: price this mesh only, that of one stage; see layout.
      remat: price this policy only: none, dots, full, offload.
      attention: plain, as the model wrote it; flash, by the platform's kernel; auto, by it where it can be. Left out:
        auto on accelerators, plain on CPUs.
      loss_chunks: the logits in so many chunks of tokens, or auto: where that saves much memory. Left out: auto on
        accelerators, 1 on CPUs.
      pipeline: whether layers may be divided into stages; left out: where nothing fits without, on accelerators.
      top: how many candidates to list.
      out: write the best plan to this file, for spanax train --plan.
      html: write the ranked layouts to this file, a page on which they can be sorted and sifted.
      explain: show one array: where it lies, why, and what moves for it.
      diff: hold two plan files against each other, and plan nothing.
      max: the largest batch, seq, layers or embed that fits.
      min: devices: the fewest on which it fits.
      target_mfu: the smallest batch that reaches this MFU, in percent.
      tokens: tokens to train on in all: says hours and device-hours.
      budget_hours: whether that many hours are enough.
      save_seconds: seconds that a checkpoint takes; for how often to save.
      json: print one JSON object.
      traceback: show the full traceback of an error.
    """

    workload: Positional[str] = ""
    on: str = ""
    batch: int | None = None
    seq: int | None = None
    layers: int | None = None
    embed: int | None = None
    dtype: str | None = None
    optimizer_state: Literal["float32", "bfloat16"] = "float32"
    accumulate: Literal["exact", "mean"] | None = None
    layout: str | None = None
    mesh: str | None = None
    remat: str | None = None
    attention: str | None = None
    loss_chunks: str | None = None
    pipeline: bool | None = None
    top: int = 10
    out: Path | None = None
    html: Path | None = None
    explain: str | None = None
    diff: tuple[Path, Path] | None = None
    max: Literal["batch", "seq", "layers", "embed"] | None = None
    min: Literal["devices"] | None = None
    target_mfu: float | None = None
    tokens: float | None = None
    budget_hours: float | None = None
    save_seconds: float = 60.0
    json: bool = False
    traceback: bool = False


@dataclass(frozen=True)
class CheckCommand:
    """Hold a layout against XLA without the devices: bytes, FLOPs and collectives, predicted beside compiled.

    Attributes:
      workload: a name, or file.py:name.
      on: the devices: v5e:4x4, v5p:8x8x8, h100:8x8, cpu:8.
      batch: examples in a step.
      seq: tokens in an example.
      layers: as many layers instead of the workload's own.
      embed: as wide instead of the workload's own.
      dtype: what is computed in. Left out: bfloat16 on accelerators, unless the model chooses dtypes itself.
      optimizer_state: what the optimizer remembers is kept in, float32 or bfloat16.
      accumulate: what microbatches compute: exact, the results of the batch, or mean, the mean of theirs.
      layout: the layout; what the mesh's names mean if left out; without both, the fastest that fits.
      mesh: axis sizes, slowest first.
      remat: what the backward pass keeps: none, dots, full, offload. Left out: the fastest that fits; on CPUs as the
        model has it, where a layout or mesh is given.
      attention: plain, as the model wrote it; flash, by the platform's kernel; auto, by it where it can be. Left out:
        auto on accelerators, plain on CPUs.
      loss_chunks: the logits in so many chunks of tokens, or auto: where that saves much memory. Left out: auto on
        accelerators, 1 on CPUs.
      microbatches: parts of the batch over which gradients are added up; a pipeline sends them through its stages.
      schedule: in which order the stages of a mesh with `pipe` work: gpipe, 1f1b, interleaved or zero-bubble.
      chunks: pieces of the model on each stage, for interleaved.
      plan: a plan file instead of a layout.
      level: 0 shapes, 1 the partitioner's passes, 2 simulated devices, 3 the chips' own compiler; else the highest.
      timeout: seconds that a compiler may take.
      codegen: let the compiler go on to machine code; minutes, and no other figures.
      inputs_only: leave all but the state and the batch to the compiler, as a jit with in_shardings does.
      cache: whether an earlier report on the same program is taken.
      collectives: list every collective: who moves what, over which axis, because of which line.
      explain_collective: say all that is known of one collective, by its number in that list.
      profiled: a run folder with a profile of it: says what its steps waited for, too.
      parity: take the same steps in this layout and on one device, simulated, and compare the numbers.
      steps: how many steps for --parity.
      fail_on: exit 1 if a rule finds something as grave as this: error, warning or info.
      out: write the certificate to this file.
      json: print one JSON object.
      traceback: show the full traceback of an error.
    """

    workload: Positional[str] = ""
    on: str = ""
    batch: int | None = None
    seq: int | None = None
    layers: int | None = None
    embed: int | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    optimizer_state: Literal["float32", "bfloat16"] = "float32"
    accumulate: Literal["exact", "mean"] | None = None
    layout: str | None = None
    mesh: str | None = None
    remat: str | None = None
    attention: str | None = None
    loss_chunks: str | None = None
    microbatches: int | None = None
    schedule: str | None = None
    chunks: int | None = None
    plan: Path | None = None
    level: Literal[0, 1, 2, 3] | None = None
    timeout: float = 900.0
    codegen: bool = False
    inputs_only: bool = False
    cache: bool = True
    collectives: bool = False
    explain_collective: int | None = None
    profiled: Path | None = None
    parity: bool = False
    steps: int = 3
    fail_on: Literal["error", "warning", "info"] | None = None
    out: Path | None = None
    json: bool = False
    traceback: bool = False


@dataclass(frozen=True)
class CompareCommand:
    """Run layouts of a workload on the devices present, in turn, and compare each with its price.

    By default: the five cheapest by price, and the cheapest of each single strategy (data, fsdp, tensor, ...).

    Attributes:
      workload: a name, or file.py:name.
      mesh: all layouts on this mesh, and no others.
      on: prices by this cluster file, such as spanax probe writes; the catalogue's numbers if left out.
      steps: how many steps of each layout are counted.
      devices: how many devices; simulated on a CPU where there is no accelerator (8 by default there).
      batch: examples in a step.
      seq: tokens in an example.
      layers: as many layers instead of the workload's own.
      embed: as wide instead of the workload's own.
      dtype: what is computed in; left out: as spanax plan.
      top: so many layouts instead, the cheapest by price.
      all: all layouts.
      json: print one JSON object.
      traceback: show the full traceback of an error.
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
    dtype: str | None = None
    top: int | None = None
    all: bool = False
    json: bool = False
    traceback: bool = False


@dataclass(frozen=True)
class InspectCommand:
    """Show where the arrays of a plan or a run lie, drawn on the mesh. No device is touched, but for --hlo.

    Attributes:
      path: a plan file, or a run folder: then what its newest checkpoint was saved from.
      leaf: draw this array.
      svg: write the drawing to this file; of every kind of parameter and the batch, without --leaf.
      schedule: draw who does what at which tick of the plan's pipeline.
      hlo: write the train step to this file, as it goes to XLA: with its shardings, and the paths of its arrays.
      workload: what the plan was made for, for --hlo; a run folder knows.
      json: print one JSON object.
      traceback: show the full traceback of an error.
    """

    path: Positional[Path]
    leaf: str | None = None
    svg: Path | None = None
    schedule: bool = False
    hlo: Path | None = None
    workload: str | None = None
    json: bool = False
    traceback: bool = False


@dataclass(frozen=True)
class ReportCommand:
    """Say where the time of a run went, what befell it, and how to go on; or draw a run, a plan or a check as a page.

    Attributes:
      run: the run folder, of a run that goes on or is over; or what spanax plan --out or spanax check --out wrote.
      out: write a page with pictures to this file, which needs no network: -o report.html.
      json: print one JSON object.
    """

    run: Positional[Path]
    out: Annotated[Path | None, arg(aliases=["-o"])] = None
    json: bool = False


@dataclass(frozen=True)
class DoctorCommand:
    """Look for what would stop a run on this machine; each finding with what to do. Exits with 1 at a problem.

    Attributes:
      out: the folder that runs are to be written to.
      hosts: addresses to reach, host:port with commas between them.
      timeout: seconds that JAX may take to start.
      json: print one JSON object.
    """

    out: Path = Path("runs")
    hosts: str = ""
    timeout: float = 60.0
    json: bool = False
