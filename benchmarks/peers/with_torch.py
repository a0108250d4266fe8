"""PyTorch as its users write it: eager, compiled, DDP and FSDP2 over gloo, one process a device.

Shape suffixes: B batch, T positions, V vocab, D embed, F mlp, H heads, K head_dim.
"""

import argparse
import multiprocessing
import os
import socket
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from serve import serve
from shape import Shape, shape_of, with_shape
from work_done import torch_flops


class Block(nn.Module):
    """One pre-norm block, attention by the fused kernel."""

    def __init__(self, shape: Shape):
        super().__init__()
        D = shape.embed_dim
        self.num_heads = shape.num_heads
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        B, T, D = x_BTD.shape
        qkv_BTD = self.qkv(self.norm1(x_BTD)).split(D, dim=2)
        q, k, v = (part.view(B, T, self.num_heads, -1).transpose(1, 2) for part in qkv_BTD)
        mixed_BHTK = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(mixed_BHTK.transpose(1, 2).reshape(B, T, D))
        return x_BTD + self.down(functional.gelu(self.up(self.norm2(x_BTD)), approximate="tanh"))


class GPT(nn.Module):
    """Tokens in, the loss out."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.embed = nn.Embedding(shape.vocab_size, shape.embed_dim)
        self.positions = nn.Parameter(torch.empty(shape.seq_len, shape.embed_dim))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.embed_dim)

    def forward(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.embed(inputs_BT) + self.positions
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = functional.linear(self.norm(x_BTD), self.embed.weight)
        return functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def made(shape: Shape) -> GPT:
    """The model with the numbers that all peers start from; PyTorch keeps a matrix as (out, in)."""
    model, weights = GPT(shape), shape.weights()
    D = shape.embed_dim
    state = {"embed.weight": weights["embed"], "positions": weights["positions"]}
    state |= {"norm.weight": weights["norm_scale"], "norm.bias": weights["norm_bias"]}
    for i in range(shape.num_layers):
        here = {
            "norm1.weight": weights["norm1_scale"][i], "norm1.bias": weights["norm1_bias"][i],
            "norm2.weight": weights["norm2_scale"][i], "norm2.bias": weights["norm2_bias"][i],
            "qkv.weight": weights["qkv"][i].reshape(D, 3 * D).T, "qkv.bias": weights["qkv_bias"][i].reshape(-1),
            "out.weight": weights["out"][i].reshape(D, D).T, "out.bias": weights["out_bias"][i],
            "up.weight": weights["up"][i].T, "up.bias": weights["up_bias"][i],
            "down.weight": weights["down"][i].T, "down.bias": weights["down_bias"][i],
        }  # fmt: skip
        state |= {f"blocks.{i}.{name}": array for name, array in here.items()}
    model.load_state_dict({name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in state.items()})
    return model


def optimizer_of(shape: Shape, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW as every peer has it, in its fastest form."""
    return torch.optim.AdamW(
        model.parameters(), lr=shape.learning_rate, betas=(shape.beta1, shape.beta2), eps=shape.epsilon,
        weight_decay=shape.weight_decay, fused=True,
    )  # fmt: skip


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def trainer(shape: Shape, mode: str, rank: int, num_ranks: int) -> Any:
    """What trains on this rank's rows of a batch and returns the loss of them all."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_ranks))
    torch.set_float32_matmul_precision("high")  # what JAX does by itself: TF32 on a GPU, nothing else on a CPU
    model: Any = made(shape).to(DEVICE)
    if mode == "compiled":
        model.compile()
    elif mode == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif mode == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = optimizer_of(shape, model)
    rows = shape.batch_size // num_ranks

    def take(tokens_BT: np.ndarray) -> float:
        mine = torch.from_numpy(tokens_BT[rank * rows : (rank + 1) * rows]).long().to(DEVICE)
        with torch.autocast(DEVICE, getattr(torch, shape.dtype), enabled=shape.dtype != "float32"):
            loss = model(mine[:, :-1], mine[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if num_ranks > 1:
            loss = loss.detach().clone()
            dist.all_reduce(loss)
        return loss.item() / num_ranks

    return take


def follow(shape: Shape, mode: str, rank: int, num_ranks: int, port: int) -> None:
    """One of the other ranks: takes every step with the first one, until it is told that there is none."""
    join(rank, num_ranks, port)
    take, batches, word = trainer(shape, mode, rank, num_ranks), shape.batches(), torch.ones(1)
    while dist.broadcast(word, 0) is None and word.item():
        take(next(batches))


def join(rank: int, num_ranks: int, port: int) -> None:
    """Meet the other ranks over gloo."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)


def main() -> None:
    """Train with PyTorch."""
    parser = with_shape(argparse.ArgumentParser(description=__doc__))
    parser.add_argument("--mode", choices=["eager", "compiled", "ddp", "fsdp2"], default="eager")
    parser.add_argument("--devices", type=int, default=1)
    args = parser.parse_args()
    shape, num_ranks = shape_of(args, "bfloat16"), args.devices
    is_group = args.mode in ("ddp", "fsdp2")
    others = []
    if is_group:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        spawned = multiprocessing.get_context("spawn")
        others = [
            spawned.Process(target=follow, args=(shape, args.mode, rank, num_ranks, port))
            for rank in range(1, num_ranks)
        ]
        for other in others:
            other.start()
        join(0, num_ranks, port)
    elif num_ranks != 1:
        raise SystemExit(f"--mode {args.mode} is one process")
    count = sum(parameter.numel() for parameter in made(shape).parameters())
    alone = trainer(shape, args.mode, 0, num_ranks)

    def take(tokens_BT: np.ndarray) -> float:
        if is_group:
            dist.broadcast(torch.ones(1), 0)
        return alone(tokens_BT)

    def work() -> float:
        # Numbers and memory are of no use for it.
        model, ids = (
            GPT(shape).to("meta"),
            torch.empty((shape.batch_size, shape.seq_len), dtype=torch.long, device="meta"),
        )
        return torch_flops(lambda: model(ids, ids).backward())

    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    versions = {"torch": torch.__version__}
    serve(shape, take, work, parameters=count, devices=num_ranks, versions=versions, device=name)
    if is_group:
        dist.broadcast(torch.zeros(1), 0)
        for other in others:
            other.join()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
