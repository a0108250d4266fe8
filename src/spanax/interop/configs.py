"""Conversion between a Hugging Face config.json and the config of a Spanax model."""

import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from flax import nnx

from spanax.documents import read_json
from spanax.errors import DataError, WeightsError, first_line
from spanax.interop.families import FAMILIES, Family
from spanax.interop.safetensors import inside
from spanax.models.imported import MODELS
from spanax.schema import parsed

CONFIG = "config.json"
MOST = 1 << 31
"""The exclusive upper bound of the integers in a config."""


def read_config(folder: Path, name: str, family: Family) -> Any:
    """Reads the config of a Spanax model from a folder's config.json.

    Args:
      folder: the folder with the weights.
      name: the name of the family.
      family: the family with this name.

    Raises:
      DataError: config.json is missing, describes another model, or has settings that are not supported.
    """
    path = folder / CONFIG
    if not path.exists():
        what = f"'{folder}' has no {CONFIG}, which describes the model of the weights."
        raise WeightsError(what, fix=f"copy the {CONFIG} of the model to this folder")
    try:
        config = read_json(inside(path, folder))
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise WeightsError(f"cannot read '{path}'.", where=first_line(error)) from None
    kind = config.get("model_type")
    if kind not in family.kinds:
        matches = [family_name for family_name, tables in FAMILIES.items() if kind in tables.kinds]
        what = f"'{path}' describes a model of type {repr(kind)[:60]}, which cannot be imported as '{name}'."
        raise WeightsError(what, fix=f"--as {matches[0]}" if matches else f"a model of type {', '.join(family.kinds)}")
    config = _as_written(config)
    for key, allowed in family.fixed.items():
        if (value := config.get(key, allowed[0])) not in allowed:
            what = f"'{path}' sets {key} to {repr(value)[:60]}, which spanax.models.{family.model[0]} does not support."
            raise WeightsError(what, where=f"supported: {' or '.join(map(repr, allowed))}")
    return _shape(path, name, family, config)


def config_json(family: Family, config: Any, dtype: str) -> dict[str, Any]:
    """Returns the config.json of a config, for transformers.

    Example:
      >>> from spanax.interop.families import family
      >>> from spanax.models.gpt import SIZES
      >>> config_json(family("gpt2"), SIZES["gpt2"], "float32")["n_embd"]
      768
    """
    implied = {
        kind: all(getattr(config, k) == v for k, v in expected.items()) for kind, expected in family.implied.items()
    }
    kind = [kind for kind, holds in implied.items() if holds and kind != "mistral"][-1]
    entries = {setting.key: getattr(config, setting.name) for setting in family.settings}
    entries |= {key: allowed[0] for key, allowed in family.fixed.items()}
    if family.model[0] == "llama":
        entries |= _rope_json(config)
        entries["head_dim"] = config.head_dim or config.embed_dim // config.num_heads
    if "num_labels" in entries:
        labels = {str(number): f"LABEL_{number}" for number in range(entries.pop("num_labels"))}
        entries |= {"id2label": labels, "label2id": {label: int(number) for number, label in labels.items()}}
    return {"architectures": [family.kinds[kind]], "model_type": kind, "dtype": dtype, **entries}


def _shape(path: Path, name: str, family: Family, config: Mapping[str, Any]) -> Any:
    """Returns the validated config of the Spanax model."""
    model, kind = MODELS[name]
    known = {field.name for field in fields(kind)}
    values: dict[str, Any] = dict(family.implied[config["model_type"]])
    for setting in family.settings:
        value = config.get(setting.key, setting.default)
        if value is not None:
            values[setting.name] = value
    if family.model[0] == "llama":
        values |= _rope(path, config)
    try:
        shape: Any = parsed(kind, {key: value for key, value in values.items() if key in known})
        numbers = [getattr(shape, key) for key in known]
        if any(type(number) is int and not 1 <= number < MOST for number in numbers):
            raise ValueError("a size is not an integer >= 1 and < 2**31")
        if any(type(number) is float and not 0 <= number < math.inf for number in numbers):
            raise ValueError("a number is negative")
        nnx.eval_shape(lambda: model(shape, nnx.Rngs(0)))
    except Exception as error:  # a model may raise any exception for an invalid config
        what = f"'{path}' does not describe a valid model."
        raise WeightsError(what, where=first_line(error)) from None
    return shape


def _as_written(config: Mapping[str, Any]) -> dict[str, Any]:
    """Normalizes settings whose format differs between versions of transformers."""
    config = dict(config)
    if config.get("use_sliding_window") is False:
        config["sliding_window"] = None
    if isinstance(labels := config.get("id2label"), dict):
        config.setdefault("num_labels", len(labels))
    rope = config.get("rope_parameters") or {}
    if isinstance(rope, dict) and "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
    for key in ("rope_theta", "rms_norm_eps", "layer_norm_eps"):
        if type(config.get(key)) is int:
            config[key] = float(config[key])
    return config


def _rope(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the scaling of rotary position embeddings, if any."""
    from spanax.models.llama import RopeScaling

    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else repr(rope)
    if kind == "default":
        return {}
    if kind != "llama3":
        what = f"'{path}' scales rotary positions by '{str(kind)[:60]}', which is not supported."
        raise WeightsError(what, where="supported: llama3")
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    try:
        factor, low, high, length = (rope[key] for key in keys)
        return {"rope_scaling": RopeScaling(float(factor), float(low), float(high), int(length))}
    except (KeyError, TypeError, ValueError):
        raise WeightsError(f"'{path}' scales rotary positions without numbers for {', '.join(keys)}.") from None


def _rope_json(config: Any) -> dict[str, Any]:
    """Returns the settings of rotary position embeddings for transformers 5 and for earlier versions."""
    scaling = getattr(config, "rope_scaling", None)
    rope = {"rope_type": "default"} if scaling is None else {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low,
        "high_freq_factor": scaling.high,
        "original_max_position_embeddings": scaling.original_len,
    }  # fmt: skip
    return {
        "rope_parameters": {"rope_theta": config.rope_theta, **rope},
        "rope_scaling": None if scaling is None else rope,
    }
