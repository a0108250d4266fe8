"""Zigzag assignment of sequence chunks to the devices of a ring, which balances causal attention.

Under a causal mask the last queries attend to all keys, the first only to themselves. Of 2n chunks, device i gets
chunks i and 2n - 1 - i, so that every device does the same work at every step.

Source: Brandon et al., Striped Attention, arXiv 2311.09431, names the imbalance; Zhu, ring-flash-attention (GitHub),
"zigzag", balances it this way, as do Megatron-LM's context parallelism and Llama 3, arXiv 2407.21783, section 3.3.2.
"""

import functools
from dataclasses import dataclass

import numpy as np

from spanax.trace.rewrites.attention.masks import masked_blocks
from spanax.trace.rewrites.attention.scores import Form


@dataclass(frozen=True, eq=False)
class Shares:
    """The parts of a sequence around a ring.

    Attributes:
      masked: which parts of queries meet which parts of keys for nothing.
      owned: the parts of each device, as many for all.
    """

    masked: np.ndarray
    owned: tuple[tuple[int, ...], ...]

    @property
    def num_devices(self) -> int:
        """Devices of the ring."""
        return len(self.owned)

    @property
    def is_moved(self) -> bool:
        """Whether a device's parts are others than those that lie on it."""
        each = len(self.owned[0])
        return any(own != tuple(range(at * each, at * each + each)) for at, own in enumerate(self.owned))

    @property
    def work(self) -> np.ndarray:
        """Pairs of parts that are computed, (steps, devices); at step s device i has the keys of device i - s."""
        n = self.num_devices
        return np.asarray(
            [
                [(~self.masked[np.ix_(self.owned[at], self.owned[(at - step) % n])]).sum() for at in range(n)]
                for step in range(n)
            ]
        )

    @property
    def counts(self) -> tuple[int, int]:
        """Pairs that the slowest devices of all steps compute, and how many there would be without a mask."""
        return int(self.work.max(1).sum()), self.num_devices * len(self.owned[0]) ** 2

    @property
    def share(self) -> float:
        """The first of `counts` of the second."""
        num, of = self.counts
        return num / of


@functools.lru_cache(maxsize=256)
def shares(form: Form, num_devices: int) -> Shares:
    """The parts of every device: contiguous ones, or the first with the last where that evens out the work.

    Example:
      >>> from spanax.trace.rewrites.attention.scores import Step
      >>> score = Step("score", None, (), (), (0, 1, 2), (2, 8, 8), np.dtype("float32"))
      >>> shares(Form(1, 0, (2, 8, 8), (score,), (), (None, None), np.dtype("float32")), 4).owned
      ((0,), (1,), (2,), (3,))
    """
    n = num_devices
    whole = Shares(np.zeros((n, n), bool), tuple((at,) for at in range(n)))
    t, s = form.sizes[form.queries], form.sizes[form.keys]
    if t % (2 * n) or s % (2 * n):
        return whole if t % n or s % n else Shares(masked_blocks(form, n), whole.owned)
    masked = masked_blocks(form, 2 * n)
    if not masked.any():
        return whole
    plain = Shares(masked, tuple((2 * at, 2 * at + 1) for at in range(n)))
    zigzag = Shares(masked, tuple((at, 2 * n - 1 - at) for at in range(n)))
    return zigzag if zigzag.share < plain.share else plain
