"""Detects reduce-scatters that a compiler implements as unrolled chains of permutes around a matmul.

A chain starts with a permute of zeros, and partial matmuls are added between its permutes. If both directions of a ring
are used, a reduce-scatter has two chains.
"""

from collections import defaultdict
from collections.abc import Iterator

from spanax.check.hlo.module import Computation, Instruction
from spanax.check.hlo.replica_groups import groups_of

PERMUTES = ("collective-permute", "collective-permute-start")
VIEWS = frozenset({"get-tuple-element", "bitcast", "copy", "reshape", "copy-start", "copy-done"})
ADDS = frozenset({"add", "fusion"})


def permute_chains(computation: Computation) -> dict[int, int]:
    """Returns the permutes of reduce-scatters -> the number of reduce-scatters, all attributed to the first permute."""
    chains: dict[tuple[int, str], list[Instruction]] = defaultdict(list)
    for permute in computation.instructions.values():
        if permute.opcode in PERMUTES and _sends_zeros(computation, permute):
            chains[permute.operands[0], permute.op_name].append(permute)
    counts: dict[int, int] = {}
    for starts in chains.values():
        seen = dict.fromkeys(starts)
        stack = list(starts)
        ends = 0
        while stack:
            successors = list(_successors(computation, stack.pop()))
            ends += not successors
            new = [permute for permute in successors if permute not in seen]
            seen |= dict.fromkeys(new)
            stack += new
        if len(seen) > len(starts):
            directions = len({groups_of(permute) for permute in seen})
            first, *following = seen
            counts |= {first.id: max(1, ends // directions), **{permute.id: 0 for permute in following}}
    return counts


def _sends_zeros(computation: Computation, permute: Instruction) -> bool:
    """Returns whether a permute sends a broadcast scalar, the zeros at the start of a chain."""
    sent = computation.instructions[permute.operands[0]]
    return sent.opcode == "broadcast" and not computation.instructions[sent.operands[0]].shape.dims


def _successors(computation: Computation, permute: Instruction) -> Iterator[Instruction]:
    """Yields the permutes that forward a received value after an addition."""
    sums = [user for user in _users(computation, permute) if user.opcode in ADDS]
    for addition in dict.fromkeys(sums):
        yield from (user for user in _users(computation, addition) if user.opcode in PERMUTES)


def _users(computation: Computation, instruction: Instruction) -> Iterator[Instruction]:
    """Yields the users of a value and of its views."""
    for user in computation.users.get(instruction.id, ()):
        if user.opcode in VIEWS or user.opcode == "collective-permute-done":
            yield from _users(computation, user)
        else:
            yield user
