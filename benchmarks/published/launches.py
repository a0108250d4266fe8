"""What a host launches beyond the fused kernels that the planner counts, for runtimes without a compiler.

All figures are in fused kernels' dispatch times. Source: `python benchmarks/eager_dispatch.py`, PyTorch 2.13.0, means.
"""

from dataclasses import replace

import numpy as np

from spanax.plan.spmd.terms import Terms
from spanax.trace.analysis.op_groups import Phase

CHECKPOINTED = 12.0
"""Of a layer with a checkpoint (6.3, 14, 14.5): the state of the random generators is stored and restored."""

ROUTED = 16.0
"""Of a layer with a router, in addition to the planner's: the top-k, both maps, counts and their transfer to the host.

36 are measured, without fusions; Megatron-Core's router launches 72 kernels without and 31 with its fusions
(docs/discussions/deepseek-v3-gb200-optimization).
"""

EXPERT = 0.5
"""Of a matmul of a local expert after the first (0.47, 0.56): each expert's rows are sliced and multiplied alone.

Megatron-Core's grouped matmul launches a matmul per expert, on several streams (as above); what each costs the host is
in NVIDIA/TransformerEngine issue 1499: a slice, and an empty tensor for the result.
"""

FORWARD = 1 / 3
"""Of the three matmuls with a weight, one is in the forward pass."""


def launched(terms: Terms, routed_layers: int, local_experts: float, checkpointed_layers: int, is_cast: bool) -> Terms:
    """Returns the terms with the kernels that a host launches in addition.

    Args:
      terms: of the program.
      routed_layers: layers with a router.
      local_experts: experts per device, in each of these layers.
      checkpointed_layers: layers whose forward pass is repeated from a checkpoint.
      is_cast: whether activations and gradients are cast, each by a separate kernel: for each expert two casts per
        three matmuls, and a cast costs the host what a matmul does.
    """
    matmuls = 6.0 * EXPERT * (max(local_experts, 1.0) * (1 + 2 / 3 * is_cast) - 1)
    routing = routed_layers * (ROUTED + matmuls)
    kernels = np.array(terms.memory_traffic.kernels, float)
    kernels[Phase.FORWARD, 1] += FORWARD * routing
    kernels[Phase.BACKWARD, 1] += (1 - FORWARD) * routing + CHECKPOINTED * checkpointed_layers
    return replace(terms, memory_traffic=replace(terms.memory_traffic, kernels=kernels))
