"""Plan: the sharding of every array of a program on a mesh, with reasons, independent of devices."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from spanax.batch_dims import dims_by_name, num_examples
from spanax.displays import display
from spanax.documents import MAX_INT, parse_json, read_bytes
from spanax.entries.folder import Folder, Place
from spanax.entries.local_path import local_path
from spanax.entries.names import PLAN
from spanax.errors import DataError, FileError, FileErrors, UnknownNameError, WriteError, first_line, nearest
from spanax.hardware.flags import checked, explained
from spanax.hardware.mesh import MeshShape
from spanax.plan.layout import Layout
from spanax.plan.setting import Setting, attention_names, sequence_lengths
from spanax.plan.sharding.placement import DEVICE, HOST, Placement, constrain
from spanax.schema import parsed
from spanax.sealed import VersionError, check_version, opened
from spanax.trace.jaxpr.remat_policies import AS_WRITTEN, GATHERED, known_offload
from spanax.units import bytes_text, count_text

Moved = Mapping[str, Mapping[str, int]]
"""Bytes by mesh axes and kind of collective."""


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of one step per device; moved bytes count the results of collectives.

    Attributes:
      cluster: the devices, as `spanax.cluster` parses them.
      step_seconds: the time of a step.
      seconds: the step's time by term.
      memory: bytes at the peak, by group.
      limit_bytes: the memory of one device; None: unknown.
      flops: executed FLOPs, recomputation included.
      mfu: useful FLOPs over the chip's peak, as a share of 1; None where the peak is unknown.
      moved: bytes that it receives from collectives.
      moved_of: those of one parameter, its gradient and its update; by path. Of the parameters of equal blocks, only
      the first is listed.
      host_bytes: bytes of offloaded state in host memory.
      hidden: seconds of collectives during which the device computes, by term; no part of the step's time.
      moved_at: `moved` by what moves: a parameter, or an intermediate value with its source line.
      seconds_at: seconds of matmuls, memory traffic and kernel starts, by what is computed, as `Evaluation.seconds_at`.

    Example:
      >>> cost = Prediction("h100:8", 2.0, {"matmuls": 1.5, "update": 0.5}, {"parameters": 6, "activations": 2})
      >>> cost.peak_bytes
      8
    """

    cluster: str
    step_seconds: float
    seconds: Mapping[str, float]
    memory: Mapping[str, int]
    limit_bytes: int | None = None
    flops: float = 0.0
    mfu: float | None = None
    moved: Moved = field(default_factory=dict)
    moved_of: Mapping[str, Moved] = field(default_factory=dict)
    host_bytes: int = 0
    hidden: Mapping[str, float] = field(default_factory=dict)
    moved_at: Mapping[str, Moved] = field(default_factory=dict)
    seconds_at: Mapping[str, float] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """Bytes at the peak."""
        return sum(self.memory.values())


VERSION = 1

MAX_DEVICES = 1 << 20
MAX_TASKS = 1 << 20
"""Limits of a plan in a file: devices of the mesh, and microbatches x stages x chunks."""


@dataclass(frozen=True)
class Schedule:
    """The execution of a step under a plan: everything but the sharding of its arrays.

    Attributes:
      remat: the policy of activations saved for the backward pass, as in `spanax.trace`; None keeps that of the model.
      compute_dtype: the dtype of the computation; None uses that of the parameters.
      quantize: the recipe by which matmuls of weights are quantized, as in `spanax.trace`; None for none.
      microbatches: the number of microbatches over which gradients are accumulated.
      num_stages: the number of stages into which layers are partitioned.
      num_chunks: the number of chunks of layers per stage.
      pipeline: the name of the pipeline schedule.
      context: attention where the sequence is sharded: keys are `gathered`, or permuted around a `ring`; or `splash`
        or `cudnn`, the kernel that computes attention with gathered keys.
      loss_chunks: the number of chunks in which the loss computes its logits sequentially.
      padded: the axes that are padded where they are computed, each to a multiple of a number.
      offload: the kinds of state that are stored in host memory, and on the devices during the update only.

    Example:
      >>> print(Schedule(remat="full", microbatches=4), Schedule(microbatches=8, num_stages=2), sep="; ")
      remat full, 4 microbatches; remat as written, 8 microbatches, 2 stages 1f1b
    """

    remat: str | None = None
    compute_dtype: str | None = None
    quantize: str | None = None
    microbatches: int = 1
    num_stages: int = 1
    num_chunks: int = 1
    pipeline: str = "1f1b"
    context: str = GATHERED
    loss_chunks: int = 1
    padded: tuple[tuple[str, int], ...] = ()
    offload: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [
            f"remat {self.remat or AS_WRITTEN}",
            f"{self.microbatches} microbatch" + "es" * (self.microbatches > 1),
        ]
        parts += [f"matmuls in {self.quantize}"] if self.quantize else []
        parts += [f"{self.num_stages} stages {self.pipeline}"] if self.num_stages > 1 else []
        return ", ".join([*parts, *([f"{self.num_chunks} chunks"] if self.num_chunks > 1 else [])])


@dataclass(frozen=True)
class Plan:
    """A layout resolved for one program on one mesh.

    Attributes:
      leaves, batch: the placements of the state, in the order of the program, and of the batch.
      fingerprint: identifies the program (paths, shapes, dtypes).
      why: the rule that chose the layout.
      schedule: the execution of a step.
      xla_flags: options of XLA's compiler, each `name=value`.
      anchors: the paths of leaves that keep the sharding which they had before the plan.
      allow: findings that a check does not report: `SPX001 embed`, or `SPX001` for all of that code.
      price: the predicted cost, if requested; ignored by sharding and equality.

    Example:
      >>> import jax, optax, spanax
      >>> from flax import nnx
      >>> program = spanax.trace(
      ...     build=lambda rngs: nnx.Linear(16, 32, rngs=rngs),
      ...     optimizer=optax.sgd(0.1),
      ...     batch=jax.ShapeDtypeStruct((8, 16), "float32"),
      ...     loss=lambda model, x: (model(x) ** 2).mean(),
      ... )
      >>> plan = spanax.plan(program, spanax.cluster("cpu:8"), layout="data")
      >>> Plan.from_json(plan.to_json()) == plan
      True
      >>> plan.diff(spanax.plan(program, spanax.cluster("cpu:8"), layout="fsdp"))[-1]
      "kernel: P(None, None) -> P(None, 'fsdp')"
    """

    fingerprint: str
    mesh: MeshShape
    layout: Layout
    pins: tuple[tuple[str, tuple[str, ...]], ...]
    leaves: tuple[Placement, ...]
    batch: tuple[Placement, ...]
    why: str
    schedule: Schedule = Schedule()
    xla_flags: tuple[str, ...] = ()
    anchors: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    version: int = VERSION
    price: Prediction | None = field(default=None, compare=False, repr=False)

    def state_bytes(self, kind: str | None = None) -> int:
        """Returns bytes of state in device memory: of one kind (`param`, `optimizer`, `other`), or of all."""
        return sum(leaf.local_bytes for leaf in self.leaves if kind in (None, leaf.kind) and leaf.memory_kind == DEVICE)

    @property
    def title(self) -> str:
        """Returns the layout and the mesh."""
        return f"{self.layout.name} on {self.mesh}"

    @property
    def host_bytes(self) -> int:
        """Bytes of offloaded state in host memory, per device."""
        return sum(leaf.local_bytes for leaf in self.leaves if leaf.memory_kind == HOST)

    @property
    def setting(self) -> Setting:
        """The batch, sequence, dtype and attention of the plan."""
        dims = dims_by_name(self.batch)
        axes = [axis for leaf in self.leaves for axis in leaf.axes]
        return Setting(
            batch_size=num_examples([leaf.shape for leaf in self.batch], dims) if set(dims) - {None} else 0,
            sequence_lengths=sequence_lengths(self.batch),
            dtypes=(self.schedule.compute_dtype or "dtypes of the model",),
            attention=attention_names(self.schedule.context, axes),
        )

    @property
    def param_axes(self) -> frozenset[str]:
        """The names of the axes of the parameters."""
        return frozenset(axis for leaf in self.leaves if leaf.kind == "param" for axis in leaf.axes if axis is not None)

    def __getitem__(self, path: str) -> Placement:
        """Returns the placement of the leaf with a path."""
        for leaf in self.leaves + self.batch:
            if leaf.path == path:
                return leaf
        raise UnknownNameError(f"the plan has no leaf '{path}'.", fix=nearest(path, [p.path for p in self.leaves]))

    constrain = constrain

    def to_json(self) -> str:
        """Returns the plan as JSON text; `Plan.from_json` returns an equal plan."""
        data = asdict(self) | {"mesh": dict(self.mesh.axes)}
        for key in ("allow", "anchors", "xla_flags"):
            if not data[key]:
                del data[key]
        if self.price is None:
            del data["price"]
        elif not self.price.host_bytes:
            del data["price"]["host_bytes"]
        if self.schedule.context == GATHERED:
            del data["schedule"]["context"]
        if self.schedule.quantize is None:
            del data["schedule"]["quantize"]
        if self.schedule.loss_chunks == 1:
            del data["schedule"]["loss_chunks"]
        if not self.schedule.padded:
            del data["schedule"]["padded"]
        if not self.schedule.offload:
            del data["schedule"]["offload"]
        for leaf in (*data["leaves"], *data["batch"]):
            if leaf["memory_kind"] == DEVICE:
                del leaf["memory_kind"]
        return json.dumps(data, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> "Plan":
        """Returns the plan that `to_json` wrote.

        Raises:
          DataError: the text is not a plan, or has another version.
        """
        try:
            data = parse_json(text)
            check_version(data["version"], VERSION)
            data["mesh"] = MeshShape.of(dict(data["mesh"]))
            data["allow"] = _texts("allow", data.get("allow", []), "SPX001 embed")
            flags = _texts("xla_flags", data.get("xla_flags", []), "xla_gpu_triton_gemm_any=True")
            data["xla_flags"] = tuple(map(checked, flags))
            data["anchors"] = _texts("anchors", data.get("anchors", []), "kernel")
            return _possible(parsed(Plan, data))
        except DataError:
            raise
        except VersionError as error:
            raise FileError("cannot read the plan.", where=str(error), fix=error.fix) from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reason = f"'{error.args[0]}' is missing" if isinstance(error, KeyError) else first_line(error)
            raise FileError("this is not a plan file.", where=reason) from None

    def save(self, path: str | Path) -> None:
        """Writes the plan to a file.

        Raises:
          WriteError: the file cannot be written.
        """
        with FileErrors(WriteError, f"cannot write the plan '{path}'."):
            local_path(path).write_text(self.to_json())

    @staticmethod
    def load(path: str | Path) -> "Plan":
        """Reads a plan from a file.

        Raises:
          DataError: the file does not exist, or does not contain a plan.
        """
        file = local_path(path)
        return Plan._read(lambda: read_bytes(file), path)

    @staticmethod
    def of_run(folder: Place) -> "Plan":
        """Reads the plan of a run folder or a saved step.

        Raises:
          DataError: the plan is missing or damaged; includes its subclass EntryError.
        """
        place = Folder.of(folder)
        return Plan._read(lambda: place.read(PLAN), place.path / PLAN)

    @staticmethod
    def _read(read: Callable[[], bytes], path: str | Path) -> "Plan":
        with FileErrors(FileError, f"cannot read the plan '{path}'."):
            return Plan.from_json(opened(read().decode()))

    def diff(self, other: "Plan") -> list[str]:
        """Returns the differences between two plans, one per line; empty for equal plans.

        Example: `blocks.mlp.up.kernel: P(None, 'fsdp') -> P('model', 'fsdp')`
        """
        lines = []
        for each in fields(self):
            left = getattr(self, each.name)
            right = getattr(other, each.name)
            if each.name not in ("leaves", "batch", "layout", "why", "schedule", "anchors", "price") and left != right:
                lines.append(f"{each.name}: {left} -> {right}")
        for each in fields(Schedule):
            before = getattr(self.schedule, each.name)
            after = getattr(other.schedule, each.name)
            if before != after:
                texts = [AS_WRITTEN if value is None else value for value in (before, after)]
                lines.append(f"{each.name}: {' -> '.join(map(str, texts))}")
        if self.layout != other.layout:
            lines.append(f"layout: {self.layout.name} -> {other.layout.name}")
        left, right = ({leaf.path: leaf for leaf in plan.leaves + plan.batch} for plan in (self, other))
        for path in sorted(left.keys() | right.keys()):
            a = left.get(path)
            b = right.get(path)
            if a is None or b is None:
                lines.append(f"{path}: {'only in the second' if a is None else 'only in the first'}")
            elif (a.shape, a.dtype) != (b.shape, b.dtype):
                lines.append(f"{path}: {a.dtype}{list(a.shape)} -> {b.dtype}{list(b.shape)}")
            elif (a.spec, a.memory_kind) != (b.spec, b.memory_kind):
                lines.append(f"{path}: {_spec_text(a)} -> {_spec_text(b)}")
        return lines

    def _repr_html_(self) -> str:
        return display(self)

    def __str__(self) -> str:
        total = sum(_size(leaf) for leaf in self.leaves if leaf.kind == "param")
        head = [
            f"layout {self.layout.name} on {self.mesh.size} devices ({self.mesh}), {self.setting}: {self.why}",
            f"  {count_text(total)} parameters; a device holds "
            + ", ".join(f"{kind} {bytes_text(self.state_bytes(kind))}" for kind in ("param", "optimizer", "other"))
            + f" = {bytes_text(self.state_bytes())}"
            + (f", and {bytes_text(self.host_bytes)} in host memory" if self.host_bytes else ""),
        ]
        flags = ", ".join(explained(flag, self.param_axes) for flag in self.xla_flags)
        return "\n".join([*head, *([f"  XLA: {flags}"] if flags else []), *_rows(self)])


def path_pattern(path: str) -> str:
    """Returns a path with the numbers of repeated blocks replaced by `*`.

    Example:
      >>> path_pattern("blocks.11.mlp.up.kernel")
      'blocks.*.mlp.up.kernel'
    """
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))


def shared_path(paths: Sequence[str]) -> str:
    """Returns the path of arrays of repeated blocks: `*` for each number in which they differ.

    Example:
      >>> shared_path(["blocks.0.mlp.layers.2.kernel", "blocks.1.mlp.layers.2.kernel"])
      'blocks.*.mlp.layers.2.kernel'
    """
    columns = zip(*(path.split(".") for path in paths), strict=True)
    return ".".join(parts[0] if len(set(parts)) == 1 else "*" for parts in columns)


def _rows(plan: Plan) -> list[str]:
    """Returns rows of the parameters and the batch; repeated blocks share a row."""
    groups: dict[tuple[Any, ...], list[Placement]] = {}
    for leaf in (*plan.batch, *plan.leaves):
        if leaf.kind in ("param", "batch"):
            groups.setdefault((path_pattern(leaf.path), leaf.shape, leaf.spec, leaf.reason), []).append(leaf)
    rows = []
    for leaves in groups.values():
        leaf = leaves[0]
        times = f" x{len(leaves)}" if len(leaves) > 1 else ""
        shape = " ".join(f"{name or '?'}:{size}" for name, size in zip(leaf.axes, leaf.shape, strict=True))
        name = shared_path([leaf.path for leaf in leaves])
        reason = f"  {leaf.reason}" if leaf.reason else ""
        rows.append((name + times, f"({shape})", _spec_text(leaf), bytes_text(leaf.local_bytes) + reason))
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return ["  " + "  ".join([*(c.ljust(w) for c, w in zip(row[:3], widths, strict=True)), row[3]]) for row in rows]


def _spec_text(leaf: Placement) -> str:
    inner = (repr(axes[0] if len(axes) == 1 else axes) if axes else "None" for axes in leaf.spec)
    return f"P({', '.join(inner)})" + ("" if leaf.memory_kind == DEVICE else f" in {leaf.memory_kind}")


def _size(leaf: Placement) -> int:
    return math.prod(leaf.shape)


def _texts(key: str, value: Any, example: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise FileError(f"the plan's '{key}' is not a list of strings.", where=f"{key}: {value}", fix=f'["{example}"]')
    return tuple(value)


def _possible(plan: Plan) -> Plan:
    """Returns the plan after validating its numbers, which come from a file.

    Raises:
      ValueError: names the first invalid number.
    """
    num_shards = plan.mesh.ways
    names = set(plan.mesh.names)
    schedule = plan.schedule
    counts = (schedule.microbatches, schedule.num_stages, schedule.num_chunks)
    if any(not 1 < number <= plan.mesh.size for _, number in schedule.padded):
        raise ValueError(f"axes padded to multiples of more or fewer than {plan.mesh.size} devices")
    if plan.mesh.size > MAX_DEVICES or min(*counts, schedule.loss_chunks) < 1 or math.prod(counts) > MAX_TASKS:
        raise ValueError(
            f"a mesh of {plan.mesh.size} devices, {' x '.join(map(str, counts))} tasks: beyond the limits of a plan"
        )
    known_offload(schedule.offload)
    for leaf in (*plan.leaves, *plan.batch):
        if leaf.memory_kind != DEVICE and (leaf.memory_kind != HOST or leaf.kind not in schedule.offload):
            raise ValueError(f"'{leaf.path}' has memory kind '{leaf.memory_kind}', which the schedule does not offload")
        by_dim = [axis for axes in leaf.spec for axis in axes]
        lengths = {len(leaf.shape), len(leaf.axes), len(leaf.spec), len(leaf.local_shape)}
        if len(lengths) > 1 or not names.issuperset(by_dim) or len(set(by_dim)) < len(by_dim):
            raise ValueError(f"'{leaf.path}' has a spec that does not match its dims and the mesh {plan.mesh}")
        dims = list(zip(leaf.shape, leaf.local_shape, leaf.spec, strict=True))
        if math.prod(leaf.shape) >= MAX_INT or not 0 <= leaf.local_bytes < MAX_INT:
            raise ValueError(f"'{leaf.path}' is larger than any array")
        if any(not 0 <= local_size <= size <= local_size * num_shards(axes) for size, local_size, axes in dims):
            raise ValueError(f"'{leaf.path}' has shape {leaf.shape}, of which {leaf.local_shape} is not a shard")
    return plan
