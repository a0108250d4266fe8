"""The attention kernels of each platform, and which attentions each supports.

A kernel takes a scale and an optional causal mask. Whether a form consists of exactly these is decided from its steps:
it must be linear in q.k and, on successively smaller blocks of positions, either fully masked or equal to the scale.
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax

from spanax.trace.rewrites.attention.masks import MASKED, bounds
from spanax.trace.rewrites.attention.scores import Form
from spanax.trace.rewrites.remat_policies import CUDNN, SPLASH

LANES = 128
"""Splash goes through queries and keys in multiples of so many. Source: its kernels check it."""

WIDEST_HEAD = {SPLASH: 256, CUDNN: 128}
"""Channels of a head that are taken; cuDNN takes 256 from Hopper on. Source: JAX's check of it."""

DTYPES = {SPLASH: ("float32", "bfloat16"), CUDNN: ("float16", "bfloat16")}

PASSING = frozenset(
    "convert_element_type stop_gradient copy transpose reshape squeeze expand_dims broadcast_in_dim neg".split()
)
"""Steps that are linear in what they take, if it depends on q.k."""

SUMMED_ALIKE = frozenset(
    {None, lax.Precision.DEFAULT, lax.DotAlgorithmPreset.BF16_BF16_F32, lax.DotAlgorithmPreset.F16_F16_F32}
)
"""Precisions that are those of the kernels: operands as they are, sums in 32 bits."""

MOST_BLOCKS = 1 << 22
"""A mask that takes more blocks to know is taken for one that no kernel has."""


@dataclass(frozen=True)
class Kernel:
    """One kernel as it is called: its name, what q.k is multiplied with, whether later keys are masked."""

    name: str
    scale: float
    is_causal: bool


@dataclass(frozen=True)
class Unfit:
    """Why no kernel takes an attention."""

    why: str


def kernel_of(name: str, form: Form, q: Any, k: Any, v: Any) -> Kernel | Unfit:
    """The kernel as it computes an attention, or why it cannot.

    Args:
      name: of the kernel.
      form: the attention.
      q: its shape and dtype, as the form has it; `k` and `v` likewise.

    Example:
      >>> import jax
      >>> from spanax.trace.rewrites.attention.scores import Step
      >>> score = Step("score", None, (), (), (0, 1, 2), (2, 256, 256), np.dtype("float32"))
      >>> form = Form(1, 0, (2, 256, 256), (score,), (), (None, None), np.dtype("float32"))
      >>> q = jax.ShapeDtypeStruct((2, 256, 64), "float32")
      >>> kernel_of("splash", form, q, q, q)
      Kernel(name='splash', scale=1.0, is_causal=False)
      >>> kernel_of("cudnn", form, q, q, q).why
      'float32, where cudnn takes float16 or bfloat16'
    """
    widths, lengths = (q.shape[-1], v.shape[-1]), (q.shape[-2], k.shape[-2])
    dtypes = {str(one.dtype) for one in (q, k, v)}
    if odd := sorted(dtypes - set(DTYPES[name])) or (sorted(dtypes) if len(dtypes) > 1 else []):
        return Unfit(f"{' and '.join(odd)}, where {name} takes {' or '.join(DTYPES[name])}")
    if max(widths) > WIDEST_HEAD[name] or any(width % 8 for width in widths) or len({*widths}) > 1:
        return Unfit(f"heads of {widths[0]} and {widths[1]} channels, where {name} takes equal multiples of 8 up to "
                     f"{WIDEST_HEAD[name]}")  # fmt: skip
    if name == SPLASH and any(length % LANES for length in lengths):
        return Unfit(f"{lengths[0]} queries and {lengths[1]} keys, where {name} takes multiples of {LANES}")
    if not set(_flat(form.precision)) <= SUMMED_ALIKE:
        return Unfit(f"products of a precision that {name} does not have")
    plain = _plain(form)
    return plain if isinstance(plain, Unfit) else Kernel(name, *plain)


def _flat(precision: Any) -> list[Any]:
    return [one for each in precision for one in (each if isinstance(each, tuple) else (each,))]


@functools.lru_cache(maxsize=256)
def _plain(form: Form) -> tuple[float, bool] | Unfit:
    """The scale of a form, and whether it is causal, if it has nothing else."""
    if form.extras:
        return Unfit("a mask or bias that is not made of positions alone")
    if odd := _bent(form):
        return Unfit(f"'{odd}' between q.k and the softmax")
    first = {label: (np.zeros(1), np.zeros(1)) for label in (form.queries, form.keys)}
    low, _ = bounds(form, first, (1.0, 1.0), is_exact=True)
    scale = float(np.max(low))
    for is_causal in (True, False):
        if _is_masked_so(form, scale, is_causal):
            return scale, is_causal
    return Unfit("a mask or bias that is neither causal nor of all keys")


def _bent(form: Form) -> str | None:
    """The first step that is not linear in q.k, if there is one."""
    depends: list[bool] = []
    for step in form.steps:
        of_score = [depends[arg] for arg in step.args]
        is_linear = {
            "mul": sum(of_score) <= 1,
            "div": of_score[1:] == [False],
            "add": True,
            "sub": True,
            "select_n": not any(of_score[:1]),
        }.get(step.name, step.name in PASSING)
        if any(of_score) and not is_linear:
            return step.name
        depends.append(step.name == "score" or any(of_score))
    return None


def _is_masked_so(form: Form, scale: float, is_causal: bool) -> bool:
    """Whether every score is masked where it is to be, and exactly `scale` times q.k everywhere else."""
    queries, keys = form.sizes[form.queries], form.sizes[form.keys]
    if is_causal and queries != keys:
        return False
    blocks, num_seen = np.asarray([[0], [queries - 1], [0], [keys - 1]]), 0
    while blocks.size and num_seen < MOST_BLOCKS:
        num_seen += blocks.shape[1]
        is_hidden, is_clear = _known(form, scale, blocks.astype(float))
        q_first, q_last, k_first, k_last = blocks
        behind, before = (k_first > q_last, k_last <= q_first) if is_causal else (k_first < 0, k_first >= 0)
        if ((behind & is_clear) | (before & is_hidden)).any():
            return False
        open_ = blocks[:, ~((behind & is_hidden) | (before & is_clear))]
        if ((open_[0] == open_[1]) & (open_[2] == open_[3])).any():
            return False
        blocks = _quartered(open_)
    return not blocks.size


def _known(form: Form, scale: float, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of blocks (first and last query, first and last key) which are masked altogether, and which not at all."""
    at = {form.queries: (blocks[0], blocks[1]), form.keys: (blocks[2], blocks[3])}
    _, high = bounds(form, at)
    near = 1e-6 * abs(scale)
    is_clear = np.full(blocks.shape[1], True)
    for score in (0.0, 1.0):
        low_here, high_here = bounds(form, at, (score, score), is_exact=True)
        is_clear &= (low_here >= scale * score - near) & (high_here <= scale * score + near)
    return np.broadcast_to(high <= MASKED, is_clear.shape), is_clear


def _quartered(blocks: np.ndarray) -> np.ndarray:
    """Blocks as their quarters; of one query or key as halves."""
    halves = []
    for first, last in (blocks[:2], blocks[2:]):
        middle = (first + last) // 2
        halves.append(((first, middle), (middle + 1, last)))
    quarters = np.concatenate([np.stack([*q, *k]) for q in halves[0] for k in halves[1]], axis=1)
    return quarters[:, (quarters[0] <= quarters[1]) & (quarters[2] <= quarters[3])]
