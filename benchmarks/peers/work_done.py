"""Work: the floating point operations of a step as it was compiled, so that peers can be held against each other."""

from typing import Any


def xla_flops(compiled: Any, num_devices: int) -> float:
    """Of the matmuls in a step that XLA compiled, on all devices, loops multiplied out."""
    from spanax.check.hlo.flops import program_flops
    from spanax.check.hlo.module import read_module

    module = compiled.runtime_executable().hlo_modules()[0]
    return num_devices * program_flops(read_module(module.as_serialized_hlo_module_proto()))


def torch_flops(step: Any, *args: Any) -> float:
    """Of the matmuls in a step of PyTorch, which is taken for it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    # Its counter does not know the fused attention of CPUs; of matmuls it knows every one.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        step(*args)
    return float(counter.get_total_flops())
