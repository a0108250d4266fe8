"""Matches the tensors of Hugging Face files to the arrays of a Spanax model, and converts between the two."""

import difflib
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from spanax.errors import WeightsError
from spanax.interop.configs import Family

ALONG = "*"
"""The dim of an array along which several tensors are stacked."""

SHOWN = 3
"""The maximum number of names in an error message."""


@dataclass(frozen=True)
class Array:
    """An array of a Spanax model, and its Hugging Face tensors.

    Attributes:
      path: its path; with the number of its layer, if it belongs to one.
      stacked: its path in a model that stacks its layers.
      layer: the number of its layer.
      shape: its shape, without layers.
      names: the names of its tensors.
      dims: the dims of a tensor and of the array, as in `family`; none if they are the same.
    """

    path: str
    stacked: str
    layer: int | None
    shape: tuple[int, ...]
    names: tuple[str, ...]
    dims: str

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of each tensor.

        Example:
          >>> Array("w", "w", None, (64, 3, 8, 8), ("q", "k", "v"), "(H K) D -> D * H K").tensor_shape
          (64, 64)
        """
        groups, array_dims = self.dim_groups
        sizes = dict(zip(array_dims, self.shape, strict=True))
        return tuple(math.prod(sizes[name] for name in group) for group in groups)

    def views(self, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the name of each tensor and a view of its values in the array, which reshapes to the tensor.

        Example:
          >>> array = Array("w", "w", None, (2, 3, 2), ("q",), "(H K) D -> D H K")
          >>> [(name, view.shape) for name, view in array.views(np.zeros(array.shape))]
          [('q', (3, 2, 2))]
        """
        groups, array_dims = self.dim_groups
        for index, name in enumerate(self.names):
            dims = list(array_dims)
            part = values
            if ALONG in dims:
                part = np.moveaxis(values, dims.index(ALONG), 0)[index]
                dims.remove(ALONG)
            yield name, part.transpose([dims.index(dim) for group in groups for dim in group])

    @property
    def dim_groups(self) -> tuple[list[list[str]], list[str]]:
        """The groups of dims that form each dim of a tensor, and the dims of the array."""
        if not self.dims:
            names = [str(dim) for dim in range(len(self.shape))]
            return [[name] for name in names], names
        left, _, right = self.dims.partition(" -> ")
        groups = re.findall(r"\(([^)]*)\)|(\S+)", left)
        return [(group or single).split() for group, single in groups], right.split()


def arrays_of(family: Family, params: Mapping[str, tuple[int, ...]]) -> list[Array]:
    """Returns the arrays of a model in the order of its family, with layers unstacked.

    Args:
      family: the family of the model.
      params: path -> shape of the parameters; blocks are stacked, or those of a list.

    Raises:
      DataError: the model has a parameter that is not in the family.

    Example:
      >>> from spanax.interop.configs import families
      >>> arrays = arrays_of(families()["gpt2"], {"embed": (64, 8), "blocks.attention_norm.scale": (2, 8)})
      >>> [(array.path, array.shape, array.names) for array in arrays][2]
      ('blocks.1.attention_norm.scale', (8,), ('transformer.h.1.ln_1.weight',))
    """
    remaining = dict(params)
    arrays = []
    for path, row in family.tensors.items():
        names = tuple(entry for entry in row if " -> " not in entry)
        dims = next((entry for entry in row if " -> " in entry), "")
        stacked = path.replace(f".{ALONG}", "")
        for layer, shape in _layers(path, stacked, remaining):
            along = shape[dims.partition(" -> ")[2].split().index(ALONG)] if ALONG in dims else 0
            expanded = [name.replace("#", str(number)) for name in names for number in range(along)]
            numbered = tuple(name.replace(ALONG, str(layer)) for name in (expanded if "#" in names[0] else names))
            arrays.append(Array(path.replace(ALONG, str(layer)), stacked, layer, shape, numbered, dims))
    if remaining:
        what = f"the model has {len(remaining)} parameters without a Hugging Face tensor."
        raise WeightsError(what, where=", ".join(sorted(remaining)[:SHOWN]))
    return arrays


def _layers(path: str, stacked: str, remaining: dict[str, tuple[int, ...]]) -> Iterator[tuple[int | None, Any]]:
    """Yields the number and the shape of each layer of a path that the model has, which it removes."""
    if path == stacked:
        if stacked in remaining:
            yield None, remaining.pop(stacked)
    elif stacked in remaining:
        num_layers, *shape = remaining.pop(stacked)
        yield from ((layer, tuple(shape)) for layer in range(num_layers))
    else:
        layer = 0
        while (numbered := path.replace(ALONG, str(layer))) in remaining:
            yield layer, remaining.pop(numbered)
            layer += 1


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
    *copies, original = family.tied or ("",)
    is_bare = not any(name.startswith(family.prefix) for name in tensors)
    prefix = family.prefix if is_bare else ""
    prefixed = {name if name in named or name in copies else prefix + name: tensor for name, tensor in tensors.items()}
    twice = tuple(copy for copy in copies if copy in prefixed and copy not in named and original in prefixed)
    patterns = {name: numberless(name) for name in prefixed if name not in (*named, *twice)}
    left_out = Counter(pattern for pattern in patterns.values() if pattern in family.computed)
    unknown = [name for name, pattern in patterns.items() if pattern not in family.computed]
    _check_names(named, prefixed, unknown, where)
    check_values(named, prefixed, where)
    return TensorMatch({name: prefixed[name] for name in named}, dict(left_out), twice, is_bare)


def numberless(name: str) -> str:
    """Returns a name with `*` for its numbers.

    Example:
      >>> numberless("h.0.ln_1.bias")
      'h.*.ln_1.bias'
    """
    return ".".join(ALONG if part.isdecimal() else part for part in name.split("."))


def _check_names(named: Mapping[str, Array], prefixed: Mapping[str, Any], unknown: list[str], where: str) -> None:
    missing = [name for name in named if name not in prefixed]
    differ = {word: names for word, names in (("missing", missing), ("unknown", unknown)) if names}
    if not differ:
        return
    fix = "use the config.json of these weights, or another --as"
    for name in unknown[:1]:
        for close in difflib.get_close_matches(name[:200], missing, n=1):
            fix = f"'{name[:100]}' is closest to '{close}'"
    counts = " and ".join(f"{len(names)} {word}" for word, names in differ.items())
    listed = [
        f"{word}: {', '.join(name[:100] for name in names[:SHOWN])}{', ...' if len(names) > SHOWN else ''}"
        for word, names in differ.items()
    ]
    what = f"'{where}' does not match its config.json: {counts} of {len(named)} tensors."
    raise WeightsError(what, where="; ".join(listed), fix=fix)


def check_values(named: Mapping[str, Array], prefixed: Mapping[str, Any], where: str) -> None:
    """Checks the shapes and dtypes of the tensors of a file.

    Raises:
      DataError: a tensor has another shape or dtype than its array.
    """
    mismatched = [
        f"{name} is {prefixed[name].shape}, not {array.tensor_shape}"
        for name, array in named.items()
        if tuple(prefixed[name].shape) != array.tensor_shape
    ]
    if mismatched:
        what = f"'{where}' does not match its config.json: {len(mismatched)} tensors have another shape."
        raise WeightsError(what, where="; ".join(mismatched[:SHOWN]), fix="use the config.json of these weights")
    integers = [f"{name} is {prefixed[name].dtype}" for name in named if "float" not in prefixed[name].dtype]
    if integers:
        what = f"'{where}' has weights that are not floating-point: {len(integers)} of {len(named)} tensors."
        raise WeightsError(what, where="; ".join(integers[:SHOWN]), fix="use the weights before quantization")
