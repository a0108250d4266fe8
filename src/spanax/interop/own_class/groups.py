"""Groups of modules, and which groups of a model are which of the files.

Modules are matched, not arrays: a module with a kernel and a bias is one with a weight and a bias. Modules of equal
names and shapes but for numbers, such as the layers of a list, are one group, and so is a stack of layers. Two groups
match if, among those that remain, their shapes fit, and each is like only the other; `LIKENESS` says how.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

WORDS = {
    "attn": "attention", "mha": "attention", "ln": "norm", "layernorm": "norm", "rmsnorm": "norm", "bn": "norm",
    "batchnorm": "norm", "query": "q", "wq": "q", "key": "k", "wk": "k", "value": "v", "wv": "v", "output": "out",
    "o": "out", "wo": "out", "wte": "embed", "embedding": "embed", "embeddings": "embed", "emb": "embed",
    "wpe": "position", "pos": "position", "positions": "position", "positional": "position", "classifier": "head",
    "ffn": "mlp", "ff": "mlp", "feed": "mlp", "feedforward": "mlp", "enc": "encoder", "dec": "decoder", "cls": "class",
    "patches": "patch", "experts": "expert", "convolution": "conv",
}  # fmt: skip
"""Words of names, and the word of the same meaning."""

DROPPED = {
    "model", "module", "transformer", "layer", "layers", "block", "blocks", "h", "self", "proj", "projection", "dense",
    "lm", "tok", "token", "tokens", "word", "forward", "linear",
}  # fmt: skip
"""Words of names without a meaning of their own."""

PLACES = {"pre", "post", "input", "before", "after", "cross"}
"""Words that two names must share: `attention_norm` is not `post_attention_norm`."""


@dataclass(frozen=True)
class Group:
    """Modules that differ in numbers of their names only, in the order of these.

    Attributes:
      name: their name, with `*` for the numbers that differ.
      numbers: the numbers of each `*`.
      members: role -> array, of each module.
      known_as: the name that its family has for it.
    """

    name: str
    numbers: tuple[tuple[int, ...], ...]
    members: tuple[Mapping[str, Any], ...]
    known_as: str = ""

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many numbers there are for each `*`."""
        return tuple(map(len, self.numbers))

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The words of the name that have a meaning."""
        return words(self.name)

    @property
    def roles(self) -> Mapping[str, Any]:
        """The arrays of the first module."""
        return self.members[0]


def words(name: str) -> tuple[str, ...]:
    """Returns the words of a name that have a meaning.

    Example:
      >>> words("model.layers.*.self_attn.q_proj"), words("blocks.attention.q")
      (('attention', 'q'), ('attention', 'q'))
    """
    found = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]
    return tuple(sorted(WORDS.get(word, word) for word in found if word not in DROPPED))


def grouped(modules: Mapping[str, Mapping[str, Any]]) -> list[Group]:
    """Returns the groups of modules: name of a module -> role -> array."""
    kinds: dict[Any, dict[tuple[int, ...], str]] = defaultdict(dict)
    for name, roles in modules.items():
        numbers = tuple(int(part) for part in name.split(".") if part.isdecimal())
        pattern = ".".join("*" if part.isdecimal() else part for part in name.split("."))
        kinds[pattern, tuple(sorted((role, array.shape) for role, array in roles.items()))][numbers] = name
    groups = []
    for (pattern, _), named in kinds.items():
        values = [sorted(set(column)) for column in zip(*named, strict=True)]
        if len(named) == math.prod(map(len, values)):
            name = pattern
            for column in values:
                name = name.replace("*", "#" if len(column) > 1 else str(column[0]), 1)
            differing = tuple(tuple(column) for column in values if len(column) > 1)
            members = tuple(modules[named[numbers]] for numbers in product(*values))
            groups.append(Group(name.replace("#", "*"), differing, members))
        else:
            groups += [Group(name, (), (modules[name],)) for name in named.values()]
    return groups


@dataclass(frozen=True)
class Pair:
    """A group of modules of the model, and the group of modules of the files that it is."""

    ours: Group
    theirs: Group

    @cached_property
    def fits(self) -> Mapping[str, list[tuple[int, str]]]:
        """Role -> how its tensor fits; empty if one does not."""
        if self.ours.roles.keys() != self.theirs.roles.keys():
            return {}
        num_lists = len(self.ours.sizes)
        if self.theirs.sizes[:num_lists] != self.ours.sizes:
            return {}
        stacked = self.theirs.sizes[num_lists:]
        fits = {role: slot.fits(self.theirs.roles[role].shape, stacked) for role, slot in self.ours.roles.items()}
        return fits if all(fits.values()) else {}


LIKENESS: tuple[Callable[[Group, Group], bool], ...] = (
    lambda ours, theirs: f".{theirs.name}".endswith(f".{ours.name}") or f".{ours.name}".endswith(f".{theirs.name}"),
    lambda ours, theirs: bool(ours.words) and ours.words == theirs.words,
    lambda ours, theirs: bool(theirs.known_as) and ours.words == words(theirs.known_as),
    lambda ours, theirs: True,
    lambda ours, theirs: _contains(ours.words, theirs.words),
)
"""How two names may be alike, from the surest to the least: if only two groups are alike in this way, they match."""


def _contains(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    """Returns whether the words of one name are among those of the other, which says nothing more about the place."""
    one = set(ours)
    other = set(theirs)
    return bool(one and other) and (one <= other or other <= one) and one & PLACES == other & PLACES


def pairs_of(ours: Iterable[Group], theirs: Iterable[Group]) -> tuple[list[Pair], list[Group], list[Group]]:
    """Returns the groups that match, and those of either side that do not."""
    mine = list(ours)
    files = list(theirs)
    possible = [pair for pair in (Pair(group, other) for group in mine for other in files) if pair.fits]
    matched: list[Pair] = []
    is_changed = True
    while is_changed:
        is_changed = False
        for is_alike in LIKENESS:
            alike = [pair for pair in possible if is_alike(pair.ours, pair.theirs)]
            counts = Counter(id(group) for pair in alike for group in (pair.ours, pair.theirs))
            found = [pair for pair in alike if counts[id(pair.ours)] == counts[id(pair.theirs)] == 1]
            if found:
                matched += found
                taken = {id(group) for pair in found for group in (pair.ours, pair.theirs)}
                possible = [pair for pair in possible if not {id(pair.ours), id(pair.theirs)} & taken]
                is_changed = True
                break
    taken = {id(group) for pair in matched for group in (pair.ours, pair.theirs)}
    left = [[group for group in groups if id(group) not in taken] for groups in (mine, files)]
    return matched, left[0], left[1]


def split(theirs: Group, ours: Sequence[Group]) -> Iterator[Group]:
    """Yields a group, or its parts by the last number if no group of the model fits all of them."""
    if len(theirs.sizes) < 2 or any(Pair(group, theirs).fits for group in ours):
        yield theirs
        return
    *numbers, last = theirs.numbers
    before, _, after = theirs.name.rpartition("*")
    for index, number in enumerate(last):
        part = Group(f"{before}{number}{after}", tuple(numbers), theirs.members[index :: len(last)])
        yield from split(part, ours)
