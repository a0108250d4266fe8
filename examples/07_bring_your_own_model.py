"""Your own models, written as you would for one device: an MLP and a CNN with batch statistics.

Usage:
  python examples/07_bring_your_own_model.py
"""

import jax
import numpy as np
import optax
from flax import nnx

import spanax

spanax.simulate(8)


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, images):
        return self.down(nnx.relu(self.up(images.reshape(len(images), -1))))


class CNN(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.stem, self.norm = nnx.Conv(1, 16, (3, 3), rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
        self.deep, self.head = nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs), nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, images):
        return self.head(nnx.relu(self.deep(nnx.relu(self.norm(self.stem(images))))).mean((1, 2)))


def loss(model, batch):
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


rng = np.random.default_rng(0)
labels = rng.integers(0, 10, 512).astype(np.int32)
images = (labels[:, None, None, None] / 5 - 1 + rng.normal(0, 0.3, (512, 8, 8, 1))).astype(np.float32)
examples = [{"image": image, "label": label} for image, label in zip(images, labels)]
batch = {"image": jax.ShapeDtypeStruct((64, 8, 8, 1), "float32"), "label": jax.ShapeDtypeStruct((64,), "int32")}

for model, layout in ((MLP, "fsdp+tensor"), (CNN, "data+tensor")):
    program = spanax.trace(build=model, optimizer=optax.adam(1e-2), batch=batch, loss=loss)
    plan = spanax.plan(program, spanax.local(), layout=layout)
    run = spanax.start(program, plan)
    losses = [float(run.step(part)["loss"]) for part in spanax.batches(examples, plan, epochs=3)]
    print(f"{model.__name__} under {layout}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
