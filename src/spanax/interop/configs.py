"""Families of Hugging Face models, and the conversion between their config.json and the config of a Spanax model.

Each file of `families/` is named after the `model_type` in config.json. A row of its `[tensors]` maps an array of a
Spanax model to its Hugging Face tensors: their names, then an einops-like pattern if their dims differ.
`(H K) D -> D H K` reshapes the first dim of a tensor into heads and moves its last dim to the front; right to left it
is the inverse. Several tensors are stacked along the dim `*`. In paths and names, `*` is a layer index, and `#` is an
index along the dim `*`. A family that `extends` another has its tables, with its own rows added or replaced. In
`implies`, an empty list is null.
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
from spanax.models.imported import MODELS, ModelClass, model_class
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
      about: the models that it reads.
      architecture: the class in transformers.
      model: the built-in model, or a name for the class of a user's file; `--as` takes it, or the name of the family.
      example: `FILE.py:Class` in `examples/models`, if the model is not built in.
      prefix: the prefix of tensor names in a model with a head; base models do not have it.
      settings: setting of the Spanax model -> its key in config.json, and its default there if it has one.
      fixed: keys of config.json with a single meaning -> supported values besides null; the first one is exported.
      tensors: path of an array -> names of its tensors, and their dims.
      implies: the settings of the Spanax model that distinguish the family.
      computed: names of tensors that are not trained, such as masks and rotary angles.
      tied: the names of tensors that may duplicate another tensor, and last the name of that tensor.
    """

    name: str
    about: str
    architecture: str
    model: str
    prefix: str
    settings: Mapping[str, tuple[Any, ...]]
    fixed: Mapping[str, tuple[Any, ...]]
    tensors: Mapping[str, tuple[str, ...]]
    implies: Mapping[str, Any]
    computed: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    example: str | None = None

    @classmethod
    def of_rows(cls, tensors: Mapping[str, tuple[str, ...]]) -> "Family":
        """Returns a family without a name, of given tensors."""
        return cls("", "", "", "", "", {}, {}, tensors, {})


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
        table["implies"] = {setting: None if value == [] else value for setting, value in table["implies"].items()}
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
    named = [family for family in families().values() if kind in (family.name, family.model)]
    if not named:
        raise UnknownNameError(f"unknown kind of weights '{kind}'.", fix=nearest(kind, families()))
    return named


def read_config(folder: Path, kind: str | None, into: str | None = None) -> tuple[Family, Any]:
    """Reads the family and the config of the model from a folder's config.json.

    Args:
      folder: the folder.
      kind: the kind that it must be of; None for any.
      into: `FILE.py:Class` of the class of the model, if it is not built in.

    Raises:
      DataError: config.json is missing, describes a model of another kind, or has settings that are not supported.
      SpanaxError: the class is needed, or does not exist.
    """
    path = folder / CONFIG
    config = config_of(folder)
    known = {family.name: family for family in (families().values() if kind is None else members(kind))}
    name = config.get("model_type")
    if name not in known:
        what = f"'{path}' describes a model of type {repr(name)[:60]}, which cannot be imported"
        what += "." if kind is None else f" as '{kind}'."
        raise WeightsError(what, fix=f"--as {name}" if name in families() else f"a model of type {', '.join(known)}")
    family = known[name]
    if into is None and family.example is not None:
        what = f"the class of a model of type '{name}' is not built in, but an example."
        fix = f"--into {family.example}, with files from examples/models of Spanax's repository, or a class like it"
        raise WorkloadError(what, fix=fix)
    config = _normalized(config)
    for key, allowed in family.fixed.items():
        if (value := config.get(key)) is not None and value not in allowed:
            what = f"'{path}' sets {key} to {repr(value)[:60]}, which {_class_text(family, into)} does not support."
            raise WeightsError(what, where=f"supported: {' or '.join(map(repr, allowed or (None,)))}")
    return family, _model_config(path, family, config, model_class(family.model, into))


def _class_text(family: Family, into: str | None) -> str:
    return into or MODELS[family.model].build.__module__


def config_of(folder: Path) -> dict[str, Any]:
    """Reads a folder's config.json.

    Raises:
      DataError: it is missing, or is not a JSON object.
    """
    path = folder / CONFIG
    if not path.exists():
        what = f"'{folder}' has no {CONFIG}, which describes the model of the weights."
        raise WeightsError(what, fix=f"copy the {CONFIG} of the model to this folder")
    with FileErrors(WeightsError, f"cannot read '{path}'."):
        config = read_json(inside(path, folder))
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    return config


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


def _model_config(path: Path, family: Family, config: Mapping[str, Any], model: ModelClass) -> Any:
    """Returns the validated config of the model."""
    values: dict[str, Any] = dict(family.implies)
    for name, (key, *default) in family.settings.items():
        value = config.get(key, next(iter(default), None))
        if type(value) is int and default and type(default[0]) is float:
            value = float(value)
        if value is not None:
            values[name] = value
    if "rope_theta" in values and (scaling := _rope_scaling(path, config)):
        values["rope_scaling"] = scaling
    try:
        shape: Any = parsed(model.config, values)
        numbers = [getattr(shape, field.name) for field in fields(shape)]
        if any(type(number) is int and not 1 <= number < MOST for number in numbers):
            raise ValueError("a size is not an integer >= 1 and < 2**31")
        if any(type(number) is float and not 0 <= number < math.inf for number in numbers):
            raise ValueError("a number is negative")
        nnx.eval_shape(lambda: model.build(shape, nnx.Rngs(0)))
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
    config.setdefault("scale_decoder_outputs", config.get("tie_word_embeddings") is not False)
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and isinstance(rope.get("full_attention"), dict):
        config["rope_local_base_freq"] = dict(rope.get("sliding_attention") or {}).get("rope_theta")
        rope = rope["full_attention"]
        config["rope_parameters"] = rope
    if isinstance(rope, dict):
        config |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
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
