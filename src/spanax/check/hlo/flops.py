"""FLOPs: the matmuls and convolutions of a compiled program, loops multiplied out.

XLA's own figure (`cost_analysis`) counts the body of a loop once, and is empty on GPUs.
"""

import json
import math

import numpy as np

from spanax.check.hlo.module import Computation, Instruction, Module
from spanax.check.hlo.protobuf import Fields, fields, messages, number, numbers, raw, signed
from spanax.check.hlo.trip_counts import Value, Values, trip_counts
from spanax.plan.pipeline.ticks import share_of

GEMMS = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8")
CONVOLUTION = "__cudnn$conv"
"""Source: XLA's names for what it gives to cuBLAS and cuDNN, openxla/xla xla/service/gpu/cublas_cudnn.cc."""


def program_flops(module: Module) -> float:
    """FLOPs of one device in one step: two for each product in a matmul or convolution, no others.

    Example:
      >>> import jax
      >>> from spanax.check.hlo.module import read_module
      >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
      >>> compiled = jax.jit(lambda x: jax.lax.fori_loop(0, 5, lambda _, y: y @ x, x)).lower(x).compile()
      >>> module = read_module(compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto())
      >>> program_flops(module) == 5 * 2 * 8**3
      True
    """
    return _flops(module, module.entry, [], {})


def _flops(module: Module, computation: Computation, parameters: list[Value], known: dict[int, float]) -> float:
    values = Values(module, computation, parameters, None)
    total = 0.0
    for one in computation.instructions.values():
        if one.opcode == "while":
            initial = values.of(one.operands[0])
            count, _ = trip_counts(module, one, initial) or (1, None)
            first = [list(initial)] if isinstance(initial, list) else []
            total += count * _flops(module, module.computations[one.called[0]], first, known)
        elif one.opcode in ("fusion", "call", "async-start", "conditional"):
            for called in one.called:
                if called not in known:
                    known[called] = _flops(module, module.computations[called], [], known)
                own, ticks = share_of(one.op_name) if one.opcode == "conditional" else (1, 1)
                total += known[called] / ticks * own
        elif one.opcode == "dot":
            dims = fields(raw(one.fields, 30))
            total += _matmul(computation, one, numbers(dims, 1))
        elif one.opcode == "convolution" or one.target.startswith(CONVOLUTION):
            total += _convolution(computation, one)
        elif one.opcode == "custom-call" and one.target in GEMMS:
            total += _gemm(computation, one)
    return total


def _matmul(computation: Computation, one: Instruction, summed: tuple[int, ...]) -> float:
    lhs = computation.instructions[one.operands[0]].shape.dims
    out = one.shape.parts[0].dims if one.shape.parts else one.shape.dims
    return 2.0 * math.prod(out) * math.prod(lhs[at] for at in summed)


def _gemm(computation: Computation, one: Instruction) -> float:
    """A matmul that a GPU's library does; its dims are in the backend's own JSON."""
    config = json.loads(raw(one.fields, 43) or b"{}")
    gemm = config.get("gemm_backend_config", config)
    summed = gemm.get("dot_dimension_numbers", {}).get("lhs_contracting_dimensions", [])
    return _matmul(computation, one, tuple(int(at) for at in summed))


def _convolution(computation: Computation, one: Instruction) -> float:
    """Products of results with those positions of the window that lie in the input, not in its rim or between.

    TPU programs write matmuls as convolutions; a batch dim is then a dilated window, of which each result meets one
    position. What a GPU's library does as the gradient of one has the dims of the convolution that it belongs to.
    """
    first, second = (computation.instructions[operand].shape.dims for operand in one.operands[:2])
    result = one.shape.parts[0].dims if one.shape.parts else one.shape.dims
    lhs, rhs, out = first, second, result
    if one.target == "__cudnn$convBackwardInput":
        lhs, out = result, first
    elif one.target == "__cudnn$convBackwardFilter":
        rhs, out = result, second
    names = fields(raw(one.fields, 16))
    places = zip(numbers(names, 11), numbers(names, 6), numbers(names, 12), strict=True)
    window = messages(fields(raw(one.fields, 15)), 1)
    met = 1
    for dim, (at_lhs, at_rhs, at_out) in zip(window, places, strict=True):
        met *= _met(fields(dim), lhs[at_lhs], rhs[at_rhs], out[at_out])
    return 2.0 * out[number(names, 9)] * out[number(names, 10)] * rhs[number(names, 3)] * met


def _met(dim: Fields, size: int, window: int, out: int) -> int:
    """How many (result, position of the window) pairs of one spatial dim meet an element of the input."""
    stride, dilation, base = (number(dim, field, 1) or 1 for field in (2, 5, 6))
    (low,) = signed((number(dim, 3),))
    at = np.arange(out)[:, None] * stride + np.arange(window)[None, :] * dilation - low
    return int(((at >= 0) & (at <= (size - 1) * base) & (at % base == 0)).sum())
