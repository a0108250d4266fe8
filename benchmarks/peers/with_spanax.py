"""Spanax with the plain NNX model of `spanax.models.gpt`: what a user writes."""

import argparse
import math
from functools import partial
from typing import Any

import numpy as np

from serve import serve
from shape import Shape, shape_of, with_layout
from work_done import xla_flops

IN_A_BLOCK = {
    "attention_norm.scale": "norm1_scale", "attention_norm.bias": "norm1_bias",
    "attention.qkv.kernel": "qkv", "attention.qkv.bias": "qkv_bias",
    "attention.out.kernel": "out", "attention.out.bias": "out_bias",
    "mlp_norm.scale": "norm2_scale", "mlp_norm.bias": "norm2_bias",
    "up.kernel": "up", "up.bias": "up_bias", "down.kernel": "down", "down.bias": "down_bias",
}  # fmt: skip
OUTSIDE = {"embed": "embed", "positions": "positions", "norm.scale": "norm_scale", "norm.bias": "norm_bias"}


def numbers_of(shape: Shape, path: str) -> np.ndarray:
    """What a parameter of the NNX model starts from: of one block in a list, or of a stack of them all."""
    weights = shape.weights()
    if path in OUTSIDE:
        return weights[OUTSIDE[path]]
    place, _, inner = path.removeprefix("blocks.").partition(".")
    if place.isdigit():
        return weights[IN_A_BLOCK[inner]][int(place)]
    return weights[next(name for end, name in IN_A_BLOCK.items() if path.endswith(end))]


def config_of(shape: Shape, is_scanned: bool) -> Any:
    """The configuration of `spanax.models.gpt`."""
    from spanax.models import gpt

    return gpt.GPTConfig(
        shape.vocab_size, shape.seq_len, shape.num_layers, shape.num_heads, shape.embed_dim, scan_layers=is_scanned
    )


def main() -> None:
    """Train with Spanax."""
    args = with_layout(argparse.ArgumentParser(description=__doc__)).parse_args()
    import spanax

    spanax.simulate(args.devices)
    import jax

    from by_hand import optimizer_of
    from spanax.models import gpt

    shape = shape_of(args, "bfloat16")
    config = config_of(shape, args.scan)
    program = spanax.trace(
        build=lambda rngs: gpt.GPT(config, rngs),
        optimizer=optimizer_of(shape),
        batch=gpt.example_batch(shape.batch_size, shape.seq_len),
        loss=gpt.loss,
        compute_dtype=None if shape.dtype == "float32" else shape.dtype,
    )
    place = partial(spanax.plan, program, spanax.local(), layout=args.layout)
    plan = place(attention="auto" if args.flash else None)
    run = spanax.start(program, plan)
    for i, leaf in enumerate(run.program.leaves):
        if leaf.kind == "param":
            run.state[i] = jax.device_put(numbers_of(shape, leaf.path), run.state[i].sharding)

    def take(tokens_BT: np.ndarray) -> float:
        return float(run.step({"inputs": tokens_BT[:, :-1], "targets": tokens_BT[:, 1:]})["loss"])

    count = sum(math.prod(leaf.shape) for leaf in run.program.leaves if leaf.kind == "param")

    def work() -> float:
        # Of a kernel nobody counts them: those of the same step with attention as it is written.
        counted = run if plan.schedule.context == "gathered" else spanax.start(program, place())
        return xla_flops(counted.lower().compile(), args.devices)

    serve(
        shape,
        take,
        work,
        parameters=count,
        devices=args.devices,
        versions={"jax": jax.__version__},
        device=jax.devices()[0].device_kind,
        attention=plan.schedule.context,
    )


if __name__ == "__main__":
    main()
