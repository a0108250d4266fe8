"""VGG with BatchNorm and dropout, the layers made from a list of numbers, a flattened head; weight decay by a mask."""

import jax
import numpy as np
import optax
from flax import nnx


class VGG(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, config=(8, "pool", 16, 16, "pool")):
        layers, channels = [], 3
        for entry in config:
            if entry == "pool":
                layers.append(lambda x: nnx.max_pool(x, (2, 2), strides=(2, 2)))
            else:
                layers += [nnx.Conv(channels, entry, (3, 3), rngs=rngs), nnx.BatchNorm(entry, rngs=rngs), nnx.relu]
                channels = entry
        self.features = nnx.Sequential(*layers)
        self.classifier = nnx.Sequential(
            nnx.Linear(4 * 4 * channels, 64, rngs=rngs),
            nnx.relu,
            nnx.Dropout(0.5, rngs=rngs),
            nnx.Linear(64, 8, rngs=rngs),
        )

    def __call__(self, x):
        x = self.features(x)
        return self.classifier(x.reshape(x.shape[0], -1))


build = VGG
# The gradient of a bias before a BatchNorm is rounding, and nothing else.
looser = {f"features.layers.{i}.bias": 1e-3 for i in (0, 4, 7)}
optimizer = optax.adamw(1e-2, eps=0.1, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params))


def loss(model, batch):
    logits = model(batch["image"])
    correct = logits.argmax(-1) == batch["label"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), {"accuracy": correct.mean()}


def batch(size):
    rng = np.random.default_rng(0)
    return {
        "image": rng.normal(size=(size, 16, 16, 3)).astype(np.float32),
        "label": rng.integers(0, 8, size).astype(np.int32),
    }
