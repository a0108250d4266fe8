"""Host time of an eager PyTorch layer, per fused kernel of the planner: the prior of `dispatch_seconds`.

A layer as Megatron-LM writes it, on tensors so small that the host's work is all that takes time, forward and backward,
with and without checkpoints and tensor parallelism. On a GPU each kernel is launched as well, which is added:
`LAUNCH_SECONDS` times the operations that launch one. What differs from a cluster is the host's processor.

Usage, where PyTorch is installed (a build for CPUs suffices):
  python benchmarks/eager_dispatch.py [--layers 8] [--steps 60]
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

FORWARD_KERNELS, BACKWARD_KERNELS = 12, 20
"""Fused kernels that the planner counts in a layer of `spanax.models.gpt` (tests/test_plan_accuracy.py compares)."""

LAUNCH_SECONDS = 3.8e-6
"""Per kernel that is launched without waiting for the last. Source: Gray, "Getting Started with CUDA Graphs", NVIDIA
Technical Blog (2019), on a V100."""

ENQUEUE_SECONDS = 10e-6
"""Per collective that NCCL enqueues. Source: NCCL-tests' in-place all-reduce of 8 bytes on one node, which is no less.
"""

SEQUENCE, BATCH, EMBED, HEADS = 8, 1, 64, 4

LAUNCHES = (
    "addmm", "mm", "bmm", "baddbmm", "copy_", "mul", "add", "add_", "sum", "bernoulli_", "div_", "masked_fill_",
    "_softmax", "_softmax_backward_data", "gelu", "gelu_backward", "native_layer_norm", "native_layer_norm_backward",
    "fill_", "native_dropout", "native_dropout_backward",
)  # fmt: skip
"""Operations that run a kernel on a GPU; all others allocate or make views."""


class Copied(torch.autograd.Function):
    """Megatron-LM's f: the identity, whose gradient is summed over the tensor-parallel group."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        dist.all_reduce(grad)
        return grad


class Summed(torch.autograd.Function):
    """Megatron-LM's g: a sum over the tensor-parallel group, whose gradient is the identity."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


class Layer(nn.Module):
    """A pre-norm layer with attention written out, dropout and a GELU, as in Megatron-LM of 2021."""

    def __init__(self, is_tensor_parallel: bool):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(EMBED) for _ in range(2))
        self.qkv, self.out = nn.Linear(EMBED, 3 * EMBED), nn.Linear(EMBED, EMBED)
        self.up, self.down = nn.Linear(EMBED, 4 * EMBED), nn.Linear(4 * EMBED, EMBED)
        self.copied, self.summed = (Copied.apply, Summed.apply) if is_tensor_parallel else (lambda x: x, lambda x: x)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        T, B, _ = x.shape
        qkv = self.qkv(self.copied(self.norms[0](x))).view(T, B, HEADS, 3 * EMBED // HEADS)
        q, k, v = (part.reshape(T, B * HEADS, -1).transpose(0, 1) for part in qkv.chunk(3, -1))
        scores = torch.bmm(q, k.transpose(1, 2)) * (EMBED // HEADS) ** -0.5
        scores = scores.view(B, HEADS, T, T).masked_fill(mask, -1e4)
        weights = F.dropout(torch.softmax(scores, -1), 0.1).view(B * HEADS, T, T)
        values = torch.bmm(weights, v).view(B, HEADS, T, -1).permute(2, 0, 1, 3).reshape(T, B, EMBED)
        x = x + F.dropout(self.summed(self.out(values)), 0.1)
        hidden = F.gelu(self.up(self.copied(self.norms[1](x))))
        return x + F.dropout(self.summed(self.down(hidden)), 0.1)


def step_of(num_layers: int, checkpoints: bool, is_tensor_parallel: bool) -> Callable[[], None]:
    """Returns a function that runs the layers forward and backward once."""
    layers = nn.ModuleList(Layer(is_tensor_parallel) for _ in range(num_layers))
    mask = torch.triu(torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool), 1)

    def step() -> None:
        x = torch.randn(SEQUENCE, BATCH, EMBED, requires_grad=True)
        for layer in layers:
            x = checkpoint(layer, x, mask, use_reentrant=True) if checkpoints else layer(x, mask)
        x.sum().backward()

    return step


def host_seconds(step: Callable[[], None], num_steps: int) -> float:
    """Returns the least processor time of a step: other programs on the machine only ever add to it."""
    for _ in range(5):
        step()
    times = []
    for _ in range(num_steps):
        start = time.thread_time()
        step()
        times.append(time.thread_time() - start)
    return min(times)


def launches(step: Callable[[], None]) -> tuple[int, int]:
    """Returns the numbers of kernels and of collectives of a step."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    names = [event.name for event in profiled.events()]
    kernels = sum(name.removeprefix("aten::") in LAUNCHES for name in names if name.startswith("aten::"))
    return kernels, sum(name == "c10d::allreduce_" for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    columns = ("checkpoints", "tensor parallel", "host us a layer", "kernels", "collectives", "us a fused kernel")
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for checkpoints in (False, True):
        for is_tensor_parallel in (False, True):
            step = step_of(args.layers, checkpoints, is_tensor_parallel)
            seconds = host_seconds(step, args.steps) / args.layers
            kernels, collectives = (count / args.layers for count in launches(step))
            total = seconds + kernels * LAUNCH_SECONDS + collectives * ENQUEUE_SECONDS
            fused = FORWARD_KERNELS * (1 + checkpoints) + BACKWARD_KERNELS
            print(
                f"| {checkpoints} | {is_tensor_parallel} | {seconds * 1e6:.0f} | {kernels:.1f} | {collectives:.1f} | "
                f"{total / fused * 1e6:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
