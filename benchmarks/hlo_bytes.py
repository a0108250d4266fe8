"""What the collectives of a compiled program move: output bytes per device, loops multiplied out.

Reads the text of a program partitioned for CPU, where every collective is synchronous and every `scan` carries its
trip count. CPU writes a reduce-scatter as an all-reduce and a slice: there it counts with the bytes of the former.
"""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Mapping

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\(")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_LISTED = re.compile(r"\b(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}")
_COUNTED = re.compile(r"\breplica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(
    r"\breplica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
_OVER = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction: its kind, the type of its output, how often it runs, and who takes part.

    `groups` are devices by their place in the mesh, flat; none at all are all of them in one group. For a
    collective-permute they are pairs of sender and receiver.
    """

    kind: str
    type: str
    runs: int
    groups: tuple[tuple[int, ...], ...] = ()

    @property
    def num_bytes(self) -> int:
        """Output bytes per device over all runs."""
        return self.runs * type_bytes(self.type)


def collectives(text: str) -> dict[str, int]:
    """Output bytes per device of each kind of collective in one run of the compiled program `text`."""
    totals: dict[str, int] = collections.Counter()
    for collective in instructions(text):
        totals[collective.kind] += collective.num_bytes
    return dict(totals)


def by_axis(text: str, sizes: Mapping[str, int]) -> dict[tuple[str, str], int]:
    """Output bytes per device by (kind, mesh axes), where `sizes` are those of the mesh, slowest axis first."""
    totals: dict[tuple[str, str], int] = collections.Counter()
    for collective in instructions(text):
        totals[collective.kind, axes_of(collective.groups, sizes)] += collective.num_bytes
    return dict(totals)


def axes_of(groups: tuple[tuple[int, ...], ...], sizes: Mapping[str, int]) -> str:
    """The mesh axes along which devices talk; `~` before them says: not to all along these axes.

    Example:
      >>> axes_of(((0, 1), (2, 3)), {"data": 2, "model": 2}), axes_of((), {"data": 2, "model": 2})
      ('model', 'data+model')
      >>> axes_of(((0, 1), (2, 3)), {"data": 4})
      '~data'
    """
    groups = groups or (tuple(range(math.prod(sizes.values()))),)
    places = list(itertools.product(*map(range, sizes.values())))
    differs = [len({places[device][at] for device in group}) > 1 for group in groups for at in range(len(sizes))]
    along = [name for at, name in enumerate(sizes) if any(differs[at :: len(sizes)])]
    partly = any(len(group) != math.prod(sizes[name] for name in along) for group in groups)
    return "~" * partly + "+".join(along)


def groups_of(line: str) -> tuple[tuple[int, ...], ...]:
    """Who takes part in a collective, in each of the ways in which HLO writes it.

    Example:
      >>> groups_of("replica_groups={{0,1},{2,3}}"), groups_of("replica_groups=[2,2]<=[2,2]T(1,0)")
      (((0, 1), (2, 3)), ((0, 2), (1, 3)))
      >>> groups_of("replica_groups=mesh['a'=2,'b'=2] {'b'}")
      ((0, 1), (2, 3))
      >>> groups_of("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}")
      ((0, 2), (1, 3))
      >>> groups_of("replica_groups=mesh['a'=4] {'a':(1)2}")
      ((0, 2), (1, 3))
    """
    if match := _LISTED.search(line):
        return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", match[1]))
    if match := _COUNTED.search(line):
        ids = _counted(match[2], match[3]).reshape(_ints(match[1]))
        return tuple(tuple(row) for row in ids.tolist())
    if match := _NAMED.search(line):
        return _named_groups(*match.groups())
    if "replica_groups={}" in line:
        return ()
    raise ValueError(f"a collective without groups that can be read: {line.strip()[:200]}")


def _named_groups(mesh: str, shape: str | None, order: str | None, over: str) -> tuple[tuple[int, ...], ...]:
    """The devices that differ only along `over`: mesh axes of XLA's own, or parts of one as `'a':(outer)size`."""
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
    ids = _counted(shape, order) if shape else np.arange(math.prod(sizes.values()))
    groups = collections.defaultdict(list)
    along = {name: (int(outer or 1), int(size or sizes[name])) for name, outer, size in _OVER.findall(over)}
    for place, device in zip(itertools.product(*map(range, sizes.values())), ids.ravel().tolist(), strict=True):
        rest = []
        for (name, whole), at in zip(sizes.items(), place, strict=True):
            outer, size = along.get(name, (1, 1))
            inner = whole // (outer * size)
            rest += [at // (inner * size), at % inner]
        groups[tuple(rest)].append(device)
    return tuple(map(tuple, groups.values()))


def _counted(shape: str, order: str | None) -> np.ndarray:
    """Device numbers as XLA counts them: `[2,4]`, and after it maybe `T(1,0)`."""
    ids = np.arange(math.prod(_ints(shape))).reshape(_ints(shape))
    return ids.transpose(_ints(order)) if order else ids


def _ints(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def instructions(text: str) -> list[Collective]:
    """Every collective that runs, from the entry down; a conditional counts all of its branches."""
    computations, entry = _computations(text)
    found = []
    pending = [(entry, 1)]
    while pending:
        name, runs = pending.pop()
        for line in computations[name]:
            match = _INSTRUCTION.match(line)
            if match is None:
                continue
            type_text, opcode = match.groups()
            if opcode in KINDS:
                found.append(Collective(opcode, type_text, runs, groups_of(line)))
            elif opcode.removesuffix("-start") in (*KINDS, "async"):
                raise ValueError(f"an asynchronous {opcode}: this reader knows programs compiled for CPU only")
            pending += [(called, runs * trips) for called, trips in _called(line, opcode)]
    return found


def type_bytes(type_text: str) -> int:
    """Bytes of an HLO type, arrays and tuples.

    Example:
      >>> type_bytes("(f32[8,4]{1,0}, bf16[3])")
      134
    """
    total = 0
    for dtype, dims in _ARRAY.findall(type_text):
        bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])
        size = 1
        for dim in filter(None, dims.split(",")):
            size *= int(dim)
        total += size * bits // 8
    return total


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation, and the name of the entry."""
    computations: dict[str, list[str]] = {}
    entry, name = "", ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            name = match[2]
            computations[name] = []
            entry = name if match[1] else entry
        elif name:
            computations[name].append(line)
    return computations, entry


def _called(line: str, opcode: str) -> list[tuple[str, int]]:
    """The computations an instruction runs, each with how often; not the scalar functions of reductions."""
    if opcode not in ("while", "fusion", "call", "conditional"):
        return []
    trips = 1
    if opcode == "while":
        known = _TRIPS.search(line)
        if known is None:
            raise ValueError(f"a loop without a known trip count: {line.strip()[:200]}")
        trips = int(known[1])
    names = _CALLED.findall(line)
    if branches := _BRANCHES.search(line):
        names += re.findall(r"[\w.\-]+", branches[1])
    return [(name, trips) for name in names]
