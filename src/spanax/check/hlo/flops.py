"""Counts the FLOPs of matmuls and convolutions in a compiled program, multiplied by the trip counts of loops.

XLA's `cost_analysis` counts the body of a loop once, and is empty on GPUs.
"""

import json
import math
from collections.abc import Iterable

from spanax.check.hlo.module import Computation, Instruction, Module
from spanax.check.hlo.trip_counts import Value, Values, trip_count
from spanax.plan.pipeline.ticks import share_of
from spanax.trace.jaxpr.dim_maps.windows import num_pairs

GEMMS = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8")
CONVOLUTION = "__cudnn$conv"
"""XLA's names for calls of cuBLAS and cuDNN. Source: openxla/xla xla/service/gpu/cublas_cudnn.cc."""


def program_flops(module: Module) -> float:
    """Returns the FLOPs per device and step: two for each product in a matmul or convolution.

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
    for instruction in computation.instructions.values():
        if instruction.opcode == "while":
            initial = values.of(instruction.operands[0])
            count = trip_count(module, instruction, initial)
            state = [list(initial)] if isinstance(initial, list) else []
            once = _flops(module, module.computations[instruction.called[0]], state, known)
            total += once if count is None else count * once
        elif instruction.opcode in ("fusion", "call", "async-start", "conditional"):
            for called in instruction.called:
                if called not in known:
                    known[called] = _flops(module, module.computations[called], [], known)
                active_ticks, ticks = share_of(instruction.op_name) if instruction.opcode == "conditional" else (1, 1)
                total += known[called] / ticks * active_ticks
        elif instruction.opcode == "dot":
            contracting = instruction.message.dot_dimension_numbers.lhs_contracting_dimensions
            total += _matmul(computation, instruction, contracting)
        elif instruction.opcode == "convolution" or instruction.target.startswith(CONVOLUTION):
            total += _convolution(computation, instruction)
        elif instruction.opcode == "custom-call" and instruction.target in GEMMS:
            total += _gemm(computation, instruction)
    return total


def _matmul(computation: Computation, instruction: Instruction, contracting: Iterable[int]) -> float:
    lhs = computation.instructions[instruction.operands[0]].shape.dims
    out = instruction.shape.parts[0].dims if instruction.shape.parts else instruction.shape.dims
    return 2.0 * math.prod(out) * math.prod(lhs[dim] for dim in contracting)


def _gemm(computation: Computation, instruction: Instruction) -> float:
    """Returns the FLOPs of a cuBLAS call, whose contracting dims are in its JSON backend config."""
    config = json.loads(instruction.message.backend_config or b"{}")
    gemm = config.get("gemm_backend_config", config)
    contracting = gemm.get("dot_dimension_numbers", {}).get("lhs_contracting_dimensions", [])
    return _matmul(computation, instruction, map(int, contracting))


def _convolution(computation: Computation, instruction: Instruction) -> float:
    """Returns the FLOPs of a convolution, without products with padding or with the zeros of base dilation.

    TPU programs express matmuls as convolutions; a batch dim is then a dilated window, with one valid position per
    result. A cuDNN gradient call has the dims of its forward convolution.
    """
    first, second = (computation.instructions[operand].shape.dims for operand in instruction.operands[:2])
    result = instruction.shape.parts[0].dims if instruction.shape.parts else instruction.shape.dims
    lhs = first
    rhs = second
    out = result
    if instruction.target == "__cudnn$convBackwardInput":
        lhs = result
        out = first
    elif instruction.target == "__cudnn$convBackwardFilter":
        rhs = result
        out = second
    names = instruction.message.convolution_dimension_numbers
    spatial = (names.input_spatial_dimensions, names.kernel_spatial_dimensions, names.output_spatial_dimensions)
    num_products = out[names.output_batch_dimension] * out[names.output_feature_dimension]
    num_products *= rhs[names.kernel_input_feature_dimension]
    for dim, lhs_dim, rhs_dim, out_dim in zip(instruction.message.window.dimensions, *spatial, strict=True):
        sizes = lhs[lhs_dim], rhs[rhs_dim], out[out_dim]
        dilations = dim.base_dilation or 1, dim.window_dilation or 1
        num_products *= num_pairs(sizes, dim.stride or 1, dim.padding_low, dilations)
    return 2.0 * num_products
