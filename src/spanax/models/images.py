"""Image classification: the loss, the shapes of batches, and synthetic images."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


def loss(model: nnx.Module, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the mean cross-entropy in float32, and the accuracy as a metric.

    `batch` has `images`, (B, height, width, 3), and `labels`, int32 (B,).
    """
    logits = model(batch["images"]).astype(jnp.float32)
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()
    return entropy, {"accuracy": jnp.mean(logits.argmax(-1) == batch["labels"])}


def example_batch(batch_size: int, image_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of a batch for `loss`."""
    images = jax.ShapeDtypeStruct((batch_size, image_size, image_size, 3), jnp.float32)
    return {"images": images, "labels": jax.ShapeDtypeStruct((batch_size,), jnp.int32)}


@dataclasses.dataclass(frozen=True)
class SyntheticImages:
    """Synthetic images: each class is a coarse pattern, and each example shifts the pattern and adds noise.

    They test whether a model learns, not how accurate it is on photographs. Example `i` is deterministic; sources with
    different values of `first` share the patterns but no example. If `labelled` is False, examples have no labels.

    Example:
      >>> images = SyntheticImages(image_size=32, num_classes=10, num_examples=1000)
      >>> images[0]["images"].shape, images[7]["labels"]
      ((32, 32, 3), array(7, dtype=int32))
    """

    image_size: int
    num_classes: int
    num_examples: int
    first: int = 0
    noise: float = 1.0
    labelled: bool = True

    def __len__(self) -> int:
        return self.num_examples

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < self.num_examples:
            raise IndexError(index)
        label = index % self.num_classes
        coarse = np.random.default_rng(label).normal(size=(4, 4, 3))
        pattern = np.kron(coarse, np.ones((self.image_size // 4, self.image_size // 4, 1)))
        rng = np.random.default_rng((self.first, index))
        shift = tuple(rng.integers(0, self.image_size, 2))
        image = np.roll(pattern, shift, axis=(0, 1)) + self.noise * rng.normal(size=pattern.shape)
        example = {"images": image.astype(np.float32)}
        return example | {"labels": np.array(label, np.int32)} if self.labelled else example
