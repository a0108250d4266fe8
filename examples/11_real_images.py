"""Real images: ViT, ResNet and a diffusion U-Net learn handwritten digits, judged by digits they never saw.

Usage (pip install "spanax[examples]" brings scikit-learn, and it the digits):
  python examples/11_real_images.py                      # each model in its first layout, for a moment
  python examples/11_real_images.py --every --steps 500  # each in every layout of the table, for as long as you like
"""

import argparse
import sys
from functools import partial

import jax
import numpy as np
import optax

import spanax
from spanax.models import images, resnet, unet, vit

spanax.simulate(8)  # eight devices on any machine; leave it out where there are real ones

VIT = vit.ViTConfig(8, patch_size=2, num_layers=2, num_heads=4, embed_dim=64, mlp_dim=128, num_classes=10)
RESNET = resnet.ResNetConfig(8, stage_sizes=(1, 1), width=16, num_classes=10)
UNET = unet.UNetConfig(8, width=16, multipliers=(1, 2), blocks_per_level=1, attention_size=4, num_groups=4, dropout=0)
SGD = optax.sgd(0.05, momentum=0.9, nesterov=True)

# What is built, its loss, its optimizer, what the loss is told of an image, and the layouts.
MODELS = {
    "ViT": (partial(vit.ViT, VIT), images.loss, optax.adamw(3e-3), True, ["fsdp", "tensor", "fsdp+tensor"]),
    "ResNet": (partial(resnet.ResNet, RESNET), images.loss, SGD, True, ["data+tensor", "fsdp", "data"]),
    "U-Net": (partial(unet.UNet, UNET), unet.loss, optax.adam(3e-3), False, ["fsdp", "data", "fsdp+tensor"]),
}

parser = argparse.ArgumentParser()
parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--every", action="store_true", help="every layout, not the first alone")
args = parser.parse_args()

for name in args.models:
    build, loss, optimizer, is_labelled, layouts = MODELS[name]
    try:
        digits, held_out = (images.Digits(held_out=is_held_out, labelled=is_labelled) for is_held_out in (False, True))
    except spanax.SpanaxError as error:
        sys.exit(str(error))
    batch = jax.tree.map(lambda leaf: np.repeat(leaf[None], 64, axis=0), digits[0])
    program = spanax.trace(build=build, optimizer=optimizer, batch=batch, loss=loss)
    for layout in layouts if args.every else layouts[:1]:
        plan = spanax.plan(program, spanax.local(), layout=layout)
        run = spanax.start(program, plan)
        for _, batch in zip(range(args.steps), spanax.batches(digits, plan, epochs=None)):
            run.step(batch)
        found = [run.evaluate(batch) for batch in spanax.batches(held_out, plan)]
        judged = {key: np.mean([float(metrics[key]) for metrics in found]) for key in found[0]}
        said = ", ".join(f"{key} {value:.3f}" for key, value in sorted(judged.items()))
        print(f"{name} under {layout}, {args.steps} steps; held out: {said}")
