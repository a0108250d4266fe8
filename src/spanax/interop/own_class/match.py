"""Matches the tensors of files to the arrays of a user's own class; what is ambiguous is reported, never guessed."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from spanax.documents import read_toml
from spanax.errors import FileErrors, UnknownNameError, WeightsError, nearest
from spanax.interop.configs import Family
from spanax.interop.mapping import SHOWN, Array, TensorMatch, arrays_of, check_values, numberless
from spanax.interop.own_class.arrays import arrays_of_pair
from spanax.interop.own_class.groups import Group, Pair, grouped, pairs_of, split
from spanax.interop.own_class.slots import ROLES, Slot, slots_of
from spanax.interop.safetensors import Tensor
from spanax.schema import parsed

LEFT_OUT = ("num_batches_tracked", "inv_freq", "position_ids")
"""Tensors that a module computes."""


SPLIT = re.compile(r"\(\w( \w){2,}\)")
"""A dim of a tensor that is three or more of an array."""


@dataclass(frozen=True)
class Rows:
    """What a file says of arrays and tensors that names and shapes do not determine.

    Attributes:
      tensors: path of an array -> names of its tensors, and their dims, as in the table of a family; none for an array
        that is not in the files.
      skip: patterns of names of tensors that the model does not have.
    """

    tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    skip: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> "Rows":
        """Reads a TOML file.

        Raises:
          DataError: it cannot be read, or has other entries.
        """
        with FileErrors(WeightsError, f"cannot read '{path}'."):
            return parsed(cls, read_toml(path))

    def paths(self, row: str, known: Iterable[str]) -> list[str]:
        """Returns the arrays of a row: one, those of a list of layers, or their stack.

        Raises:
          SpanaxError: there are none.
        """
        pattern = re.compile(re.escape(row).replace(r"\.\*", r"(\.\d+)?"))
        paths = [path for path in known if pattern.fullmatch(path)]
        if not paths:
            raise UnknownNameError(f"the model has no array '{row}'.", where="[tensors]", fix=nearest(row, known))
        return paths


def match_own(
    model: nnx.Module, stored: Mapping[str, Tensor], family: Family | None, rows: Rows, where: str
) -> tuple[list[Array], TensorMatch, list[str]]:
    """Returns the arrays of a model, their tensors, and a line for each that does not match.

    Args:
      model: the model, of abstract arrays.
      stored: the tensors of the files.
      family: that of config.json, whose names are used; None if it is unknown.
      rows: what the user says.
      where: the files, for errors.

    Raises:
      DataError: a tensor that a row names is missing, or has another shape; or tensors are not floating-point.
      SpanaxError: the model has no array that a row names.
    """
    slots = list(slots_of(model))
    shapes = {slot.path: slot.shape for _, _, slot in slots}
    mapped = {path for row in rows.tensors for path in rows.paths(row, shapes)}
    chosen = {path: shapes[path] for row, names in rows.tensors.items() if names for path in rows.paths(row, shapes)}
    arrays = arrays_of(Family.of_rows({row: names for row, names in rows.tensors.items() if names}), chosen)
    used = {name: array for array in arrays for name in array.names}
    missing = [name for name in used if name not in stored]
    if missing:
        raise WeightsError(
            f"'{where}' has no tensor '{missing[0]}'.", where="[tensors]", fix=nearest(missing[0], stored)
        )
    for name, array in used.items():
        if tuple(stored[name].shape) != array.tensor_shape:
            what = f"'{name}' is {list(stored[name].shape)}, not {list(array.tensor_shape)}."
            raise WeightsError(what, where=f"[tensors] of '{array.path}'", fix='dims such as "D V -> V D" in its row')
    ours: dict[str, dict[str, Slot]] = defaultdict(dict)
    for owner, role, slot in slots:
        if slot.path not in mapped:
            ours[owner][role] = slot
    patterns = {name: numberless(name) for name in stored}
    prefix = "" if family is None else family.prefix
    computed = () if family is None else (*family.computed, *(name.removeprefix(prefix) for name in family.computed))
    skips = [*rows.skip, *(f"*{last}" for last in LEFT_OUT)]
    skipped = {name for name in stored if patterns[name] in computed or any(fnmatchcase(name, skip) for skip in skips)}
    theirs = {name: tensor for name, tensor in stored.items() if name not in skipped and name not in used}
    names = known_names(family)
    mine = grouped(ours)
    files = [
        replace(part, known_as=names.get(part.name, ""))
        for group in grouped(modules_of(theirs))
        for part in split(group, mine)
    ]
    pairs, unmatched, unused = pairs_of(mine, files)
    decided, problems = _dims(pairs)
    for pair, dims in decided:
        arrays += arrays_of_pair(pair, dims)
    used = {name: array for array in arrays for name in array.names}
    twice = tuple(name for group in unused for name in _duplicates(group, [stored[name] for name in used]))
    unused = [group for group in unused if not all(tensor.name in twice for tensor in _arrays(group))]
    problems += _problems(unmatched, unused)
    check_values(used, stored, where)
    left_out = Counter(patterns[name] for name in skipped)
    return arrays, TensorMatch({name: stored[name] for name in used}, dict(left_out), twice, False), problems


def _arrays(group: Group) -> list[Any]:
    return [array for member in group.members for array in member.values()]


def _dims(pairs: Iterable[Pair]) -> tuple[list[tuple[Pair, dict[str, str]]], list[str]]:
    """Returns the dims of each role of each pair, and a line for each array that may be transposed or not.

    A square matrix of a Linear is stored as the other matrices of the files are: (out, in), or all as in `Conv1D`. A
    dim that is split in two is one of heads; one that is split in more, such as queries, keys and values, is ambiguous.
    """
    by_pair = list(pairs)
    linear = [fits for pair in by_pair for role, fits in pair.fits.items() if pair.ours.roles[role].is_linear]
    orders = {fits[0][0] for fits in linear if len(fits) == 1} or {0}
    decided = []
    problems = []
    for pair in by_pair:
        dims = {}
        for role, fits in pair.fits.items():
            slot = pair.ours.roles[role]
            choices = [text for number, text in fits if len(fits) == 1 or not slot.is_linear or number in orders]
            if len(choices) == 1 and not SPLIT.search(choices[0]):
                dims[role] = choices[0]
            else:
                ours = f"{_pattern(pair.ours, slot.path)} {list(slot.shape)}"
                theirs = _pattern(pair.theirs, pair.theirs.roles[role].name)
                other = "" if len(choices) > 1 else " or in another order"
                problems.append(f"{ours} may be {theirs} as {' or '.join(choices)}{other}")
        if dims.keys() == pair.fits.keys():
            decided.append((pair, dims))
    return decided, problems


def _duplicates(group: Group, used: Sequence[Tensor]) -> Iterator[str]:
    """Yields the names of the tensors of a group that are matrices equal to another one."""
    for tensor in _arrays(group):
        if len(tensor.shape) == 2 and any(is_equal(tensor, other) for other in used if other.shape == tensor.shape):
            yield tensor.name


def _problems(unmatched: Iterable[Group], unused: Sequence[Group]) -> Iterator[str]:
    """Yields a line for each array without a tensor, and for each tensor without an array."""
    for group in unmatched:
        for role, slot in group.roles.items():
            fitting = [other for other in unused if Pair(group, other).fits]
            names = ", ".join(_pattern(other, other.roles[role].name) for other in fitting[:SHOWN])
            fit = f"fits {names}" if names else "fits no tensor that is left"
            yield f"{_pattern(group, slot.path)} {list(slot.shape)} {fit}"
    for group in unused:
        for tensor in group.roles.values():
            yield f"{_pattern(group, tensor.name)} {list(tensor.shape)} fits no array that is left, or several"


def _pattern(group: Group, name: str) -> str:
    """Returns the name of an array of a group, with `*` for the numbers that differ."""
    parts = name.split(".")
    return ".".join([*group.name.split("."), *parts[group.name.count(".") + 1 :]])


def modules_of(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Returns the tensors of each module of the files, by role."""
    modules: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        owner, _, last = name.rpartition(".")
        is_named = last in ROLES and bool(owner)
        modules[owner if is_named else name][ROLES[last] if is_named else "weight"] = tensor
    return modules


def known_names(family: Family | None) -> dict[str, str]:
    """Returns the name that a family has for each module of its files, by name with `*` for numbers."""
    rows = {} if family is None else family.tensors
    names = {}
    for path, row in rows.items():
        entries = [entry for entry in row if " -> " not in entry]
        if family is not None and len(entries) == 1:
            ours, _, last = path.rpartition(".")
            owner = entries[0].replace("#", "*").rpartition(".")[0]
            for theirs in (owner, owner.removeprefix(family.prefix)):
                names[theirs] = ours if last in ROLES else path
    return names


def is_equal(tensor: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors have the same bytes."""
    is_same_type = (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
    return is_same_type and tensor.read().view(np.uint8).data == other.read().view(np.uint8).data
