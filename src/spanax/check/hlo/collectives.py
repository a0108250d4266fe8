"""HLO: the collectives of a compiled program: who moves what, over which mesh axis, how often, because of which line.

One way for programs compiled for TPU, GPU and CPU: from the serialized module. What a compiler hides is told as what
it is: collectives started and awaited apart, fused, or turned into loops of permutes around a matmul.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from spanax.check.hlo.module import Computation, Instruction, Module, Shape, read_module
from spanax.check.hlo.permute_chains import permute_chains
from spanax.check.hlo.protobuf import fields, messages, raw, text
from spanax.check.hlo.reduce_scatter import reduce_scatters
from spanax.check.hlo.replica_groups import ReplicaGroups, across_slices, axes_of, groups_of
from spanax.check.hlo.trip_counts import Value, Values, trip_counts
from spanax.check.lint.source_lines import user_line
from spanax.hardware.mesh import MeshShape
from spanax.plan.pipeline.ticks import share_of

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
WINDOWED = re.compile(r"windowed_dot_general_body_(ag|rs)")
"""XLA's names for a gather or reduce-scatter that it turned into a loop of permutes around a matmul.
Source: openxla/xla xla/service/spmd/dot_handler.cc; seen in programs compiled for TPU."""

ASYNC_START = "AsyncCollectiveStart"


@dataclass(frozen=True)
class Collective:
    """One collective instruction of a program.

    Attributes:
      kind: what it does: `all-gather`, `all-reduce`, `reduce-scatter`, `all-to-all`, `collective-permute`.
      written: how the program has it, where that is not its kind: a loop of permutes, an all-reduce and a slice.
      axes: the mesh axes along which devices talk, `+` between; `~` before them: not to all along these axes.
      dtype: of what moves; several with `+`.
      shapes: the results, as XLA writes them.
      bytes_once: bytes of the results on one device in one run: of a gather all that is gathered, of an all-reduce the
        sum, of a reduce-scatter or all-to-all the device's own part.
      runs: how often it runs in one step, loops multiplied out.
      tensors: paths of the parameters that it gathers or whose gradients it adds up, as far as shapes tell.
      is_counted: whether the trips of all loops around it are known; where not, such a loop counts once.
      group_size: how many devices talk to each other.
      name: the instruction's.
      op_name: the JAX operation it serves, with its name stack.
      source: file and line of the user's code; empty where the program does not say.
    """

    kind: str
    axes: str
    dtype: str
    shapes: str
    bytes_once: int
    runs: int
    group_size: int
    name: str
    op_name: str
    source: str
    written: str = ""
    tensors: tuple[str, ...] = ()
    is_counted: bool = True

    @property
    def num_bytes(self) -> int:
        """Bytes of the results on one device in one step."""
        return self.bytes_once * self.runs


def collectives(module: bytes | Module, mesh: MeshShape) -> tuple[Collective, ...]:
    """Every collective of a compiled program, the largest first.

    Args:
      module: XLA's serialized HloModuleProto (or an HloProto), or what `read_module` made of one.
      mesh: the mesh it was compiled for; partitions are counted along it, the last axis fastest.

    Raises:
      DataError: the bytes are no program.

    Example:
      >>> import jax
      >>> from jax.sharding import NamedSharding, PartitionSpec
      >>> shape = MeshShape.of("data=4,model=2")
      >>> mesh = shape.build()
      >>> whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("model"))
      >>> f = jax.jit(lambda x: x * 2, in_shardings=split, out_shardings=whole)
      >>> compiled = f.lower(jax.ShapeDtypeStruct((16,), "float32")).compile()
      >>> [one] = collectives(compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto(), shape)
      >>> one.kind, one.axes, one.num_bytes, one.group_size
      ('all-gather', 'model', 64, 2)
    """
    read = module if isinstance(module, Module) else read_module(module)
    found = _Walk(read, mesh).found
    return tuple(sorted(found, key=lambda one: (-one.num_bytes, one.kind, one.name)))


def totals(found: Iterator[Collective] | tuple[Collective, ...]) -> dict[str, dict[str, int]]:
    """Bytes of one device and step by mesh axes and kind.

    Example:
      >>> totals((Collective("all-gather", "fsdp", "f32", "f32[4]", 16, 2, 4, "", "", ""),))
      {'fsdp': {'all-gather': 32}}
    """
    by_axes: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for one in found:
        by_axes[one.axes][one.kind] += one.num_bytes
    return {axes: dict(kinds) for axes, kinds in sorted(by_axes.items())}


class _Walk:
    """One walk over the computations that run, from the entry down."""

    def __init__(self, module: Module, mesh: MeshShape):
        self.module, self.mesh = module, mesh
        self.sizes: Mapping[str, int] = dict(mesh.axes)
        self.found: list[Collective] = []
        self._started = self._channels_started()
        self._visit(module.entry, 1, True, [])

    def _channels_started(self) -> frozenset[int]:
        """Channels of gathers that TPU programs start in one fusion and copy into those that run meanwhile."""
        return frozenset(
            one.channel
            for computation in self.module.computations.values()
            if _starts(computation)
            for one in computation.instructions.values()
            if one.opcode in KINDS and one.channel
        )

    def _visit(self, computation: Computation, runs: int, is_counted: bool, parameters: list[Value]) -> None:
        values = Values(self.module, computation, parameters, None)
        chained = permute_chains(computation)
        for one in computation.instructions.values():
            opcode = one.opcode.removesuffix("-start")
            if one.opcode.endswith(("-done", "-update")):
                continue
            if one.id in chained:
                self._add_chained(one, chained[one.id], runs, is_counted)
            elif opcode in KINDS:
                self._add(computation, one, opcode, runs, is_counted)
            elif one.opcode == "recv":
                self._add_received(one, runs, is_counted)
            elif one.opcode == "while":
                self._loop(computation, one, runs, is_counted, values)
            elif one.opcode in ("fusion", "call", "async-start", "conditional"):
                ins = [values.of(operand) for operand in one.operands] if one.opcode == "call" else []
                own, ticks = share_of(one.op_name) if one.opcode == "conditional" else (1, 1)
                for called in one.called:
                    self._visit(self.module.computations[called], runs * own // ticks, is_counted, ins)

    def _loop(self, around: Computation, loop: Instruction, runs: int, is_counted: bool, values: Values) -> None:
        body = self.module.computations[loop.called[0]]
        initial = values.of(loop.operands[0])
        windowed = WINDOWED.search(body.name)
        known = trip_counts(self.module, loop, initial)
        if windowed:
            self._windowed(body, windowed[1], runs, is_counted)
        count, _ = known or (1, None)
        first = list(initial) if isinstance(initial, list) else None
        counting = [first] if first is not None else []
        before = len(self.found)
        self._visit(body, runs * count, is_counted and known is not None, counting)
        if windowed:
            inside = self.found[before:]
            self.found[before:] = [one for one in inside if one.kind != "collective-permute"]

    def _windowed(self, body: Computation, how: str, runs: int, is_counted: bool) -> None:
        """A loop of permutes around a matmul, as the gather or reduce-scatter that it was."""
        rings: dict[tuple[str, ReplicaGroups], Instruction] = {}
        for one in body.instructions.values():
            if one.opcode in ("collective-permute", "collective-permute-start"):
                pairs = _connected(groups_of(one))
                rings.setdefault((str(_result(one)), pairs), one)
        for (_, ring), one in rings.items():
            size = len(ring[0]) if ring else 1
            part = _result(one)
            kind, times = ("all-gather", size) if how == "ag" else ("reduce-scatter", 1)
            self._append(one, kind, part.num_bytes * times, part, ring, runs, is_counted, "permutes around a matmul")

    def _add(self, computation: Computation, one: Instruction, kind: str, runs: int, is_counted: bool) -> None:
        if one.channel in self._started and not _starts(computation):
            return
        groups = groups_of(one)
        result, written = _result(one), ""
        if kind == "collective-permute":
            if self._is_end_of_window(computation, one):
                return
            groups = _connected(groups)
        if kind == "all-reduce":
            whole, parts = reduce_scatters(self.module, computation, one, groups or self._everyone())
            for part, size in parts:
                self._append(one, "reduce-scatter", size, part, groups, runs, is_counted, "all-reduce and a slice")
            if not whole:
                return
            num_bytes = sum(shape.num_bytes for shape in whole)
            result = whole[0] if len(whole) == 1 else Shape("tuple", 0, parts=tuple(whole))
            self._append(one, kind, num_bytes, result, groups, runs, is_counted, written)
            return
        self._append(one, kind, result.num_bytes, result, groups, runs, is_counted, written)

    def _add_chained(self, one: Instruction, count: int, runs: int, is_counted: bool) -> None:
        """Reduce-scatters of one shape that a chain of permutes stands for, told at the first of them."""
        ring, part = _connected(groups_of(one)), _result(one)
        for _ in range(count):
            self._append(
                one, "reduce-scatter", part.num_bytes, part, ring, runs, is_counted, "permutes around a matmul"
            )

    def _add_received(self, one: Instruction, runs: int, is_counted: bool) -> None:
        """What comes from another slice: a collective that the runtime carries out, and the program only receives."""
        attributes = fields(raw(one.fields, 68))
        said = {text(fields(pair), 1): text(fields(pair), 2) for pair in messages(attributes, 1)}
        kind = said.get("_xla_megascale_transfer_type", "").lower().replace("_", "-")
        slices = re.match(r"\{([\d,]+)\}", said.get("_xla_megascale_target", ""))
        if not kind or slices is None:
            return
        groups = across_slices(self.mesh, len(slices[1].split(",")))
        part = one.shape.parts[0]
        self._append(one, kind, part.num_bytes, part, groups, runs, is_counted, "send and receive between slices")

    def _append(
        self,
        one: Instruction,
        kind: str,
        num_bytes: int,
        shape: Shape,
        groups: ReplicaGroups,
        runs: int,
        is_counted: bool,
        written: str,
    ) -> None:
        axes = axes_of(groups, self.sizes)
        if kind == "collective-permute":
            axes = axes.removeprefix("~")  # a chain goes along its axes as a ring does
        if not axes:
            return  # groups of one device: nothing moves
        dtypes = dict.fromkeys(part.dtype for part in (shape.parts or (shape,)))
        size = len(groups[0]) if groups else self.mesh.size
        line = user_line(self.module.lines_of(one))
        self.found.append(
            Collective(
                kind=kind,
                axes=axes,
                dtype="+".join(dtypes),
                shapes=str(shape),
                bytes_once=num_bytes,
                runs=runs,
                group_size=size,
                name=one.name,
                op_name=one.op_name,
                source=line,
                written=written,
                is_counted=is_counted,
            )
        )

    def _everyone(self) -> ReplicaGroups:
        return (tuple(range(self.mesh.size)),)

    def _is_end_of_window(self, computation: Computation, one: Instruction) -> bool:
        """Whether a permute only brings home what a loop around a matmul has left behind."""
        source = computation.instructions[one.operands[0]]
        while source.opcode in ("get-tuple-element", "copy", "bitcast", "copy-done", "copy-start"):
            source = computation.instructions[source.operands[0]]
        if source.opcode != "while":
            return False
        return WINDOWED.search(self.module.computations[source.called[0]].name) is not None


def _starts(computation: Computation) -> bool:
    return any(one.target == ASYNC_START for one in computation.instructions.values() if one.opcode == "custom-call")


def _result(one: Instruction) -> Shape:
    """What a collective gives on one device; of one that is started, the result without operand and counters."""
    shape = one.shape
    if not one.opcode.endswith("-start") or one.opcode == "all-reduce-start" or not shape.parts:
        return shape
    return shape.parts[1]


def _connected(pairs: ReplicaGroups) -> ReplicaGroups:
    """The devices that a permute's pairs join, each ring or chain one group."""
    group_of: dict[int, set[int]] = {}
    for pair in pairs:
        joined = set(pair).union(*(group_of.get(one, ()) for one in pair))
        group_of |= dict.fromkeys(joined, joined)
    return tuple({id(group): tuple(sorted(group)) for group in group_of.values()}.values())
