"""Trips: how often a loop runs, where XLA wrote it down, and where not by running the loop on its whole numbers alone.

TPU programs carry no trip counts. What decides whether a loop goes on is a count or two; everything else is None here.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from spanax.check.hlo.module import Computation, Instruction, Module, integers
from spanax.check.hlo.protobuf import number, numbers, raw, text

MAX_TRIPS = 100_000
"""Loops are not followed further than this."""

_KNOWN = re.compile(rb'"known_trip_count":\{"n":"(\d+)"\}')

Value = Any
"""A whole number, a tuple of a constant array's numbers, a list for an HLO tuple, or None: not known."""

PASSED_ON = frozenset({"copy", "bitcast", "reshape", "broadcast", "convert", "copy-done", "optimization-barrier"})
BINARY: dict[str, Callable[[int, int], int | None]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: None if not b else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "remainder": lambda a, b: None if not b else abs(a) % abs(b) * (1 if a >= 0 else -1),
    "maximum": max,
    "minimum": min,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shift-left": lambda a, b: a << b,
    "shift-right-logical": lambda a, b: a >> b if a >= 0 else None,
    "shift-right-arithmetic": lambda a, b: a >> b,
}
COMPARED: dict[str, Callable[[int, int], bool]] = {
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
}


class Values:
    """The whole numbers in one computation, as far as they follow from its parameters; each worked out once."""

    def __init__(self, module: Module, computation: Computation, parameters: Sequence[Value], partition: int | None):
        self._module, self._computation = module, computation
        self._parameters, self._partition = parameters, partition
        self._known: dict[int, Value] = {}

    def of(self, wanted: int) -> Value:
        """The value of an instruction, by its id."""
        stack = [wanted]
        while stack:
            one = stack[-1]
            if one in self._known:
                stack.pop()
                continue
            instruction = self._computation.instructions[one]
            missing = [operand for operand in self._needed(instruction) if operand not in self._known]
            if missing:
                stack += missing
                continue
            self._known[one] = self._work_out(instruction)
            stack.pop()
        return self._known[wanted]

    def _needed(self, instruction: Instruction) -> tuple[int, ...]:
        opcode, dims = instruction.opcode, instruction.shape.dims
        if opcode == "get-tuple-element" or opcode in ("tuple", "while", "call", "fusion") or opcode in PASSED_ON:
            return instruction.operands
        is_known = opcode in BINARY or opcode in ("compare", "select", "not", "negate", "dynamic-slice")
        return instruction.operands if is_known and len(dims) <= 1 else ()

    def _work_out(self, one: Instruction) -> Value:
        opcode, ins = one.opcode, [self._known.get(operand) for operand in one.operands]
        if opcode == "parameter":
            at = number(one.fields, 9)
            return self._parameters[at] if at < len(self._parameters) else None
        if opcode == "constant":
            found = integers(one) if not one.shape.parts else None
            return found if found is None or one.shape.dims else found[0] if found else None
        if opcode == "partition-id":
            return self._partition
        if opcode == "tuple":
            return ins
        if opcode == "get-tuple-element":
            return ins[0][number(one.fields, 13)] if isinstance(ins[0], list) else None
        if opcode in PASSED_ON:
            return _as_shaped(ins[0], one)
        if opcode in ("fusion", "call"):
            inner = self._module.computations[one.called[0]]
            return Values(self._module, inner, ins, self._partition).of(inner.root)
        if opcode == "while":
            return _run(self._module, one, ins[0], self._partition)[1]
        return _arithmetic(one, ins) if len(ins) == len(one.operands) else None


def trip_counts(module: Module, loop: Instruction, initial: Value) -> tuple[int, Value] | None:
    """How often a loop runs and what it returns, from what it starts with; None where that cannot be told."""
    config = raw(loop.fields, 43)
    count, final = _run(module, loop, initial, None)
    known = _KNOWN.search(config)
    if known:
        return int(known[1]), final
    return None if count is None else (count, final)


def _run(module: Module, loop: Instruction, initial: Value, partition: int | None) -> tuple[int | None, Value]:
    """The rounds of a loop, counted; and what comes out of it."""
    body, condition = (module.computations[called] for called in loop.called[:2])
    if len(condition.parameters) != 1:
        return None, None
    state = list(initial) if isinstance(initial, list) else initial
    counted = _counted(module, body, condition)
    count = 0
    while True:
        goes_on = Values(module, condition, [state], partition).of(condition.root)
        if goes_on is None:
            return None, None
        if not goes_on:
            return count, state
        count += 1
        if count > MAX_TRIPS or not isinstance(state, list):
            return None, None
        values = Values(module, body, [state], partition)
        root = body.instructions[body.root]
        if root.opcode != "tuple":
            after = values.of(body.root)
            state = after if isinstance(after, list) else None
            continue
        state = [values.of(one) if at in counted else None for at, one in enumerate(root.operands)]


def _counted(module: Module, body: Computation, condition: Computation) -> set[int]:
    """The parts of a loop's state that decide how long it runs, and those these follow from."""
    root = body.instructions[body.root]
    wanted = _read(condition, [condition.root])
    while root.opcode == "tuple":
        more = wanted | _read(body, [root.operands[at] for at in wanted if at < len(root.operands)])
        if more == wanted:
            break
        wanted = more
    return wanted


def _read(computation: Computation, ends: Sequence[int]) -> set[int]:
    """The parts of a computation's one parameter that some of its values depend on."""
    found: set[int] = set()
    seen: set[int] = set()
    stack = list(ends)
    while stack:
        one = computation.instructions[stack.pop()]
        if one.id in seen:
            continue
        seen.add(one.id)
        if one.opcode == "get-tuple-element":
            source = computation.instructions[one.operands[0]]
            if source.opcode == "parameter":
                found.add(number(one.fields, 13))
                continue
        stack += one.operands
    return found


def _as_shaped(value: Value, one: Instruction) -> Value:
    """A number or an array that is passed on, as one or the other."""
    if isinstance(value, tuple):
        if not one.shape.dims:
            return value[0] if len(value) == 1 else None
        return value if len(value) == _size(one) else None
    return value if not one.shape.dims or one.shape.parts or _size(one) == 1 else None


def _arithmetic(one: Instruction, ins: list[Value]) -> Value:
    plain = [value[0] if isinstance(value, tuple) and len(value) == 1 else value for value in ins]
    if one.opcode == "dynamic-slice":
        array, at = ins[0], plain[1]
        if not isinstance(array, tuple) or not isinstance(at, int) or numbers(one.fields, 20) != (1,):
            return None
        return array[max(0, min(at, len(array) - 1))]
    if any(not isinstance(value, int) for value in plain):
        if one.opcode == "select" and isinstance(plain[0], int):
            return plain[1 if plain[0] else 2]
        return None
    if one.opcode in BINARY:
        return BINARY[one.opcode](plain[0], plain[1])
    if one.opcode == "compare":
        return int(COMPARED[text(one.fields, 63)](plain[0], plain[1]))
    if one.opcode == "select":
        return plain[1 if plain[0] else 2]
    if one.opcode == "not":
        return int(not plain[0]) if one.shape.dtype == "pred" else ~plain[0]
    return -plain[0] if one.opcode == "negate" else None


def _size(one: Instruction) -> int:
    size = 1
    for dim in one.shape.dims:
        size *= dim
    return size
