"""The attention kernels of each platform, and which attentions each supports.

A kernel takes a scale and an optional causal mask. Whether a form consists of exactly these is decided from its steps:
it must be linear in q.k and, on successively smaller blocks of positions, either fully masked or equal to the scale.
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax

from spanax.trace.jaxpr.remat_policies import CUDNN, SPLASH
from spanax.trace.rewrites.attention.scores import MASKED, Form, bounds

LANES = 128
"""Splash requires multiples of this many queries and keys. Source: checked by its kernels."""

WIDEST_HEAD = {SPLASH: 256, CUDNN: 128}
"""Most channels per head; cuDNN supports 256 on Hopper and later. Source: JAX's check."""

DTYPES = {SPLASH: ("float32", "bfloat16"), CUDNN: ("float16", "bfloat16")}

PASSING = frozenset(
    "convert_element_type stop_gradient copy transpose reshape squeeze expand_dims broadcast_in_dim neg".split()
)
"""Steps that are linear in operands that depend on q.k."""

SUPPORTED_PRECISIONS = frozenset(
    {None, lax.Precision.DEFAULT, lax.DotAlgorithmPreset.BF16_BF16_F32, lax.DotAlgorithmPreset.F16_F16_F32}
)
"""Precisions that the kernels implement: operands in their own dtype, accumulation in float32."""

MOST_BLOCKS = 1 << 22
"""Most blocks to evaluate; a mask that needs more counts as unsupported."""


@dataclass(frozen=True)
class Kernel:
    """One call of a kernel: its name, the factor of q.k, and whether later keys are masked."""

    name: str
    scale: float
    is_causal: bool


@dataclass(frozen=True)
class Unfit:
    """Why a kernel does not support an attention."""

    why: str


def kernel_of(name: str, form: Form, q: Any, k: Any, v: Any) -> Kernel | Unfit:
    """Returns the kernel call that computes an attention, or why it is unsupported.

    Args:
      name: name of the kernel.
      form: the attention.
      q, k, v: shapes and dtypes of the operands, in the layout of the form.

    Example:
      >>> import jax
      >>> from spanax.trace.rewrites.attention.scores import Step
      >>> score = Step("score", None, (), (), (0, 1, 2), (2, 256, 256), np.dtype("float32"))
      >>> form = Form(1, 0, (2, 256, 256), (score,), (), (None, None), np.dtype("float32"))
      >>> q = jax.ShapeDtypeStruct((2, 256, 64), "float32")
      >>> kernel_of("splash", form, q, q, q)
      Kernel(name='splash', scale=1.0, is_causal=False)
      >>> kernel_of("cudnn", form, q, q, q).why
      'float32, where cudnn supports float16 or bfloat16'
    """
    widths = (q.shape[-1], v.shape[-1])
    lengths = (q.shape[-2], k.shape[-2])
    dtypes = {str(operand.dtype) for operand in (q, k, v)}
    if unsupported := sorted(dtypes - set(DTYPES[name])) or (sorted(dtypes) if len(dtypes) > 1 else []):
        return Unfit(f"{' and '.join(unsupported)}, where {name} supports {' or '.join(DTYPES[name])}")
    if max(widths) > WIDEST_HEAD[name] or any(width % 8 for width in widths) or len({*widths}) > 1:
        supported = f"equal multiples of 8 up to {WIDEST_HEAD[name]}"
        return Unfit(f"heads of {widths[0]} and {widths[1]} channels, where {name} supports {supported}")
    if name == SPLASH and any(length % LANES for length in lengths):
        return Unfit(f"{lengths[0]} queries and {lengths[1]} keys, where {name} supports multiples of {LANES}")
    if not set(_flat(form.precision)) <= SUPPORTED_PRECISIONS:
        return Unfit(f"products of a precision that {name} does not support")
    plain = _plain(form)
    return plain if isinstance(plain, Unfit) else Kernel(name, *plain)


def _flat(precision: Any) -> list[Any]:
    return [
        item for precisions in precision for item in (precisions if isinstance(precisions, tuple) else (precisions,))
    ]


@functools.lru_cache(maxsize=256)
def _plain(form: Form) -> tuple[float, bool] | Unfit:
    """Returns the scale of a form and whether it is causal, or what else it contains."""
    if form.extras:
        return Unfit("a mask or bias that is not computed from positions alone")
    if nonlinear := _first_nonlinear(form):
        return Unfit(f"'{nonlinear}' between q.k and the softmax")
    origin = {label: (np.zeros(1), np.zeros(1)) for label in (form.queries, form.keys)}
    low, _ = bounds(form, origin, (1.0, 1.0), is_exact=True)
    scale = float(np.max(low))
    for is_causal in (True, False):
        if _has_mask(form, scale, is_causal):
            return scale, is_causal
    return Unfit("a mask or bias that is neither causal nor of all keys")


def _first_nonlinear(form: Form) -> str | None:
    """Returns the name of the first step that is not linear in q.k, if any."""
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


def _has_mask(form: Form, scale: float, is_causal: bool) -> bool:
    """Whether exactly the later keys (causal), or none, are masked, and all other logits equal `scale` times q.k."""
    queries = form.sizes[form.queries]
    keys = form.sizes[form.keys]
    if is_causal and queries != keys:
        return False
    blocks = np.asarray([[0], [queries - 1], [0], [keys - 1]])
    num_evaluated = 0
    while blocks.size and num_evaluated < MOST_BLOCKS:
        num_evaluated += blocks.shape[1]
        is_hidden, is_clear = _known(form, scale, blocks.astype(float))
        q_first, q_last, k_first, k_last = blocks
        later, earlier = (k_first > q_last, k_last <= q_first) if is_causal else (k_first < 0, k_first >= 0)
        if ((later & is_clear) | (earlier & is_hidden)).any():
            return False
        undecided = blocks[:, ~((later & is_hidden) | (earlier & is_clear))]
        if ((undecided[0] == undecided[1]) & (undecided[2] == undecided[3])).any():
            return False
        blocks = _quartered(undecided)
    return not blocks.size


def _known(form: Form, scale: float, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns which blocks (first and last query, first and last key) are fully masked, and which are unmasked."""
    intervals = {form.queries: (blocks[0], blocks[1]), form.keys: (blocks[2], blocks[3])}
    _, high = bounds(form, intervals)
    near = 1e-6 * abs(scale)
    is_clear = np.full(blocks.shape[1], True)
    for score in (0.0, 1.0):
        low, upper = bounds(form, intervals, (score, score), is_exact=True)
        is_clear &= (low >= scale * score - near) & (upper <= scale * score + near)
    return np.broadcast_to(high <= MASKED, is_clear.shape), is_clear


def _quartered(blocks: np.ndarray) -> np.ndarray:
    """Returns the quarters of blocks; halves for blocks of one query or key."""
    halves = []
    for first, last in (blocks[:2], blocks[2:]):
        middle = (first + last) // 2
        halves.append(((first, middle), (middle + 1, last)))
    quarters = np.concatenate([np.stack([*q, *k]) for q in halves[0] for k in halves[1]], axis=1)
    return quarters[:, (quarters[0] <= quarters[1]) & (quarters[2] <= quarters[3])]
