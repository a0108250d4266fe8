"""Matching of the tensors of a file to the arrays of a model, with errors for missing and unknown tensors."""

import difflib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spanax.errors import WeightsError
from spanax.interop.dims import tensor_shape
from spanax.interop.families import Family, Weight

SHOWN = 3
"""The maximum number of names in an error message."""


@dataclass(frozen=True)
class Array:
    """An array of a Spanax model, unstacked if it belongs to a layer, and the names of its Hugging Face tensors."""

    path: str
    shape: tuple[int, ...]
    weight: Weight
    names: tuple[str, ...]

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of each Hugging Face tensor of the array."""
        return tensor_shape(self.weight.dims, self.shape)


def arrays_of(family: Family, params: Mapping[str, tuple[int, ...]]) -> list[Array]:
    """Returns the arrays of a model in the order of its family, with layers unstacked.

    Args:
      family: the family of the model.
      params: path -> shape of the parameters, with stacked blocks.

    Raises:
      DataError: the model has a parameter that is not in the family.

    Example:
      >>> from spanax.interop.families import family
      >>> arrays = arrays_of(family("gpt2"), {"embed": (64, 8), "blocks.attention_norm.scale": (2, 8)})
      >>> [(array.path, array.shape, array.names[0]) for array in arrays][1:]
      [('blocks.0.attention_norm.scale', (8,), 'transformer.h.0.ln_1.weight'), \
('blocks.1.attention_norm.scale', (8,), 'transformer.h.1.ln_1.weight')]
    """
    remaining, arrays = dict(params), []
    for weight in family.weights:
        shape = remaining.pop(weight.path.replace(".*", ""), None)
        if shape is not None and ".*" not in weight.path:
            arrays.append(Array(weight.path, shape, weight, weight.names))
        elif shape is not None:
            for number in map(str, range(shape[0])):
                names = tuple(name.replace("*", number) for name in weight.names)
                arrays.append(Array(weight.path.replace("*", number), shape[1:], weight, names))
    if remaining:
        what = f"the model has {len(remaining)} parameters without a Hugging Face tensor."
        raise WeightsError(what, where=", ".join(sorted(remaining)[:SHOWN]))
    return arrays


@dataclass(frozen=True)
class TensorMatch:
    """The tensors of a file by name, with the prefix of the family.

    Attributes:
      tensors: the tensors of the arrays by name.
      left_out: name pattern of the family -> number of tensors that are not needed.
      twice: names of duplicate tensors, which must equal the original.
      is_bare: whether names in the file are those of a base model, without the prefix.
    """

    tensors: Mapping[str, Any]
    left_out: Mapping[str, int]
    twice: tuple[str, ...]
    is_bare: bool


def match_tensors(family: Family, arrays: list[Array], tensors: Mapping[str, Any], where: str) -> TensorMatch:
    """Matches every tensor of a file to an array of the model or to a pattern of tensors that are not needed.

    Raises:
      DataError: a tensor is missing or unknown, or has another shape or dtype.
    """
    named = {name: array for array in arrays for name in array.names}
    is_bare = not any(name.startswith(family.prefix) for name in tensors)
    prefixed = {
        family.prefix + name if is_bare and name not in named else name: tensor for name, tensor in tensors.items()
    }
    copy, original = family.tied
    twice = (copy,) if copy in tensors and copy not in named and original in prefixed else ()
    patterns = {name: _pattern(name) for name in prefixed if name not in named}
    left_out = Counter(pattern for pattern in patterns.values() if pattern in family.left_out)
    unknown = [name for name, pattern in patterns.items() if pattern not in family.left_out]
    _check(named, prefixed, [name for name in unknown if name.removeprefix(family.prefix) not in twice], where)
    return TensorMatch({name: prefixed[name] for name in named}, dict(left_out), twice, is_bare)


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _check(named: Mapping[str, Array], prefixed: Mapping[str, Any], unknown: list[str], where: str) -> None:
    missing = [name for name in named if name not in prefixed]
    if missing or unknown:
        counts = [f"{len(names)} {word}" for names, word in ((missing, "missing"), (unknown, "unknown")) if names]
        listed = [f"{word}: {_listed(names)}" for names, word in ((missing, "missing"), (unknown, "unknown")) if names]
        raise WeightsError(
            f"'{where}' does not match its config.json: {' and '.join(counts)} of {len(named)} tensors.",
            where="; ".join(listed),
            fix=_likely(missing, unknown),
        )
    mismatched = [
        f"{name} is {prefixed[name].shape}, not {array.tensor_shape}"
        for name, array in named.items()
        if tuple(prefixed[name].shape) != array.tensor_shape
    ]
    if mismatched:
        raise WeightsError(
            f"'{where}' does not match its config.json: {len(mismatched)} tensors have another shape.",
            where="; ".join(mismatched[:SHOWN]),
            fix="use the config.json of these weights",
        )
    integers = [name for name in named if "float" not in str(prefixed[name].dtype)]
    if integers:
        raise WeightsError(
            f"'{where}' has weights that are not floating-point: {len(integers)} of {len(named)} tensors.",
            where="; ".join(f"{name} is {prefixed[name].dtype}" for name in integers[:SHOWN]),
            fix="use the weights before quantization",
        )


def _listed(names: list[str]) -> str:
    return ", ".join(name[:100] for name in names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


def _likely(missing: list[str], unknown: list[str]) -> str:
    """Returns the fix for the most likely mistake: the closest missing name to an unknown one."""
    for name in unknown[:1]:
        for close in difflib.get_close_matches(name[:200], missing, n=1):
            return f"'{name[:100]}' is closest to '{close}'"
    return "use the config.json of these weights, or another --as"
