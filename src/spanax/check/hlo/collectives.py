"""Reads the collectives of a compiled program: kind, bytes, mesh axes, executions per step, and source line.

The serialized HLO module is read in the same way for TPU, GPU and CPU. Asynchronous collectives, fused collectives, and
loops of permutes around a matmul are reported as the collectives that they implement.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from spanax.check.hlo.module import Computation, Instruction, Module, Shape, read_module, user_line
from spanax.check.hlo.reduce_scatter import permute_chains, reduce_scatters
from spanax.check.hlo.replica_groups import ReplicaGroups, across_slices, axes_of, groups_of
from spanax.check.hlo.trip_counts import Value, Values, trip_count
from spanax.hardware.mesh import MeshShape
from spanax.plan.pipeline.ticks import share_of
from spanax.plan.plan import Plan
from spanax.plan.sharding.placement import Placement

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")

RAGGED = "ragged-all-to-all"

WINDOWED = re.compile(r"windowed_dot_general_body_(ag|rs)")
"""XLA's names for an all-gather or reduce-scatter that is implemented as a loop of permutes around a matmul.
Source: openxla/xla xla/service/spmd/dot_handler.cc; occurs in programs compiled for TPU."""

ASYNC_START = "AsyncCollectiveStart"


@dataclass(frozen=True)
class Collective:
    """One collective instruction of a program.

    Attributes:
      kind: `all-gather`, `all-reduce`, `reduce-scatter`, `all-to-all`, `collective-permute` or
        `collective-broadcast`.
      written: the implementation, if it is not a single operation of that kind: a loop of permutes, or an all-reduce
        and a slice.
      axes: the mesh axes along which devices communicate, joined by `+`; prefixed with `~` if the groups do not span
        the axes.
      dtype: the dtype of the results; several are joined by `+`.
      shapes: the shapes of the results, as XLA prints them.
      bytes_once: bytes of the results per device and execution: the gathered array of an all-gather, the sum of an
        all-reduce, the local shard of a reduce-scatter or all-to-all.
      runs: executions per step, including loops.
      tensors: paths of the parameters that it gathers or whose gradients it reduces, matched by shape.
      is_counted: whether the trip counts of all enclosing loops are known; an unknown loop counts once.
      group_size: the number of devices in a group.
      name: the name of the instruction.
      op_name: the JAX operation with its name stack.
      source: file and line of the user's code; empty if unknown.
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
        """Bytes of the results per device and step."""
        return self.bytes_once * self.runs


def collectives(module: bytes | Module, mesh: MeshShape) -> tuple[Collective, ...]:
    """Returns the collectives of a compiled program, largest first.

    Args:
      module: a serialized HloModuleProto or HloProto, or a module from `read_module`.
      mesh: the mesh of the program; partitions are numbered in row-major order of the mesh.

    Raises:
      DataError: the bytes are not a serialized program.

    Example:
      >>> import jax
      >>> from jax.sharding import NamedSharding, PartitionSpec
      >>> shape = MeshShape.of("data=4,model=2")
      >>> mesh = shape.build()
      >>> replicated, sharded = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("model"))
      >>> f = jax.jit(lambda x: x * 2, in_shardings=sharded, out_shardings=replicated)
      >>> compiled = f.lower(jax.ShapeDtypeStruct((16,), "float32")).compile()
      >>> [gather] = collectives(compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto(), shape)
      >>> gather.kind, gather.axes, gather.num_bytes, gather.group_size
      ('all-gather', 'model', 64, 2)
    """
    parsed = module if isinstance(module, Module) else read_module(module)
    moves = _Collector(parsed, mesh).collectives
    return tuple(sorted(moves, key=lambda move: (-move.num_bytes, move.kind, move.name)))


def totals(moves: Iterator[Collective] | tuple[Collective, ...]) -> dict[str, dict[str, int]]:
    """Returns the bytes per device and step by mesh axes and kind.

    Example:
      >>> totals((Collective("all-gather", "fsdp", "f32", "f32[4]", 16, 2, 4, "", "", ""),))
      {'fsdp': {'all-gather': 32}}
    """
    by_axes: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for move in moves:
        by_axes[move.axes][move.kind] += move.num_bytes
    return {axes: dict(kinds) for axes, kinds in sorted(by_axes.items())}


class _Collector:
    """Collects the collectives of all computations that run, starting with the entry."""

    def __init__(self, module: Module, mesh: MeshShape):
        self.module = module
        self.mesh = mesh
        self.sizes: Mapping[str, int] = dict(mesh.axes)
        self.collectives: list[Collective] = []
        self._started = self._channels_started()
        self._visit(module.entry, 1, True, [])

    def _channels_started(self) -> frozenset[tuple[str, int]]:
        """Returns the (opcode, channel) of collectives that TPU programs start in one fusion and repeat in others.

        A combined collective of another kind may have the same channel.
        """
        return frozenset(
            (instruction.opcode, instruction.channel)
            for computation in self.module.computations.values()
            if _starts(computation)
            for instruction in computation.instructions.values()
            if instruction.opcode in KINDS and instruction.channel
        )

    def _visit(self, computation: Computation, runs: int, is_counted: bool, parameters: list[Value]) -> None:
        values = Values(self.module, computation, parameters, None)
        chained = permute_chains(computation)
        for instruction in computation.instructions.values():
            opcode = instruction.opcode.removesuffix("-start")
            if instruction.opcode.endswith(("-done", "-update")):
                continue
            if instruction.id in chained:
                self._add_chained(instruction, chained[instruction.id], runs, is_counted)
            elif opcode in KINDS:
                self._add(computation, instruction, opcode, runs, is_counted)
            elif opcode == RAGGED:
                # The larger buffer has room for rows of any device.
                shapes = computation.instructions[instruction.operands[0]].shape, _result(instruction)
                rows = min(shapes, key=lambda shape: shape.num_bytes)
                self._append(instruction, "all-to-all", rows, groups_of(instruction), runs, is_counted, RAGGED)
            elif instruction.opcode == "recv":
                self._add_received(instruction, runs, is_counted)
            elif instruction.opcode == "while":
                self._loop(computation, instruction, runs, is_counted, values)
            elif instruction.opcode in ("fusion", "call", "async-start", "conditional"):
                operands = (
                    [values.of(operand) for operand in instruction.operands] if instruction.opcode == "call" else []
                )
                active_ticks, ticks = share_of(instruction.op_name) if instruction.opcode == "conditional" else (1, 1)
                for called in instruction.called:
                    self._visit(self.module.computations[called], runs * active_ticks // ticks, is_counted, operands)

    def _loop(self, computation: Computation, loop: Instruction, runs: int, is_counted: bool, values: Values) -> None:
        body = self.module.computations[loop.called[0]]
        initial = values.of(loop.operands[0])
        windowed = WINDOWED.search(body.name)
        count = trip_count(self.module, loop, initial)
        if windowed:
            self._windowed(body, windowed[1], runs, is_counted)
        parameters = [list(initial)] if isinstance(initial, list) else []
        start = len(self.collectives)
        self._visit(body, runs * (1 if count is None else count), is_counted and count is not None, parameters)
        if windowed:
            added = self.collectives[start:]
            self.collectives[start:] = [move for move in added if move.kind != "collective-permute"]

    def _windowed(self, body: Computation, suffix: str, runs: int, is_counted: bool) -> None:
        """Adds the all-gather or reduce-scatter that a loop of permutes around a matmul implements."""
        rings: dict[tuple[str, ReplicaGroups], Instruction] = {}
        # The last iteration of a loop that is not unrolled skips its permute, in a conditional.
        branches = [each for each in body.instructions.values() if each.opcode == "conditional"]
        bodies = [body, *(self.module.computations[called] for branch in branches for called in branch.called)]
        for instruction in (each for inner in bodies for each in inner.instructions.values()):
            if instruction.opcode in ("collective-permute", "collective-permute-start"):
                pairs = _connected(groups_of(instruction))
                rings.setdefault((str(_result(instruction)), pairs), instruction)
        for (_, ring), instruction in rings.items():
            size = len(ring[0]) if ring else 1
            part = _result(instruction)
            kind, factor = ("all-gather", size) if suffix == "ag" else ("reduce-scatter", 1)
            num_bytes = part.num_bytes * factor
            self._append(instruction, kind, part, ring, runs, is_counted, "permutes around a matmul", num_bytes)

    def _add(self, computation: Computation, instruction: Instruction, kind: str, runs: int, is_counted: bool) -> None:
        if (instruction.opcode, instruction.channel) in self._started and not _starts(computation):
            return
        groups = groups_of(instruction)
        result = _result(instruction)
        if kind == "collective-permute":
            if self._is_end_of_window(computation, instruction):
                return
            groups = _connected(groups)
        if kind == "all-reduce":
            summed, parts = reduce_scatters(
                self.module, computation, instruction, groups or (tuple(range(self.mesh.size)),)
            )
            for part, size in parts:
                written = "all-reduce and a slice"
                self._append(instruction, "reduce-scatter", part, groups, runs, is_counted, written, size)
            if not summed:
                return
            result = summed[0] if len(summed) == 1 else Shape("tuple", 0, parts=tuple(summed))
        self._append(instruction, kind, result, groups, runs, is_counted)

    def _add_chained(self, instruction: Instruction, count: int, runs: int, is_counted: bool) -> None:
        """Adds the reduce-scatters of one shape that a chain of permutes implements, at its first permute."""
        ring = _connected(groups_of(instruction))
        part = _result(instruction)
        for _ in range(count):
            self._append(instruction, "reduce-scatter", part, ring, runs, is_counted, "permutes around a matmul")

    def _add_received(self, instruction: Instruction, runs: int, is_counted: bool) -> None:
        """Adds a collective between slices, which the runtime performs and the program only receives."""
        attributes = {attribute.key: attribute.value for attribute in instruction.message.frontend_attributes.map}
        kind = attributes.get("_xla_megascale_transfer_type", "").lower().replace("_", "-")
        slices = re.match(r"\{([\d,]+)\}", attributes.get("_xla_megascale_target", ""))
        if not kind or slices is None:
            return
        groups = across_slices(self.mesh, len(slices[1].split(",")))
        part = instruction.shape.parts[0]
        self._append(instruction, kind, part, groups, runs, is_counted, "send and receive between slices")

    def _append(
        self,
        instruction: Instruction,
        kind: str,
        shape: Shape,
        groups: ReplicaGroups,
        runs: int,
        is_counted: bool,
        written: str = "",
        num_bytes: int | None = None,
    ) -> None:
        axes = axes_of(groups, self.sizes)
        if kind == "collective-permute":
            axes = axes.removeprefix("~")  # a chain counts as a ring along its axes
        if not axes:
            return  # groups of one device do not communicate
        dtypes = dict.fromkeys(part.dtype for part in (shape.parts or (shape,)))
        self.collectives.append(
            Collective(
                kind=kind,
                axes=axes,
                dtype="+".join(dtypes),
                shapes=str(shape),
                bytes_once=shape.num_bytes if num_bytes is None else num_bytes,
                runs=runs,
                group_size=len(groups[0]) if groups else self.mesh.size,
                name=instruction.name,
                op_name=instruction.op_name,
                source=user_line(self.module.lines_of(instruction)),
                written=written,
                is_counted=is_counted,
            )
        )

    def _is_end_of_window(self, computation: Computation, instruction: Instruction) -> bool:
        """Returns whether a permute only moves the result of a windowed loop around a matmul to its device."""
        source = computation.instructions[instruction.operands[0]]
        while source.opcode in ("get-tuple-element", "copy", "bitcast", "copy-done", "copy-start"):
            source = computation.instructions[source.operands[0]]
        if source.opcode != "while":
            return False
        return WINDOWED.search(self.module.computations[source.called[0]].name) is not None


def _starts(computation: Computation) -> bool:
    return any(
        instruction.target == ASYNC_START
        for instruction in computation.instructions.values()
        if instruction.opcode == "custom-call"
    )


def _result(instruction: Instruction) -> Shape:
    """Returns the shape of a collective's result; for an async start, without operands and counters."""
    shape = instruction.shape
    if not instruction.opcode.endswith("-start") or instruction.opcode == "all-reduce-start" or not shape.parts:
        return shape
    return shape.parts[1]


def _connected(pairs: ReplicaGroups) -> ReplicaGroups:
    """Returns the connected devices of a permute's pairs, with a group for each ring or chain."""
    group_of: dict[int, set[int]] = {}
    for pair in pairs:
        joined = set(pair).union(*(group_of.get(device, ()) for device in pair))
        group_of |= dict.fromkeys(joined, joined)
    return tuple({id(group): tuple(sorted(group)) for group in group_of.values()}.values())


def with_arrays(moves: Sequence[Collective], plan: Plan) -> tuple[Collective, ...]:
    """Returns the collectives with the paths of the parameters that they gather or whose gradients they reduce.

    A result matches a parameter if it has the dims of a shard in any order, without the stacked layer dim. A gather or
    a sum is sharded over the other mesh axes only, a reduce-scatter over its own as well. If no parameter matches, dims
    that are not sharded count too.
    """
    params = [leaf for leaf in plan.leaves if leaf.kind == "param"]
    return tuple(_with(move, params, plan.mesh) for move in moves)


def _with(move: Collective, params: Sequence[Placement], mesh: MeshShape) -> Collective:
    if move.kind not in ("all-gather", "all-reduce", "reduce-scatter"):
        return move
    joined = () if move.kind == "reduce-scatter" else move.axes.removeprefix("~").split("+")
    shapes = {_without_ones(map(int, re.findall(r"\d+", dims))) for dims in re.findall(r"\[([\d,]*)\]", move.shapes)}
    sharded = tuple(leaf.path for leaf in params if _shard(leaf, mesh, joined) in shapes)
    gathered = tuple(leaf.path for leaf in params if _shard(leaf, mesh, mesh.names) in shapes)
    # Parts of stacked weights are scattered as matrices.
    sizes = set(map(math.prod, shapes)) if move.kind == "reduce-scatter" else set()
    merged = tuple(leaf.path for leaf in params if math.prod(_shard(leaf, mesh, joined)) in sizes)
    return replace(move, tensors=sharded or gathered or merged)


def _shard(leaf: Placement, mesh: MeshShape, joined: Sequence[str]) -> tuple[int, ...]:
    """Returns the sorted dims of a parameter that is sharded as planned, but not over `joined`; without the layers."""
    dims = zip(leaf.axes, leaf.shape, leaf.spec, strict=True)
    return _without_ones(
        size // mesh.ways([axis for axis in by if axis not in joined]) for name, size, by in dims if name != "layers"
    )


def _without_ones(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(size for size in sizes if size != 1))
