"""Families of Hugging Face models, each a file of `families/` named after its `model_type` in config.json.

A row of `[tensors]` maps an array of a Spanax model to its Hugging Face tensors: their names, then an einops-like
pattern if their dims differ. `(H K) D -> D H K` reshapes the first dim of a tensor into heads and moves its last dim to
the front; right to left it is the inverse. Several tensors are stacked along the dim `*`. In paths and names, `*` is a
layer index. A family that `extends` another has its tables, with its own rows added or replaced.
"""

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from spanax.errors import UnknownNameError, nearest
from spanax.schema import parsed


@dataclass(frozen=True)
class Family:
    """The mapping between a Spanax model and the equivalent models of transformers.

    Attributes:
      name: `model_type` in config.json.
      architecture: the class in transformers.
      model: the Spanax model; `--as` takes it, or the name of the family.
      prefix: the prefix of tensor names in a model with a head; base models do not have it.
      settings: setting of the Spanax model -> its key in config.json, and its default there if it has one.
      fixed: keys of config.json with a single meaning -> supported values besides null; the first one is exported.
      tensors: path of an array -> names of its tensors, and their dims.
      implies: the settings of the Spanax model that distinguish the family.
      computed: names of tensors that are not trained, such as masks and rotary angles.
      tied: the name of a tensor that may duplicate another tensor, and the name of that tensor.
    """

    name: str
    architecture: str
    model: str
    prefix: str
    settings: Mapping[str, tuple[Any, ...]]
    fixed: Mapping[str, tuple[Any, ...]]
    tensors: Mapping[str, tuple[str, ...]]
    implies: Mapping[str, Any]
    computed: tuple[str, ...] = ()
    tied: tuple[str, str] = ("", "")


@functools.cache
def families() -> Mapping[str, Family]:
    """Returns all families by name.

    Example:
      >>> families()["gpt2"].tensors["embed"]
      ('transformer.wte.weight',)
    """
    files = resources.files("spanax.interop").joinpath("families").iterdir()
    tables = {file.name.removesuffix(".toml"): tomllib.loads(file.read_text("utf-8")) for file in files}
    built = {}
    for name in sorted(tables):
        table = {"name": name, "implies": {}} | tables[name]
        if "extends" in table:
            table = _extended(tables[table.pop("extends")], table)
        built[name] = parsed(Family, table)
    return built


def _extended(base: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a table with the rows of another added or replaced."""
    merged = {**base, **table}
    for key in base.keys() & table.keys():
        if isinstance(base[key], dict):
            merged[key] = base[key] | table[key]
    return merged


def members(kind: str) -> list[Family]:
    """Returns the families that `--as KIND` stands for: one family, or all of a Spanax model.

    Raises:
      SpanaxError: no family has this name.

    Example:
      >>> [family.name for family in members("llama")]
      ['gemma', 'llama', 'mistral', 'qwen2', 'qwen3']
    """
    if kind not in families():
        raise UnknownNameError(f"unknown kind of weights '{kind}'.", fix=nearest(kind, families()))
    return [family for family in families().values() if kind in (family.name, family.model)]
