"""Computes the trip counts of HLO loops, from XLA's annotation or by interpreting the integers that control the loop.

TPU programs have no trip count annotations. A few integers control each loop; all other values are unknown (None).
"""

import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

from spanax.check.hlo.module import Computation, Instruction, Module, integers

MAX_TRIPS = 100_000
"""The interpreter gives up on loops with more iterations."""

_KNOWN = re.compile(rb'"known_trip_count":\{"n":"(\d+)"\}')

Value = Any
"""An integer, a tuple with the elements of a constant array, a list for an HLO tuple, or None if unknown."""

FORWARDING = frozenset({"copy", "bitcast", "reshape", "broadcast", "convert", "copy-done", "optimization-barrier"})
BINARY: dict[str, Callable[[int, int], int | None]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": lambda a, b: None if not b else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "remainder": lambda a, b: None if not b else abs(a) % abs(b) * (1 if a >= 0 else -1),
    "maximum": max,
    "minimum": min,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "shift-left": operator.lshift,
    "shift-right-logical": lambda a, b: a >> b if a >= 0 else None,
    "shift-right-arithmetic": operator.rshift,
}
COMPARISONS = {name: getattr(operator, name.lower()) for name in ("EQ", "NE", "LT", "LE", "GT", "GE")}


class Values:
    """The integers of a computation that follow from its parameters, evaluated lazily and cached."""

    def __init__(self, module: Module, computation: Computation, parameters: Sequence[Value], partition: int | None):
        self._module = module
        self._computation = computation
        self._parameters = parameters
        self._partition = partition
        self._known: dict[int, Value] = {}

    def of(self, instruction_id: int) -> Value:
        """Returns the value of an instruction, by its id."""
        stack = [instruction_id]
        while stack:
            current = stack[-1]
            if current in self._known:
                stack.pop()
                continue
            instruction = self._computation.instructions[current]
            missing = [operand for operand in self._needed(instruction) if operand not in self._known]
            if missing:
                stack += missing
                continue
            self._known[current] = self._evaluate(instruction)
            stack.pop()
        return self._known[instruction_id]

    def _needed(self, instruction: Instruction) -> tuple[int, ...]:
        opcode = instruction.opcode
        dims = instruction.shape.dims
        if opcode == "get-tuple-element" or opcode in ("tuple", "while", "call", "fusion") or opcode in FORWARDING:
            return instruction.operands
        is_known = opcode in BINARY or opcode in ("compare", "select", "not", "negate", "dynamic-slice")
        return instruction.operands if is_known and len(dims) <= 1 else ()

    def _evaluate(self, instruction: Instruction) -> Value:
        opcode = instruction.opcode
        operands = [self._known.get(operand) for operand in instruction.operands]
        if opcode == "parameter":
            index = instruction.message.parameter_number
            return self._parameters[index] if index < len(self._parameters) else None
        if opcode == "constant":
            constant = integers(instruction) if not instruction.shape.parts else None
            return constant if instruction.shape.dims else next(iter(constant or ()), None)
        if opcode == "partition-id":
            return self._partition
        if opcode == "tuple":
            return operands
        if opcode == "get-tuple-element":
            return operands[0][instruction.message.tuple_index] if isinstance(operands[0], list) else None
        if opcode in FORWARDING:
            return _as_shaped(operands[0], instruction)
        if opcode in ("fusion", "call"):
            inner = self._module.computations[instruction.called[0]]
            return Values(self._module, inner, operands, self._partition).of(inner.root)
        if opcode == "while":
            return _interpret(self._module, instruction, operands[0], self._partition)[1]
        return _arithmetic(instruction, operands) if len(operands) == len(instruction.operands) else None


def trip_count(module: Module, loop: Instruction, initial: Value) -> int | None:
    """Returns the trip count of a loop, given its initial state; None if unknown."""
    known = _KNOWN.search(loop.message.backend_config)
    return int(known[1]) if known else _interpret(module, loop, initial, None)[0]


def _interpret(module: Module, loop: Instruction, initial: Value, partition: int | None) -> tuple[int | None, Value]:
    """Interprets a loop and returns its trip count and final state; None for unknown values."""
    body, condition = (module.computations[called] for called in loop.called[:2])
    if len(condition.parameters) != 1:
        return None, None
    state = list(initial) if isinstance(initial, list) else initial
    control = _control_indices(module, body, condition)
    count = 0
    while True:
        condition_value = Values(module, condition, [state], partition).of(condition.root)
        if condition_value is None:
            return None, None
        if not condition_value:
            return count, state
        count += 1
        if count > MAX_TRIPS or not isinstance(state, list):
            return None, None
        values = Values(module, body, [state], partition)
        root = body.instructions[body.root]
        if root.opcode != "tuple":
            result = values.of(body.root)
            state = result if isinstance(result, list) else None
            continue
        state = [values.of(operand) if index in control else None for index, operand in enumerate(root.operands)]


def _control_indices(module: Module, body: Computation, condition: Computation) -> set[int]:
    """Returns the indices of the loop state that determine the trip count, directly or indirectly."""
    root = body.instructions[body.root]
    control = _dependencies(condition, [condition.root])
    while root.opcode == "tuple":
        extended = control | _dependencies(
            body, [root.operands[index] for index in control if index < len(root.operands)]
        )
        if extended == control:
            break
        control = extended
    return control


def _dependencies(computation: Computation, ends: Sequence[int]) -> set[int]:
    """Returns the indices of a computation's only parameter that the given values depend on."""
    indices: set[int] = set()
    seen: set[int] = set()
    stack = list(ends)
    while stack:
        instruction = computation.instructions[stack.pop()]
        if instruction.id in seen:
            continue
        seen.add(instruction.id)
        if instruction.opcode == "get-tuple-element":
            source = computation.instructions[instruction.operands[0]]
            if source.opcode == "parameter":
                indices.add(instruction.message.tuple_index)
                continue
        stack += instruction.operands
    return indices


def _as_shaped(value: Value, instruction: Instruction) -> Value:
    """Returns a scalar or array value in the shape of the instruction that forwards it; None if they do not match."""
    shape = instruction.shape
    if isinstance(value, tuple):
        if not shape.dims:
            return value[0] if len(value) == 1 else None
        return value if len(value) == math.prod(shape.dims) else None
    return value if shape.parts or math.prod(shape.dims) == 1 else None


def _arithmetic(instruction: Instruction, operands: list[Value]) -> Value:
    scalars = [value[0] if isinstance(value, tuple) and len(value) == 1 else value for value in operands]
    if instruction.opcode == "dynamic-slice":
        array = operands[0]
        index = scalars[1]
        if (
            not isinstance(array, tuple)
            or not isinstance(index, int)
            or list(instruction.message.dynamic_slice_sizes) != [1]
        ):
            return None
        return array[max(0, min(index, len(array) - 1))]
    if any(not isinstance(value, int) for value in scalars):
        if instruction.opcode == "select" and isinstance(scalars[0], int):
            return scalars[1 if scalars[0] else 2]
        return None
    if instruction.opcode in BINARY:
        return BINARY[instruction.opcode](scalars[0], scalars[1])
    if instruction.opcode == "compare":
        return int(COMPARISONS[instruction.message.comparison_direction](scalars[0], scalars[1]))
    if instruction.opcode == "select":
        return scalars[1 if scalars[0] else 2]
    if instruction.opcode == "not":
        return int(not scalars[0]) if instruction.shape.dtype == "pred" else ~scalars[0]
    return -scalars[0] if instruction.opcode == "negate" else None
