"""Names of rematerialization policies. Imports no JAX, so that the command line can list them quickly."""

from spanax.errors import SpanaxError, nearest

POLICIES = ("none", "dots", "full", "offload")
"""`none` forgets nothing; `dots` keeps the results of matmuls without batch dims and of convolutions; `full` keeps
what enters a layer and nothing else; `offload` is `dots`, kept in the host's memory."""

AS_WRITTEN = "as written"
"""What a program is called whose model decides itself."""


def known_policy(policy: str | None) -> str | None:
    """The policy, if there is one of that name; None leaves it to the model.

    Raises:
      SpanaxError: there is none.

    Example:
      >>> known_policy("dots"), known_policy(None)
      ('dots', None)
    """
    if policy is not None and policy not in POLICIES:
        raise SpanaxError(f"unknown remat policy '{policy}'.", fix=nearest(str(policy), POLICIES))
    return policy


DTYPES = ("float32", "bfloat16", "float16")


def known_dtype(dtype: str | None) -> str | None:
    """Returns the compute dtype of a request; None leaves it open.

    Raises:
      SpanaxError: it is none of DTYPES.

    Example:
      >>> known_dtype("bfloat16")
      'bfloat16'
    """
    if dtype is not None and dtype not in DTYPES:
        raise SpanaxError(f"unknown dtype '{dtype}'.", fix=nearest(dtype, DTYPES))
    return dtype


def known_chunks(asked: int | str) -> int:
    """In how many chunks logits are asked for; 0 where that is left open.

    Raises:
      SpanaxError: it is neither `auto` nor a whole number from 1.

    Example:
      >>> known_chunks("auto"), known_chunks("8"), known_chunks(1)
      (0, 8, 1)
    """
    text = str(asked)
    if text != "auto" and not (text.isdecimal() and 1 <= int(text) <= MAX_CHUNKS):
        raise SpanaxError(f"loss chunks are '{text[:20]}'; it takes auto, or a number from 1.", fix="auto")
    return 0 if text == "auto" else int(text)


MAX_CHUNKS = 1 << 16

GATHERED, RING = "gathered", "ring"
"""How queries meet the keys of other devices where a sequence is split: all keys come to each, or go around."""

SPLASH, CUDNN = "splash", "cudnn"
"""Keys gathered, and attention by a kernel of the platform: of TPUs, of NVIDIA's GPUs."""

KERNELS = (SPLASH, CUDNN)

CONTEXTS = (GATHERED, RING, *KERNELS)


def known_context(form: str) -> str:
    """The form of context parallelism, or the attention kernel, if there is one of that name.

    Raises:
      SpanaxError: there is none.

    Example:
      >>> known_context("ring")
      'ring'
    """
    if form not in CONTEXTS:
        raise SpanaxError(f"unknown context form '{form}'.", fix=nearest(str(form), CONTEXTS))
    return form


ATTENTIONS = ("plain", "auto", "flash")
"""`plain` is as the model wrote it; `flash` by the platform's kernel; `auto` is `flash` where there is one for it."""


def known_attention(asked: str | None) -> str:
    """How attention is to be computed, if there is such a way; None is `plain`.

    Raises:
      SpanaxError: there is none.

    Example:
      >>> known_attention(None)
      'plain'
    """
    if asked is not None and asked not in ATTENTIONS:
        raise SpanaxError(f"unknown attention '{asked}'.", fix=nearest(str(asked), ATTENTIONS))
    return asked or "plain"


EXACT = "exact"
MEAN = "mean"
ACCUMULATIONS = (EXACT, MEAN)
"""How microbatches are combined: to the results of the batch, or to the mean of theirs."""


def known_accumulation(name: str) -> str:
    """The name of a form of gradient accumulation, if there is one.

    Raises:
      SpanaxError: it is unknown.
    """
    if name not in ACCUMULATIONS:
        raise SpanaxError(f"unknown accumulation '{name}'.", fix=nearest(name, ACCUMULATIONS))
    return name
