"""Families of Hugging Face models, and the conversion between their config.json and the config of a Spanax model.

Each file of `families/` is named after the `model_type` in config.json. A row of its `[tensors]` maps an array of a
Spanax model to its Hugging Face tensors: their names, then an einops-like pattern if their dims differ.
`(H K) D -> D H K` reshapes the first dim of a tensor into heads and moves its last dim to the front; right to left it
is the inverse. Several tensors are stacked along the dim `*`. In paths and names, `*` is a layer index. A family that
`extends` another has its tables, with its own rows added or replaced.
"""

import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from flax import nnx

from spanax.documents import read_json
from spanax.errors import FileErrors, UnknownNameError, WeightsError, WorkloadError, first_line, nearest
from spanax.interop.safetensors import inside
from spanax.models.imported import MODELS
from spanax.schema import parsed

CONFIG = "config.json"
MOST = 1 << 31
"""The exclusive upper bound of the integers in a config."""

_ROPE = {
    "factor": "factor",
    "low": "low_freq_factor",
    "high": "high_freq_factor",
    "original_len": "original_max_position_embeddings",
}
"""The fields of a RopeScaling and their keys in config.json."""


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


def read_config(folder: Path, kind: str) -> tuple[Family, Any]:
    """Reads the family and the config of the Spanax model from a folder's config.json.

    Raises:
      DataError: config.json is missing, describes a model of another kind, or has settings that are not supported.
    """
    path = folder / CONFIG
    if not path.exists():
        what = f"'{folder}' has no {CONFIG}, which describes the model of the weights."
        raise WeightsError(what, fix=f"copy the {CONFIG} of the model to this folder")
    with FileErrors(WeightsError, f"cannot read '{path}'."):
        config = read_json(inside(path, folder))
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    known = {family.name: family for family in members(kind)}
    name = config.get("model_type")
    if name not in known:
        what = f"'{path}' describes a model of type {repr(name)[:60]}, which cannot be imported as '{kind}'."
        raise WeightsError(what, fix=f"--as {name}" if name in families() else f"a model of type {', '.join(known)}")
    family = known[name]
    config = _normalized(config)
    for key, allowed in family.fixed.items():
        if (value := config.get(key)) is not None and value not in allowed:
            module = MODELS[family.model][0].__module__
            what = f"'{path}' sets {key} to {repr(value)[:60]}, which {module} does not support."
            raise WeightsError(what, where=f"supported: {' or '.join(map(repr, allowed or (None,)))}")
    return family, _model_config(path, family, config)


def config_json(family: Family, config: Any, dtype: str) -> dict[str, Any]:
    """Returns the config.json of a config, for transformers.

    Example:
      >>> from spanax.models.gpt import SIZES
      >>> config_json(families()["gpt2"], SIZES["gpt2"], "float32")["n_embd"]
      768
    """
    entries = {setting[0]: getattr(config, name) for name, setting in family.settings.items()}
    entries |= {key: next(iter(allowed), None) for key, allowed in family.fixed.items()}
    if "rope_theta" in entries:
        entries["head_dim"] = config.head_dim or config.embed_dim // config.num_heads
        entries |= _rope_json(config)
    if "num_labels" in entries:
        labels = {str(number): f"LABEL_{number}" for number in range(entries.pop("num_labels"))}
        entries |= {"id2label": labels, "label2id": {label: int(number) for number, label in labels.items()}}
    return {"architectures": [family.architecture], "model_type": family.name, "dtype": dtype, **entries}


def family_of(kind: str, config: Any) -> Family:
    """Returns the family of this kind whose implied settings are those of a config.

    Raises:
      SpanaxError: there is none.
    """
    candidates = members(kind)
    keys = sorted({key for family in members(candidates[0].model) for key in family.implies})
    defaults = {key: getattr(type(config), key) for key in keys}
    settings = {key: getattr(config, key) for key in keys}
    matches = [family for family in members(candidates[0].model) if defaults | dict(family.implies) == settings]
    for family in matches:
        if family in candidates:
            return family
    changed = ", ".join(f"{key}={settings[key]}" for key in keys if settings[key] != defaults[key])
    fix = f"--as {matches[0].name}" if matches else "the settings of one model of transformers"
    raise WorkloadError(f"the settings of the model are not those of '{kind}'.", where=changed, fix=fix)


def _model_config(path: Path, family: Family, config: Mapping[str, Any]) -> Any:
    """Returns the validated config of the Spanax model."""
    model, kind = MODELS[family.model]
    values: dict[str, Any] = dict(family.implies)
    for name, (key, *default) in family.settings.items():
        value = config.get(key)
        if value is None:
            value = next(iter(default), None)
        if type(value) is int and default and type(default[0]) is float:
            value = float(value)
        if value is not None:
            values[name] = value
    if "rope_theta" in values:
        values["rope_scaling"] = _rope_scaling(path, config)
    try:
        shape: Any = parsed(kind, values)
        numbers = [getattr(shape, field.name) for field in fields(kind)]
        if any(type(number) is int and not 1 <= number < MOST for number in numbers):
            raise ValueError("a size is not an integer >= 1 and < 2**31")
        if any(type(number) is float and not 0 <= number < math.inf for number in numbers):
            raise ValueError("a number is negative")
        nnx.eval_shape(lambda: model(shape, nnx.Rngs(0)))
    except Exception as error:  # a model may raise any exception for an invalid config
        what = f"'{path}' does not describe a valid model."
        raise WeightsError(what, where=first_line(error)) from None
    return shape


def _normalized(config: Mapping[str, Any]) -> dict[str, Any]:
    """Normalizes settings whose format differs between versions of transformers."""
    config = dict(config)
    if config.get("use_sliding_window") is False:
        config["sliding_window"] = None
    if isinstance(labels := config.get("id2label"), dict):
        config.setdefault("num_labels", len(labels))
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
    return config


def _rope_scaling(path: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the fields of the scaling of rotary position embeddings, if any."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else repr(rope)
    if kind == "default":
        return None
    if kind != "llama3":
        what = f"'{path}' scales rotary positions by '{str(kind)[:60]}', which is not supported."
        raise WeightsError(what, where="supported: llama3")
    if any(type(rope.get(key)) not in (int, float) for key in _ROPE.values()):
        raise WeightsError(f"'{path}' scales rotary positions without numbers for {', '.join(_ROPE.values())}.")
    return {name: float(rope[key]) for name, key in _ROPE.items()} | {"original_len": rope[_ROPE["original_len"]]}


def _rope_json(config: Any) -> dict[str, Any]:
    """Returns the settings of rotary position embeddings for transformers 5 and for earlier versions."""
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"}, "rope_scaling": None}
    rope = {"rope_type": "llama3"} | {key: getattr(scaling, name) for name, key in _ROPE.items()}
    return {"rope_parameters": {"rope_theta": config.rope_theta, **rope}, "rope_scaling": rope}
