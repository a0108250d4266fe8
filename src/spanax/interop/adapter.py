"""Adapters of a checkpoint: merged into its weights, or as files of PEFT.

Shape suffixes: S stacked layers, I inputs, O outputs, R rank.
"""

import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from spanax import Workload
from spanax.adapters.lora import LoRA, packed_paths
from spanax.adapters.packed import PARTS, Packed
from spanax.documents import read_json
from spanax.entries.folder import Folder
from spanax.entries.local_path import local_path
from spanax.entries.names import IMPORTED
from spanax.errors import AdapterError, FileErrors, WeightsError, first_line
from spanax.interop.auxiliary_files import copy_out, write_model, writing
from spanax.interop.configs import Family, family_of
from spanax.interop.hf_import import imported_program, params_of, weights_plan
from spanax.interop.mapping import ALONG, Array, arrays_of
from spanax.interop.safetensors import Tensor, inside, tensors
from spanax.models.imported import is_imported, model_class, read_model
from spanax.train.state import weights
from spanax.units import count_text

CONFIG = "adapter_config.json"
FILE = "adapter_model.safetensors"
"""The files of an adapter. Source: https://huggingface.co/docs/peft, "Checkpoint format"."""

PREFIX = "base_model.model."
"""The prefix of the names of tensors in PEFT."""

NAMES = ("lora_a", "lora_b")
"""The last parts of the paths of an adapter."""

BASE = "spanax_base"
"""The metadata of an adapter with the digest of its base model."""

PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (False,), "modules_to_save": ([],), "bias": ("none",), "lora_bias": (False,), "rank_pattern": ({},),
    "alpha_pattern": ({},), "layers_to_transform": ([],), "trainable_token_indices": ([],), "target_parameters": ([],),
    "layer_replication": ([],),
}  # fmt: skip
"""Keys of PEFT's config, and the values besides null under which an adapter is one of plain LoRA."""


@dataclass(frozen=True)
class AdapterFiles:
    """A summary of an adapter that was written or read.

    Attributes:
      kind: the name of the family.
      out: the folder.
      adapters: rank, scale and layers.
      num_params: the number of parameters of the adapters.
      is_averaged: whether they are the averages of the adapters, of `spanax train --ema`.
    """

    kind: str
    out: str
    adapters: str
    num_params: int
    is_averaged: bool = False

    def __str__(self) -> str:
        averaged = "averaged " if self.is_averaged else ""
        count = count_text(self.num_params)
        return f"{self.kind}: {averaged}adapters {self.adapters}, {count} parameters, into {self.out}"


@dataclass(frozen=True)
class Merged:
    """A checkpoint with adapters, read as the weights of the model without them; as `weights.Source`.

    Attributes:
      source: the checkpoint.
      scale: the factor of the product of two adapters.
      packed: the packed weights by path, as shapes.
    """

    source: weights.Source
    scale: float
    packed: Mapping[str, Packed]

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return self.source.step

    @property
    def folder(self) -> Any:
        """The folder of the checkpoint."""
        return self.source.folder

    @cached_property
    def saved(self) -> Mapping[str, str]:
        """The dtype and shape of each weight, without adapters and unpacked."""
        parts = {f"{path}.{part}" for path in self.packed for part in PARTS}
        saved = {
            path: text
            for path, text in self.source.saved.items()
            if path not in parts and path.rpartition(".")[2] not in NAMES
        }
        for path, packed in self.packed.items():
            saved[path] = f"{packed.dtype}[{','.join(map(str, packed.shape))}]"
        return saved

    def part(self, path: str) -> weights.Part:
        """Returns a weight with its adapter on the host, which is read when it is made."""
        dtype, shape = weights.dtype_shape(self.saved[path])
        return weights.Part(shape, dtype, partial(self._array, path))

    def _array(self, path: str) -> np.ndarray:
        if path in self.packed:
            codes, scale = (self.source.part(f"{path}.{part}").make() for part in PARTS)
            values = np.asarray(replace(self.packed[path], codes=codes, scale=scale).array())
        else:
            values = self.source.part(path).make()
        layer, _, name = path.rpartition(".")
        names = [f"{layer}.{adapter}" for adapter in NAMES]
        if name != "kernel" or names[0] not in self.source.saved:
            return values
        a, b = (self.source.part(name).make() for name in names)
        num_stacked = a.ndim + b.ndim - 2 - values.ndim
        a_SIR = a.reshape(math.prod(a.shape[:num_stacked]), -1, a.shape[-1]).astype("float32")
        b_SRO = b.reshape(len(a_SIR), a.shape[-1], -1).astype("float32")
        update = (self.scale * a_SIR @ b_SRO).reshape(values.shape)
        return (values.astype("float32") + update).astype(values.dtype)


def merged(source: weights.Source, definition: Workload) -> Merged | weights.Source:
    """Returns the weights of a checkpoint with its adapters merged, if its model has adapters."""
    if definition.adapters is None:
        return source
    model = nnx.eval_shape(lambda: definition.build(nnx.Rngs(0)))
    return Merged(source, definition.adapters.scale, dict(packed_paths(model)))


def export_adapter(
    source: weights.Source, adapters: LoRA, family: Family, arrays: list[Array], out: Path
) -> AdapterFiles:
    """Writes the adapters of a checkpoint as PEFT does: adapter_config.json and adapter_model.safetensors.

    Args:
      source: the checkpoint.
      adapters: rank, scale and layers.
      family: the family of the model.
      arrays: the arrays of the model.
      out: the folder to create.

    Raises:
      WriteError: the folder is not empty, or cannot be written.
    """
    read = _Layers(source)
    written: dict[str, np.ndarray] = {}
    is_transposed = False
    for array in arrays:
        a, b = (read.of(array, name) for name in NAMES)
        is_kernel = array.path.endswith(".kernel")
        if is_kernel and a is not None and b is not None:
            is_transposed = _grouped(array)[-1]
            for name, (a_RI, b_OR) in _to_tensors(array, a, b).items():
                written |= {f"{name}.lora_A.weight": a_RI, f"{name}.lora_B.weight": b_OR}
    modules = sorted({re.sub(r"^.*\.\d+\.", "", name.partition(".lora_")[0]) for name in written})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if "LM" in family.architecture else None,
        "base_model_name_or_path": None,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": modules,
        "fan_in_fan_out": is_transposed,
        "inference_mode": True,
    }
    with writing(out):
        arrays_in_order = {name: np.ascontiguousarray(values) for name, values in written.items()}
        save_file(arrays_in_order, out / FILE, {"format": "pt", BASE: _base_digest(read, arrays)})
        (out / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    num_params = sum(values.size for values in written.values())
    return AdapterFiles(family.name, str(out), str(adapters), num_params, bool(source.averages))


@dataclass(frozen=True)
class _Layers:
    """Reads the arrays of single layers from a checkpoint that may stack them."""

    source: weights.Source
    _cache: dict[str, np.ndarray] = field(default_factory=dict)

    def of(self, array: Array, name: str | None = None) -> np.ndarray | None:
        """Returns the values of an array, or of one with another last name; None if there are none."""
        single, stacked = (
            path if name is None else f"{path.rpartition('.')[0]}.{name}" for path in (array.path, array.stacked)
        )
        if single in self.source.saved:
            return self._read(single)
        return self._read(stacked)[array.layer] if stacked in self.source.saved else None

    def _read(self, path: str) -> np.ndarray:
        if path not in self._cache:
            self._cache[path] = self.source.part(path).make()
        return self._cache[path]


def _base_digest(read: _Layers, arrays: list[Array]) -> str:
    """Returns a digest of the vectors of a model, such as the scales of norms, which adapters leave as they are."""
    digest = hashlib.sha256()
    for array in arrays:
        values = read.of(array) if len(array.shape) == 1 else None
        if values is not None:
            digest.update(values.astype("bfloat16").tobytes())
    return digest.hexdigest()[:16]


def _grouped(array: Array) -> tuple[list[str], list[str], list[str], bool]:
    """Returns the dims of a kernel, those of the input and of the output in its tensor, and whether it is transposed.

    A kernel has the dims of its input first, and a tensor of PyTorch those of its output, except in GPT-2's Conv1D.

    Raises:
      AdapterError: the layer has no plain form.
    """
    groups, dims = array.dim_groups
    first = [number for number, group in enumerate(groups) if dims[0] in group]
    if len(groups) != 2 or len(first) != 1:
        raise AdapterError(f"an adapter of '{array.path}' has no form in PEFT.")
    (inputs,) = first
    return dims, groups[inputs], groups[1 - inputs], inputs == 0


def _to_tensors(array: Array, a: np.ndarray, b: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns the adapters of a layer as PEFT stores them, by the name of each tensor that its kernel consists of."""
    dims, inputs, outputs, _ = _grouped(array)
    of_a = dims[: len(inputs)]
    of_b = dims[len(inputs) :]
    result = {}
    for index, name in enumerate(array.names):
        part = b
        remaining = list(of_b)
        if ALONG in remaining:
            part = np.moveaxis(b, 1 + remaining.index(ALONG), 0)[index]
            remaining.remove(ALONG)
        a_RI = a.transpose(a.ndim - 1, *(of_a.index(dim) for dim in inputs)).reshape(a.shape[-1], -1)
        b_OR = part.transpose(*(1 + remaining.index(dim) for dim in outputs), 0).reshape(-1, part.shape[0])
        result[PREFIX + name.removesuffix(".weight")] = (a_RI, b_OR)
    return result


def _from_tensors(array: Array, a_RI: Tensor, b_OR: Tensor) -> dict[str, np.ndarray]:
    """Returns the adapters of a layer by last name; the inverse of `_to_tensors`.

    Raises:
      AdapterError: their shapes do not fit the layer.
    """
    dims, inputs, outputs, _ = _grouped(array)
    sizes = dict(zip(dims, array.shape, strict=True))
    rank = a_RI.shape[0]
    expected = [(rank, math.prod(sizes[dim] for dim in inputs)), (math.prod(sizes[dim] for dim in outputs), rank)]
    for tensor, shape in zip((a_RI, b_OR), expected, strict=True):
        if tensor.shape != shape:
            what = f"the adapter is of another base model: '{tensor.name}' is {list(tensor.shape)}, not {list(shape)}."
            raise AdapterError(what, fix="the base model that it was trained for")
    a = a_RI.read().reshape(rank, *(sizes[dim] for dim in inputs))
    b = b_OR.read().reshape(*(sizes[dim] for dim in outputs), rank)
    of_a = dims[: len(inputs)]
    of_b = dims[len(inputs) :]
    return {
        NAMES[0]: a.transpose(*(1 + inputs.index(dim) for dim in of_a), 0),
        NAMES[1]: b.transpose(b.ndim - 1, *(outputs.index(dim) for dim in of_b)),
    }


def import_adapter(
    source: str | os.PathLike[str], base: str | os.PathLike[str], out: str | os.PathLike[str]
) -> AdapterFiles:
    """Adds an adapter in PEFT's format to imported weights, in a new folder.

    Args:
      source: a folder with adapter_config.json and adapter_model.safetensors.
      base: the output of `import_weights` for its base model.
      out: the folder to create, for `spanax generate OUT`, `spanax train OUT` or `spanax export OUT --merge`.

    Raises:
      AdapterError: the adapter is of another base model, or is not plain LoRA.
      DataError: a file is invalid.
      WriteError: `out` is not empty, or cannot be written.
    """
    source, base, out = local_path(source), local_path(base), local_path(out)
    rank, alpha = _read_config(source)
    if not is_imported(base):
        raise AdapterError(f"'{base}' has no imported weights.", fix="--base with a folder that spanax import wrote")
    model = read_model(base)
    if model.folder is None or model.adapters is not None:
        raise AdapterError(f"'{base}' has adapters already.", fix="the weights without them")
    family = family_of(model.kind, model.config)
    arrays = arrays_of(family, params_of(partial(model_class(model.kind, model.into).build, model.config)))
    path = source / FILE
    stored = {_full_name(name, family): tensor for name, tensor in tensors(inside(path, source)).items()}
    checkpoint = weights.Source.of(base)
    _check_base(path, _base_digest(_Layers(checkpoint), arrays))
    parts = {name: checkpoint.part(name) for name in checkpoint.saved}
    adapted = dict.fromkeys((array.stacked for array in arrays), 0)
    for array in arrays:
        stem = array.names[0].removesuffix(".weight")
        a_RI = stored.pop(f"{stem}.lora_A.weight", None)
        b_OR = stored.pop(f"{stem}.lora_B.weight", None)
        if a_RI is None or b_OR is None:
            continue
        adapted[array.stacked] += 1
        layer = array.path.rpartition(".")[0]
        for name, values in _from_tensors(array, a_RI, b_OR).items():
            parts[f"{layer}.{name}"] = weights.Part(values.shape, values.dtype, partial(np.asarray, values))
    if stored:
        what = f"{len(stored)} tensors of '{path}' belong to no layer of '{base}'."
        raise AdapterError(what, where=", ".join(list(stored)[:3]), fix="the base model that it was trained for")
    num_layers = Counter(array.stacked for array in arrays)
    partly = [name for name, count in adapted.items() if 0 < count < num_layers[name]]
    if partly:
        what = f"'{path}' adapts {adapted[partly[0]]} of {num_layers[partly[0]]} layers."
        raise AdapterError(what, where=partly[0], fix="an adapter of all layers")
    modules = tuple(name.removesuffix(".kernel") for name, count in adapted.items() if count)
    adapters = LoRA(rank, alpha, modules)
    with writing(out):
        for file in IMPORTED:
            owners = [folder for folder in (source, base) if Folder.of(folder).kind(file) is not None]
            for folder in owners[:1]:
                copy_out(folder, file, out)
        adapted_model = replace(model, adapters=adapters, folder=out)
        write_model(out, adapted_model)
        plan = weights_plan(imported_program(adapted_model, out), {})
        weights.write(out, parts, plan_json=plan.to_json(), meta={"imported": {"kind": "adapter", "from": source.name}})
    num_params = sum(math.prod(part.shape) for name, part in parts.items() if name.rpartition(".")[2] in NAMES)
    return AdapterFiles(family.name, str(out), str(adapters), num_params)


def is_adapter(folder: Path) -> bool:
    """Returns whether a folder has an adapter in the format of PEFT."""
    return (folder / CONFIG).exists()


def _read_config(folder: Path) -> tuple[int, float]:
    """Returns the rank and alpha of an adapter.

    Raises:
      DataError: the config is missing or invalid.
      AdapterError: it is not that of plain LoRA.
    """
    path = folder / CONFIG
    with FileErrors(WeightsError, f"cannot read '{path}'."):
        config = read_json(inside(path, folder))
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    odd = [f"{key}: {config[key]!r}" for key, plain in PLAIN.items() if config.get(key) not in (None, *plain)]
    if config.get("peft_type") != "LORA":
        odd = [f"peft_type: {config.get('peft_type')!r}"]
    if odd:
        raise AdapterError(f"'{path}' is not plain LoRA.", where="; ".join(odd)[:200])
    rank: Any = config.get("r")
    alpha: Any = config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or alpha <= 0:
        raise WeightsError(
            f"'{path}' has no valid r and lora_alpha.", where=f"r: {rank!r}, lora_alpha: {alpha!r}"[:200]
        )
    return rank, float(alpha * (rank**0.5 if config.get("use_rslora") else 1))


def _full_name(name: str, family: Family) -> str:
    """Returns the name of a tensor of an adapter in the model with a head."""
    name = name.removeprefix(PREFIX)
    return name if name.startswith(family.prefix) else family.prefix + name


def _check_base(path: Path, digest: str) -> None:
    """Raises AdapterError if an adapter that Spanax wrote was trained for another base model."""
    try:
        with safe_open(path, framework="numpy") as file:
            known = (file.metadata() or {}).get(BASE, digest)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"cannot read '{path}'.", where=first_line(error)) from None
    if known != digest:
        what = f"the adapter '{path}' was trained for another base model: its norms and biases differ."
        raise AdapterError(what, fix="the base model that it was trained for")
