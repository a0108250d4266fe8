"""The attention kernels of each platform, and which attentions each supports.

A kernel takes a scale, a soft cap, and a mask of a known pattern and of equal ids. Whether a form consists of exactly
these is decided from its steps (`masks.py`).
"""

from dataclasses import dataclass
from typing import Any

from jax import lax

from spanax.trace.jaxpr.remat_policies import CUDNN, SPLASH
from spanax.trace.rewrites.attention.masks import plain
from spanax.trace.rewrites.attention.patterns import Pattern
from spanax.trace.rewrites.attention.scores import Form

LANES = 128
"""Splash requires multiples of this many queries and keys. Source: checked by its kernels."""

WIDEST_HEAD = {SPLASH: 256, CUDNN: 128}
"""Most channels per head; cuDNN supports 256 on Hopper and later. Source: JAX's check."""

DTYPES = {SPLASH: ("float32", "bfloat16"), CUDNN: ("float16", "bfloat16")}

SUPPORTED_PRECISIONS = frozenset(
    {None, lax.Precision.DEFAULT, lax.DotAlgorithmPreset.BF16_BF16_F32, lax.DotAlgorithmPreset.F16_F16_F32}
)
"""Precisions that the kernels implement: operands in their own dtype, accumulation in float32."""


@dataclass(frozen=True)
class Kernel:
    """One call of a kernel.

    Attributes:
      name: its name.
      scale: the factor of q.k.
      pattern: the keys that a query sees by positions.
      cap: the bound of a soft cap of the logits, if any.
      has_ids: whether a query sees only keys of its own id; both are operands after q, k and v.
      masked: the logit of hidden keys; None if every query sees a key.
      has_sink: whether the softmax has a sink for each query head, the last operand.
    """

    name: str
    scale: float
    pattern: Pattern = Pattern()
    cap: float | None = None
    has_ids: bool = False
    masked: float | None = None
    has_sink: bool = False

    @property
    def is_causal(self) -> bool:
        """Whether exactly later keys are masked by positions."""
        return self.pattern.is_causal

    @property
    def has_blocks(self) -> bool:
        """Whether the kernel computes the mask on parts of the sequence, too: full, causal, for splash any window.

        A query that sees no key has the mean of all values, and a part has not all.
        """
        is_window = self.name == SPLASH and not self.pattern.prefix and not self.pattern.chunk
        return self.masked is None and (self.pattern.is_full or self.is_causal or is_window)

    @property
    def mask(self) -> str:
        """Returns the name of its mask and soft cap."""
        words = {
            str(self.pattern): not self.pattern.is_full,
            "segments": self.has_ids,
            "soft cap": self.cap is not None,
            "sink": self.has_sink,
        }
        return ", ".join(word for word, is_present in words.items() if is_present)


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
      >>> import numpy as np
      >>> from spanax.trace.rewrites.attention.scores import Step
      >>> score = Step("score", None, (), (), (0, 1, 2), (2, 256, 256), np.dtype("float32"))
      >>> form = Form(1, 0, (2, 256, 256), (score,), (), (None, None), np.dtype("float32"))
      >>> q = jax.ShapeDtypeStruct((2, 256, 64), "float32")
      >>> kernel_of("splash", form, q, q, q)
      Kernel(name='splash', scale=1.0, pattern=Pattern(before=None, after=None, prefix=0, chunk=0), ...)
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
    found = plain(form)
    if isinstance(found, str):
        return Unfit(found)
    kernel = Kernel(name, found.scale, found.pattern, found.cap, found.ids is not None, found.masked, found.has_sink)
    lacking = _not_in(kernel)
    return Unfit(f"{lacking}, which {name} does not support") if lacking else kernel


def _not_in(kernel: Kernel) -> str:
    """Returns what a kernel of this name does not support; empty if nothing."""
    if kernel.name == SPLASH:
        return ""
    pattern = kernel.pattern
    is_window = pattern.before is not None and pattern.before >= 0 and pattern == Pattern(pattern.before, 0)
    if not (pattern.is_full or pattern.is_causal or is_window):
        return f"a mask '{pattern}'"
    if kernel.has_ids:
        return "a mask of segments"
    if kernel.has_sink:
        return "an attention sink"
    return "a soft cap" if kernel.cap is not None else ""


def _flat(precision: Any) -> list[Any]:
    return [
        item for precisions in precision for item in (precisions if isinstance(precisions, tuple) else (precisions,))
    ]
