"""What the collectives of a compiled program move: output bytes per device, loops multiplied out.

Reads the text of a program partitioned for CPU, where every collective is synchronous and every `scan` carries its
trip count. CPU writes a reduce-scatter as an all-reduce and a slice: there it counts with the bytes of the former.
"""

import collections
import dataclasses
import re

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\(")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction: its kind, the type of its output, and how often it runs."""

    kind: str
    type: str
    runs: int

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
                found.append(Collective(opcode, type_text, runs))
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
