"""Host time of eager PyTorch layers, per fused kernel of the planner: the prior of `dispatch_seconds`.

A layer as Megatron-LM writes it, on tensors so small that the host's work is all that takes time, forward and backward,
with and without checkpoints and tensor parallelism; and a layer of experts as Megatron-Core writes it, with tokens
exchanged by all-to-all, by the number of experts of a device. On a GPU each kernel is launched as well, which is added:
`LAUNCH_SECONDS` times the operations that launch one. What differs from a cluster is the host's processor.

Usage, where PyTorch is installed (a build for CPUs suffices):
  python benchmarks/eager_dispatch.py [--layers 8] [--steps 60]
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

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
"""Per collective that NCCL enqueues, beyond PyTorch's own work. An estimate: no table of it is public."""

ROUTED_KERNELS = 26
"""Fused kernels that the planner counts for a router and its experts, without attention: 49 of a layer less 23."""

SEQUENCE, BATCH, EMBED, HEADS = 8, 1, 64, 4
WORLD, TOP_K, EXPERT_DIM = 8, 8, 32

LAUNCHES = (
    "addmm", "mm", "bmm", "baddbmm", "copy_", "mul", "add", "add_", "sum", "bernoulli_", "div_", "masked_fill_",
    "_softmax", "_softmax_backward_data", "gelu", "gelu_backward", "native_layer_norm", "native_layer_norm_backward",
    "fill_", "native_dropout", "native_dropout_backward", "div", "cat", "topk", "silu", "silu_backward", "scatter_add_",
    "masked_scatter_", "index_select", "masked_select", "rsqrt", "zero_", "neg", "_local_scalar_dense",
)  # fmt: skip
"""Operations that run a kernel on a GPU; all others allocate or make views."""

COLLECTIVES = ("c10d::allreduce_", "c10d::alltoall_base_", "c10d::_allgather_base_")


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


class Exchanged(torch.autograd.Function):
    """Megatron-Core's all-to-all of tokens, whose gradient is the opposite exchange."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int]) -> Tensor:
        ctx.splits = received, sent
        result = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(result, x.contiguous(), received, sent)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        received, sent = ctx.splits
        result = grad.new_empty(sum(sent), grad.shape[1])
        dist.all_to_all_single(result, grad.contiguous(), sent, received)
        return result, None, None


class Experts(nn.Module):
    """A norm, a router and gated experts without dropped tokens, each expert multiplied alone."""

    def __init__(self, local_experts: int):
        super().__init__()
        self.norm = nn.RMSNorm(EMBED)
        self.router = nn.Linear(EMBED, local_experts * WORLD, bias=False)
        self.up = nn.ParameterList(torch.randn(2 * EXPERT_DIM, EMBED) * 0.02 for _ in range(local_experts))
        self.down = nn.ParameterList(torch.randn(EMBED, EXPERT_DIM) * 0.02 for _ in range(local_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.norm(x)
        logits = self.router(hidden)
        probabilities = torch.softmax(logits.float(), -1)
        gates, chosen = torch.topk(probabilities, TOP_K, dim=-1)
        routed = torch.zeros_like(logits).scatter(1, chosen, gates / gates.sum(-1, keepdim=True))
        is_routed = torch.zeros_like(logits).int().scatter(1, chosen, 1).bool()
        counts = is_routed.sum(0)
        loss = (probabilities.mean(0) * counts).sum() * len(counts)
        dist.all_gather_into_tensor(counts.new_empty(WORLD, len(counts)), counts)
        sent = counts.reshape(WORLD, -1).sum(1).tolist()  # the host waits for the device
        num_rows = sum(sent)
        numbers = torch.arange(len(x)).unsqueeze(0).expand(len(counts), -1).masked_select(is_routed.T.contiguous())
        shares = routed.T.contiguous().masked_select(is_routed.T.contiguous())
        tokens = Exchanged.apply(hidden.index_select(0, numbers), sent, sent)
        weights = Exchanged.apply(shares.unsqueeze(1), sent, sent)
        order, each = torch.arange(num_rows), num_rows // len(self.up)
        sizes = [each] * (len(self.up) - 1) + [num_rows - each * (len(self.up) - 1)]
        parts = torch.split(tokens.index_select(0, order), sizes)
        up, gate = torch.cat([F.linear(part, w) for part, w in zip(parts, self.up, strict=True)]).chunk(2, -1)
        parts = torch.split(F.silu(gate) * up * weights, sizes)
        down = torch.cat([F.linear(part, w) for part, w in zip(parts, self.down, strict=True)])
        back = Exchanged.apply(down.index_select(0, order), sent, sent)
        return x + torch.zeros_like(x).scatter_add(0, numbers.unsqueeze(1).expand(-1, EMBED), back), loss


def experts_step_of(num_layers: int, local_experts: int) -> Callable[[], None]:
    """Returns a function that runs layers of experts forward and backward once."""
    layers = nn.ModuleList(Experts(local_experts) for _ in range(num_layers))

    def step() -> None:
        x, losses = torch.randn(SEQUENCE * BATCH * 8, EMBED, requires_grad=True), []
        for layer in layers:
            x, loss = layer(x)
            losses.append(loss)
        (x.sum() + torch.stack(losses).sum()).backward()

    return step


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
    return kernels, sum(name in COLLECTIVES for name in names)


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
    _experts(args.layers, args.steps)


def _experts(num_layers: int, num_steps: int) -> None:
    print("\n| local experts | host us a layer | kernels | collectives | us |\n|---|---|---|---|---|")
    totals = {}
    for local_experts in (1, 4, 16):
        step = experts_step_of(num_layers, local_experts)
        seconds = host_seconds(step, num_steps) / num_layers
        kernels, collectives = (count / num_layers for count in launches(step))
        totals[local_experts] = seconds + kernels * LAUNCH_SECONDS + collectives * ENQUEUE_SECONDS
        print(
            f"| {local_experts} | {seconds * 1e6:.0f} | {kernels:.1f} | {collectives:.1f} | "
            f"{totals[local_experts] * 1e6:.0f} |",
            flush=True,
        )
    each = (totals[16] - totals[1]) / 15 / 6
    print(f"a matmul of an expert after the first: {each * 1e6:.1f} us")


if __name__ == "__main__":
    main()
