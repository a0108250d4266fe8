"""Zigzag assignment of sequence chunks to the devices of a ring, which balances causal attention.

Under a causal mask the last queries attend to all keys, the first only to themselves. Of 2n chunks, device i gets
chunks i and 2n - 1 - i, so that every device does the same work at every step.

Source: Brandon et al., Striped Attention, arXiv 2311.09431, names the imbalance; Zhu, ring-flash-attention (GitHub),
"zigzag", balances it like this, as do Megatron-LM's context parallelism and Llama 3, arXiv 2407.21783, section 3.3.2.
"""

import functools
from dataclasses import dataclass

import numpy as np

from spanax.trace.rewrites.attention.masks import masked_blocks
from spanax.trace.rewrites.attention.scores import Form


@dataclass(frozen=True, eq=False)
class Shares:
    """The assignment of sequence parts to the devices of a ring.

    Attributes:
      masked: whether a pair is fully masked, (parts of queries, parts of keys).
      owned: the parts of each device, the same number for all.
    """

    masked: np.ndarray
    owned: tuple[tuple[int, ...], ...]

    @property
    def num_devices(self) -> int:
        """Number of devices of the ring."""
        return len(self.owned)

    @property
    def is_moved(self) -> bool:
        """Whether the assignment differs from contiguous parts per device."""
        num_parts = len(self.owned[0])
        return any(
            parts != tuple(range(device * num_parts, device * num_parts + num_parts))
            for device, parts in enumerate(self.owned)
        )

    @property
    def work(self) -> np.ndarray:
        """Pairs of parts computed, (steps, devices); at step s device i has the keys of device i - s."""
        devices = np.arange(self.num_devices)
        order = np.ravel(self.owned)
        shape = 2 * (self.num_devices, len(self.owned[0]))
        pairs = (~self.masked)[np.ix_(order, order)].reshape(shape).sum((1, 3))
        return pairs[devices, (devices - devices[:, None]) % self.num_devices]

    @functools.cached_property
    def counts(self) -> tuple[int, int]:
        """Pairs computed by the slowest device, summed over steps, and the same without a mask."""
        return int(self.work.max(1).sum()), self.num_devices * len(self.owned[0]) ** 2

    @property
    def share(self) -> float:
        """Ratio of the two `counts`."""
        num, total = self.counts
        return num / total


@functools.lru_cache(maxsize=256)
def shares(form: Form, num_devices: int) -> Shares:
    """Returns the parts of each device: contiguous, or zigzag where that balances the work better.

    Example:
      >>> from spanax.trace.rewrites.attention.scores import Step
      >>> score = Step("score", None, (), (), (0, 1, 2), (2, 8, 8), np.dtype("float32"))
      >>> shares(Form(1, 0, (2, 8, 8), (score,), (), (None, None), np.dtype("float32")), 4).owned
      ((0,), (1,), (2,), (3,))
    """
    n = num_devices
    unsharded = Shares(np.zeros((n, n), bool), tuple((device,) for device in range(n)))
    t = form.sizes[form.queries]
    s = form.sizes[form.keys]
    if t % (2 * n) or s % (2 * n):
        return unsharded if t % n or s % n else Shares(masked_blocks(form, n), unsharded.owned)
    masked = masked_blocks(form, 2 * n)
    if not masked.any():
        return unsharded
    plain = Shares(masked, tuple((2 * device, 2 * device + 1) for device in range(n)))
    zigzag = Shares(masked, tuple((device, 2 * n - 1 - device) for device in range(n)))
    return zigzag if zigzag.share < plain.share else plain
