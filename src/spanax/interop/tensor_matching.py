"""Matched: which tensors of a file make up which arrays of a model, and what of either is left over."""

import difflib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spanax.errors import DataError
from spanax.interop.dims import their_shape
from spanax.interop.families import Family, Weight

SHOWN = 3
"""How many names an error tells."""


@dataclass(frozen=True)
class Array:
    """An array of ours, of one layer where it is a layer's: its path, its shape, and the names that make it up."""

    path: str
    shape: tuple[int, ...]
    weight: Weight
    names: tuple[str, ...]

    @property
    def their_shape(self) -> tuple[int, ...]:
        """The shape of each of its tensors."""
        return their_shape(self.weight.dims, self.shape)


def arrays_of(family: Family, params: Mapping[str, tuple[int, ...]]) -> list[Array]:
    """The arrays of a model, layers one by one, in the order of its family.

    Args:
      family: the tables.
      params: shape by path of the model's parameters, blocks stacked.

    Raises:
      DataError: the model has a parameter that the family does not know.

    Example:
      >>> from spanax.interop.families import family
      >>> found = arrays_of(family("gpt2"), {"embed": (64, 8), "blocks.attention_norm.scale": (2, 8)})
      >>> [(array.path, array.shape, array.names[0]) for array in found][1:]
      [('blocks.0.attention_norm.scale', (8,), 'transformer.h.0.ln_1.weight'), \
('blocks.1.attention_norm.scale', (8,), 'transformer.h.1.ln_1.weight')]
    """
    left, found = dict(params), []
    for weight in family.weights:
        shape = left.pop(weight.path.replace(".*", ""), None)
        if shape is not None and ".*" not in weight.path:
            found.append(Array(weight.path, shape, weight, weight.names))
        elif shape is not None:
            for number in map(str, range(shape[0])):
                names = tuple(name.replace("*", number) for name in weight.names)
                found.append(Array(weight.path.replace("*", number), shape[1:], weight, names))
    if left:
        what = f"the model has {len(left)} parameters without a name at Hugging Face."
        raise DataError(what, where=", ".join(sorted(left)[:SHOWN]))
    return found


@dataclass(frozen=True)
class TensorMatch:
    """A file's tensors by the names of a whole model.

    Attributes:
      tensors: what the arrays are made of.
      left_out: how many tensors a name of the family's stands for that are not needed.
      twice: names of tensors that repeat another; they must be equal to it.
      is_bare: whether the file has the names of a bare model, without the prefix.
    """

    tensors: Mapping[str, Any]
    left_out: Mapping[str, int]
    twice: tuple[str, ...]
    is_bare: bool


def match_tensors(family: Family, arrays: list[Array], found: Mapping[str, Any], where: str) -> TensorMatch:
    """The tensors of a file, every one of them accounted for.

    Raises:
      DataError: some are missing, too many, or of another shape or dtype.
    """
    wanted = {name: array for array in arrays for name in array.names}
    is_bare = not any(name.startswith(family.prefix) for name in found)
    whole = {family.prefix + name if is_bare and name not in wanted else name: one for name, one in found.items()}
    copy, original = family.tied
    twice = (copy,) if copy in found and copy not in wanted and original in whole else ()
    patterns = {name: _pattern(name) for name in whole if name not in wanted}
    left_out = Counter(pattern for pattern in patterns.values() if pattern in family.left_out)
    unknown = [name for name, pattern in patterns.items() if pattern not in family.left_out]
    _check(wanted, whole, [name for name in unknown if name.removeprefix(family.prefix) not in twice], where)
    return TensorMatch({name: whole[name] for name in wanted}, dict(left_out), twice, is_bare)


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _check(wanted: Mapping[str, Array], whole: Mapping[str, Any], unknown: list[str], where: str) -> None:
    missing = [name for name in wanted if name not in whole]
    if missing or unknown:
        counts = [f"{len(names)} {word}" for names, word in ((missing, "missing"), (unknown, "unknown")) if names]
        listed = [f"{word}: {_listed(names)}" for names, word in ((missing, "missing"), (unknown, "unknown")) if names]
        raise DataError(
            f"'{where}' is not what its config.json describes: {' and '.join(counts)} of {len(wanted)} tensors.",
            where="; ".join(listed),
            fix=_likely(missing, unknown),
        )
    odd = [name for name, array in wanted.items() if tuple(whole[name].shape) != array.their_shape]
    if odd:
        told = (f"{name} is {whole[name].shape}, not {wanted[name].their_shape}" for name in odd[:SHOWN])
        raise DataError(
            f"'{where}' is not what its config.json describes: {len(odd)} tensors have another shape.",
            where="; ".join(told),
            fix="the config.json that belongs to these weights",
        )
    whole_numbers = [name for name in wanted if "float" not in str(whole[name].dtype)]
    if whole_numbers:
        raise DataError(
            f"'{where}' holds weights that are no floating numbers: {len(whole_numbers)} of {len(wanted)} tensors.",
            where="; ".join(f"{name} is {whole[name].dtype}" for name in whole_numbers[:SHOWN]),
            fix="the weights before they were quantized",
        )


def _listed(names: list[str]) -> str:
    return ", ".join(name[:100] for name in names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


def _likely(missing: list[str], unknown: list[str]) -> str:
    """The likeliest mistake: a name that was written otherwise."""
    for name in unknown[:1]:
        for close in difflib.get_close_matches(name[:200], missing, n=1):
            return f"'{name[:100]}' is nearest to '{close}'"
    return "the config.json that belongs to these weights, or another --as"
