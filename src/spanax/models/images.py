"""Image classification: the loss, the shapes of batches, and two data sources, synthetic images and digits."""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from spanax.errors import NotInstalledError, RangeError


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
        return _example(image, label, self.labelled)


@dataclasses.dataclass(frozen=True)
class Digits:
    """The 1,797 handwritten digits of scikit-learn, with pixels in [-1, 1]; every fifth example is held out.

    Images are gray, repeated in three channels. Each of the 8 x 8 pixels is repeated to fill `image_size`.

    Raises:
      SpanaxError: scikit-learn is not installed, or `image_size` is not a multiple of 8.

    Example:
      >>> digits, held_out = Digits(), Digits(held_out=True)
      >>> len(digits), len(held_out), held_out[1]["images"].shape
      (1437, 360, (8, 8, 3))
    """

    image_size: int = 8
    held_out: bool = False
    labelled: bool = True

    def __post_init__(self) -> None:
        if self.image_size < 8 or self.image_size % 8:
            raise RangeError(f"image_size is {self.image_size}; expected a multiple of 8.")
        if not importlib.util.find_spec("sklearn"):
            what = "the digits are part of scikit-learn, which is not installed."
            raise NotInstalledError(what, fix='pip install "spanax[examples]"')

    def __len__(self) -> int:
        return len(self._rows[1])

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        pixels, labels = self._rows
        image = np.kron(pixels[index] / 8 - 1, np.ones((self.image_size // 8, self.image_size // 8)))
        return _example(np.repeat(image[..., None], 3, axis=-1), labels[index], self.labelled)

    @functools.cached_property
    def _rows(self) -> tuple[np.ndarray, np.ndarray]:
        from sklearn.datasets import load_digits

        digits = load_digits()
        is_held_out = np.arange(len(digits.target)) % 5 == 0
        mask = is_held_out if self.held_out else ~is_held_out
        return digits.images[mask], digits.target[mask]


def _example(image: np.ndarray, label: int, labelled: bool) -> dict[str, np.ndarray]:
    example = {"images": image.astype(np.float32)}
    return example | {"labels": np.array(label, np.int32)} if labelled else example
