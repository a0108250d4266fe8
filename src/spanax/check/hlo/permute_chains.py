"""Unrolled: reduce-scatters that a compiler has made chains of permutes around a matmul, without a loop.

Each chain begins with the permute of an empty sum; parts of the matmul are added between one permute and the next.
Where both directions of a ring are used, a sum ends in two chains.
"""

from collections import defaultdict
from collections.abc import Iterator

from spanax.check.hlo.module import Computation, Instruction
from spanax.check.hlo.replica_groups import groups_of

PERMUTES = ("collective-permute", "collective-permute-start")
VIEWS = frozenset({"get-tuple-element", "bitcast", "copy", "reshape", "copy-start", "copy-done"})
ADDS = frozenset({"add", "fusion"})


def permute_chains(computation: Computation) -> dict[int, int]:
    """Permutes that are parts of a reduce-scatter -> how many of these each stands for: the first of them for all."""
    chains: dict[tuple[int, str], list[Instruction]] = defaultdict(list)
    for one in computation.instructions.values():
        if one.opcode in PERMUTES and _is_empty(computation, one):
            chains[one.operands[0], one.op_name].append(one)
    found: dict[int, int] = {}
    for starts in chains.values():
        seen, left, ends = dict.fromkeys(starts), list(starts), 0
        while left:
            after = list(_next(computation, left.pop()))
            ends += not after
            new = [one for one in after if one not in seen]
            seen |= dict.fromkeys(new)
            left += new
        if len(seen) > len(starts):
            directions = len({groups_of(one) for one in seen})
            first, *others = seen
            found |= {first.id: max(1, ends // directions), **{one.id: 0 for one in others}}
    return found


def _is_empty(computation: Computation, permute: Instruction) -> bool:
    """Whether a permute sends one number all over, which only an empty sum is."""
    sent = computation.instructions[permute.operands[0]]
    return sent.opcode == "broadcast" and not computation.instructions[sent.operands[0]].shape.dims


def _next(computation: Computation, permute: Instruction) -> Iterator[Instruction]:
    """The permutes that send on what came, with something added."""
    adding = [user for user in _users(computation, permute) if user.opcode in ADDS]
    for one in dict.fromkeys(adding):
        yield from (user for user in _users(computation, one) if user.opcode in PERMUTES)


def _users(computation: Computation, one: Instruction) -> Iterator[Instruction]:
    """Who reads a value, views of it included."""
    for user in computation.users.get(one.id, ()):
        if user.opcode in VIEWS or user.opcode == "collective-permute-done":
            yield from _users(computation, user)
        else:
            yield user
