"""Names of rematerialization policies. Imports no JAX, so that the command line can list them quickly."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spanax.errors import FormatError, UnknownNameError, VariantError, check_type, nearest
from spanax.units import whole_number

POLICIES = ("none", "dots", "full")
"""`none` saves everything; `dots` saves the results of matmuls without batch dims and of convolutions; `full` saves
only the inputs of a layer."""

ON_HOST = "@host"
"""What follows the name of a value that a policy saves in host memory."""

ROWS = " rows"
"""What follows the name of the sums of fused attention: libtpu 0.0.52 cannot compile their copies to the host."""

INPUT = "input"
"""The name, with a number, of what a layer takes from the one before it: on the device, unless a policy lists it."""

AS_WRITTEN = "as written"
"""Label of a program whose model chooses its own rematerialization."""

NAMED = "named"
"""The policy `none` where every value that a layer may save is an operation with a name; its search traces it."""


def saved_values(policy: str | None) -> dict[str, bool]:
    """Returns the names of the values that a policy lists, and whether it saves them in host memory.

    `mul.3` is the result of the third `mul` of the layers, and `mul.3-5` are three values.

    Raises:
      SpanaxError: a name has no number, or a range is empty.

    Example:
      >>> saved_values("dot_general.1-2+mul.7@host"), saved_values("dots")
      ({'dot_general.1': False, 'dot_general.2': False, 'mul.7': True}, {})
    """
    if policy is None or "." not in policy:
        return {}
    places = dict[str, bool]()
    for term in policy.split("+"):
        operation, _, numbers = term.removesuffix(ON_HOST).rpartition(".")
        first, dash, last = numbers.partition("-")
        start = whole_number(first)
        end = whole_number(last) if dash else start
        if not operation or not start or not end or end < start:
            what = f"remat '{policy[:40]}' lists '{term[:40]}', which names no values."
            raise FormatError(what, fix="dot_general.1-3+mul.7@host, the results of these operations of a layer")
        places |= {f"{operation}.{number}": term.endswith(ON_HOST) for number in range(start, end + 1)}
    return places


def saving(names: Iterable[str], on_host: Iterable[str] = ()) -> str:
    """Returns the shortest policy that saves the values of these names, some in host memory; `full` for none.

    Example:
      >>> saving(["mul.7", "dot_general.2", "dot_general.1", "dot_general.3"]), saving(["mul.7"], ["input.1"])
      ('dot_general.1-3+mul.7', 'mul.7+input.1@host')
    """
    terms = [*_terms(names), *(term + ON_HOST for term in _terms(on_host))]
    return "+".join(terms) or "full"


def _terms(names: Iterable[str]) -> list[str]:
    runs = list[tuple[str, int, int]]()
    for operation, number in sorted((name.rpartition(".")[0], int(name.rpartition(".")[2])) for name in names):
        if runs and runs[-1][0] == operation and runs[-1][2] == number - 1:
            runs[-1] = operation, runs[-1][1], number
        else:
            runs.append((operation, number, number))
    return [f"{name}.{first}" if first == last else f"{name}.{first}-{last}" for name, first, last in runs]


@dataclass(frozen=True)
class PartialPolicy:
    """A policy for the first layers, and another for all others.

    Example:
      >>> str(PartialPolicy("dots", 8)), str(PartialPolicy("full", 8, "dots"))
      ('dots:8', 'full:8,dots')
    """

    first: str
    num_layers: int
    others: str = "none"

    def __str__(self) -> str:
        others = "" if self.others == "none" else f",{self.others}"
        return f"{self.first}:{self.num_layers}{others}"


def partial_policy(policy: str | None) -> PartialPolicy | None:
    """Returns a policy that is for the first layers only; None for a policy of all layers.

    Raises:
      SpanaxError: a name is unknown, or the number of layers is invalid.

    Example:
      >>> partial_policy("full:8"), partial_policy("full")
      (PartialPolicy(first='full', num_layers=8, others='none'), None)
    """
    if policy is None or not {":", ","}.intersection(policy):
        return None
    first, _, count = policy.partition(",")[0].partition(":")
    _, comma, others = policy.partition(",")
    for name in (first, *[others] * bool(comma)):
        _known_name(name)
    num_layers = whole_number(count)
    if not num_layers or count.startswith("0"):
        what = f"remat '{policy[:40]}' has no number of layers, at least 1, after '{first}:'."
        raise FormatError(what, fix=f"'{first}' for all layers, or '{first}:1' for the first")
    result = PartialPolicy(first, num_layers, others or "none")
    shortest = result.first if result.first == result.others else str(result)
    if policy != shortest:
        raise VariantError(f"remat '{policy}' is the same as '{shortest}'.", fix=f"'{shortest}'")
    return result


def known_policy(policy: str | None) -> str | None:
    """Returns the policy if it exists; None leaves the choice to the model.

    `dots:8` is for the first 8 layers, all others under `none`; `full:8,dots` has the others under `dots`. In place of
    each, `dot_general.1-3+mul.7@host` lists the values that a layer saves, `mul.7` in host memory.

    Raises:
      SpanaxError: the policy is unknown, or its number of layers is invalid.

    Example:
      >>> known_policy("dots"), known_policy("full:8"), known_policy(None)
      ('dots', 'full:8', None)
    """
    check_type("remat", policy, str, 'remat="full"')
    return policy if policy is None or partial_policy(policy) else _known_name(policy)


def _known_name(policy: str) -> str:
    """Returns the name of a policy of all layers if it exists; the error also lists the form of partial policies."""
    if not saved_values(policy) and policy not in POLICIES:
        others = "'full:8,dots', full in the first 8 layers; or 'dot_general.1-3@host', values in host memory"
        raise UnknownNameError(f"unknown remat policy '{policy}'.", fix=f"{nearest(policy, POLICIES)}; or {others}")
    return policy


DTYPES = ("float32", "bfloat16", "float16")


def known_dtype(dtype: str | None) -> str | None:
    """Returns the requested compute dtype; None leaves it unspecified.

    Raises:
      SpanaxError: the dtype is not in `DTYPES`.

    Example:
      >>> known_dtype("bfloat16")
      'bfloat16'
    """
    if dtype in QUANTIZATIONS:
        what = f"{dtype} is no compute dtype: the operands of matmuls are quantized, other operations are not."
        raise UnknownNameError(what, fix=f"--dtype bfloat16 --quantize {dtype}")
    return dtype if dtype is None else _known("dtype", dtype, DTYPES)


QUANTIZATIONS = ("int8", "fp8", "nvfp4")
"""Recipes by which matmuls of weights are quantized in training."""

STORAGE = "nf4"
"""What only stores: a dtype of frozen weights."""


def known_quantization(name: str | None) -> str | None:
    """Returns the requested recipe of quantized matmuls; None for none.

    Raises:
      SpanaxError: there is none of this name.

    Example:
      >>> known_quantization("int8")
      'int8'
    """
    check_type("quantize", name, str, 'quantize="int8"')
    if name == STORAGE:
        what = "nf4 stores frozen weights, and all weights are trained: add --lora rank=16."
        raise VariantError(what, fix="--quantize int8, or adapters with --lora rank=16")
    return name if name is None else _known("quantization", name, QUANTIZATIONS)


def known_chunks(requested: int | str) -> int:
    """Returns the requested number of logit chunks; 0 for `auto`.

    Raises:
      SpanaxError: the request is neither `auto` nor an integer from 1 to `MAX_CHUNKS`.

    Example:
      >>> known_chunks("auto"), known_chunks("8"), known_chunks(1)
      (0, 8, 1)
    """
    text = str(requested)
    number = 0 if text == "auto" else whole_number(text)
    if text != "auto" and not (number and number <= MAX_CHUNKS):
        what = f"loss chunks are '{text[:20]}'; expected auto, or an integer from 1 to {MAX_CHUNKS}."
        raise FormatError(what, fix="auto")
    return number or 0


MAX_CHUNKS = 1 << 16

GATHERED = "gathered"
RING = "ring"
"""Kinds of context parallelism on a sharded sequence: keys are all-gathered, or rotated around a ring of devices."""

ULYSSES = "ulysses"
"""All attention is fused, and sharded along heads or examples, as under a kernel that needs whole sequences."""

SPLASH = "splash"
CUDNN = "cudnn"
BLOCKWISE = "blockwise"
"""Keys are all-gathered and attention is fused: by the kernel of TPUs, by that of NVIDIA GPUs, block by block."""

KERNELS = (SPLASH, CUDNN, BLOCKWISE)

CONTEXTS = (GATHERED, RING, ULYSSES, *KERNELS)


def known_context(context: str) -> str:
    """Returns the kind of context parallelism, or the attention kernel, if it exists.

    Raises:
      SpanaxError: it is unknown.

    Example:
      >>> known_context("ring")
      'ring'
    """
    return _known("context form", context, CONTEXTS)


OPTIMIZER_STATE = "optimizer"

OFFLOADS = (OPTIMIZER_STATE,)
"""State that may be stored in host memory: `optimizer`, the arrays of the optimizer. Activations are a remat policy."""


def known_offload(offload: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns the kinds of state to store in host memory, from a sequence or a list separated by commas.

    `none` offloads nothing, even where nothing fits otherwise.

    Raises:
      SpanaxError: a kind is unknown.

    Example:
      >>> known_offload("optimizer"), known_offload(("optimizer", "optimizer")), known_offload(None)
      (('optimizer',), ('optimizer',), ())
    """
    names = offload.split(",") if isinstance(offload, str) else offload or ()
    names = () if offload == "none" else names
    if "activations" in names:
        what = "activations are offloaded by a remat policy, which lists them."
        raise VariantError(what, fix="--remat dot_general.1-3@host")
    return tuple(dict.fromkeys(_known("kind of offloaded state", name.strip(), OFFLOADS) for name in names))


ATTENTIONS = ("plain", "auto", "flash")
"""`plain` runs the model's code; `flash` the platform's kernel, or blocks of keys; `auto` is `flash` if that is any."""


def known_attention(name: str | None) -> str:
    """Returns the attention implementation if it exists; None is `plain`.

    Raises:
      SpanaxError: the implementation is unknown.

    Example:
      >>> known_attention(None)
      'plain'
    """
    return _known("attention", name or "plain", ATTENTIONS)


EXACT = "exact"
MEAN = "mean"
ACCUMULATIONS = (EXACT, MEAN)
"""How microbatches are combined: into the results of the full batch, or into the mean of their own results."""


def known_accumulation(name: str) -> str:
    """Returns the kind of gradient accumulation if it exists.

    Raises:
      SpanaxError: it is unknown.
    """
    return _known("accumulation", name, ACCUMULATIONS)


def _known(kind: str, name: str, names: Sequence[str]) -> str:
    if name not in names:
        raise UnknownNameError(f"unknown {kind} '{name}'.", fix=nearest(str(name), names))
    return name
