"""Import of Hugging Face weights into a checkpoint, one tensor at a time."""

import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

import spanax
from spanax.adapters.lora import LoRA
from spanax.entries.local_path import local_path
from spanax.errors import UnknownNameError, WeightsError, nearest
from spanax.interop.auxiliary_files import auxiliary_files, write_model, writing
from spanax.interop.configs import CONFIG, members, read_config
from spanax.interop.mapping import Array, TensorMatch, arrays_of, match_tensors
from spanax.interop.safetensors import Tensor, tensors
from spanax.models.imported import MODELS, workload_of
from spanax.train.state import weights
from spanax.units import count_text

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Imported:
    """A summary of imported weights.

    Attributes:
      kind: the name of the family.
      out: the folder of the checkpoint.
      num_params: the number of parameters.
      num_tensors: the number of tensors.
      dtypes: the dtypes of the parameters.
      left_out: name pattern of tensors that the model computes -> number of tensors that were omitted.
      twice: names of tensors that are bitwise equal to another tensor.
      auxiliary_files: names of the accompanying files that were copied.
    """

    kind: str
    out: str
    num_params: int
    num_tensors: int
    dtypes: tuple[str, ...]
    left_out: Mapping[str, int]
    twice: tuple[str, ...]
    auxiliary_files: tuple[str, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.kind}: {count_text(self.num_params)} parameters of {self.num_tensors} tensors in "
            f"{' and '.join(self.dtypes)}, into {self.out}"
        ]
        lines += [f"  skipped: {count} x {name}, which the model computes" for name, count in self.left_out.items()]
        lines += [f"  {name} duplicates another tensor, and is stored once" for name in self.twice]
        if self.auxiliary_files:
            lines.append(f"  copied: {', '.join(self.auxiliary_files)}")
        return "\n".join([*lines, f"to train from it: spanax train {self.out} --data ..."])


def import_weights(
    source: str | os.PathLike[str], kind: str, out: str | os.PathLike[str], *, dtype: str | None = None
) -> Imported:
    """Converts Hugging Face weights to a checkpoint that initializes a run.

    Host memory holds at most two copies of the largest tensor. A tensor that is missing, unknown or whose shape differs
    from config.json is an error, in which case nothing is written.

    Args:
      source: a folder with safetensors and config.json, or a safetensors file in a folder with its config.json.
      kind: the name of a family: `gpt2`, `vit`, `llama` (any of those that follow), `mistral` (without a window),
        `qwen2`, `qwen3` or `gemma`.
      out: the folder to create, for `spanax train OUT`, `--init OUT` or `spanax.start(..., init=OUT)`.
      dtype: float32, bfloat16 or float16 to replace the dtype of the tensors.

    Raises:
      DataError: the files are invalid, or the model is not supported.
      SpanaxError: the kind or dtype is unknown.
      WriteError: `out` is not empty, or cannot be written.

    Example:
      >>> import tempfile
      >>> from spanax.interop import import_weights
      >>> import_weights(tempfile.mkdtemp(), "gpt2", "runs/imported")
      Traceback (most recent call last):
      spanax.errors.MissingFileError: '...' has no safetensors files. [SPX503]
        fix: a folder with model.safetensors and config.json
    """
    source, out = local_path(source), local_path(out)
    members(kind)  # raises before files are read
    check_dtype(dtype)
    stored = tensors(source)
    folder = source if source.is_dir() else source.parent
    family, config = read_config(folder, kind)
    if config.num_layers > len(stored):
        what = f"'{folder / CONFIG}' describes {config.num_layers:,} layers, but there are only {len(stored)} tensors."
        raise WeightsError(what, fix="use the config.json of these weights")
    arrays = arrays_of(family, params_of(family.model, config))
    match = match_tensors(family, arrays, stored, str(source))
    for name in match.twice:
        _check_equal(stored[name], match.tensors[family.tied[1]])
    dtypes = _dtypes(arrays, match, dtype)
    parts = {
        array.path: weights.Part(
            array.shape, np.dtype(dtypes[array.stacked]), partial(_read_array, array, match, dtypes[array.stacked])
        )
        for array in arrays
    }
    accompanying = auxiliary_files(folder)
    with writing(out):
        for path in accompanying:
            shutil.copyfile(path, out / path.name)
        write_model(out, family.model, asdict(config), is_bare=match.is_bare, twice=match.twice)
        plan = weights_plan(family.model, config, out, dtypes)
        weights.write(out, parts, plan_json=plan.to_json(), meta={"imported": {"kind": kind, "from": source.name}})
    num_params = sum(math.prod(array.shape) for array in arrays)
    dtype_names = tuple(sorted(set(dtypes.values())))
    names = tuple(path.name for path in accompanying)
    return Imported(kind, str(out), num_params, len(stored), dtype_names, match.left_out, match.twice, names)


def check_dtype(dtype: str | None) -> None:
    """Checks that weights can be converted to a dtype; None is allowed.

    Raises:
      SpanaxError: the dtype is unknown.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UnknownNameError(f"unknown dtype '{dtype}'.", fix=nearest(dtype, DTYPES))


def params_of(model: str, config: Any) -> dict[str, tuple[int, ...]]:
    """Returns the parameter shapes of a model by path; blocks are stacked."""
    built = nnx.eval_shape(lambda: MODELS[model][0](config, nnx.Rngs(0)))
    flat = nnx.to_flat_state(nnx.state(built, nnx.Param))
    return {".".join(map(str, path)): tuple(value.shape) for path, value in flat}


def _read_array(array: Array, match: TensorMatch, dtype: str) -> np.ndarray:
    """Reads the tensors of an array."""
    values = np.empty(array.shape, dtype)
    for name, view in array.views(values):
        view[...] = match.tensors[name].read().reshape(view.shape)
    return values


def _dtypes(arrays: list[Array], match: TensorMatch, dtype: str | None) -> dict[str, str]:
    """Returns the dtype of each array by stacked path: `dtype`, or else that of its tensors, which must agree.

    Raises:
      DataError: the dtypes of the tensors differ.
    """
    dtypes: dict[str, str] = {}
    first: dict[str, str] = {}
    for array in arrays:
        for name in array.names:
            tensor_dtype = dtype or match.tensors[name].dtype
            known = dtypes.setdefault(array.stacked, tensor_dtype)
            first.setdefault(array.stacked, name)
            if tensor_dtype != known:
                raise WeightsError(
                    f"'{name}' is {tensor_dtype}, and '{first[array.stacked]}' is {known}.",
                    where="the layers are stacked into one array",
                    fix=f"--dtype {DTYPES[0]}",
                )
    return dtypes


def weights_plan(
    model: str, config: Any, folder: Path, dtypes: Mapping[str, str], adapters: LoRA | None = None
) -> spanax.Plan:
    """Returns the plan of the parameters on a single device, in the dtypes of the checkpoint."""
    sizes = {} if model == "vit" else {"seq_len": min(config.seq_len, 128)}
    program = workload_of(model, config, folder, adapters)(batch_size=1, **sizes).trace(learning_rate=0.0, num_steps=1)
    plan = spanax.plan(program, spanax.cluster("cpu:1"), layout="data")
    leaves = [
        replace(leaf, dtype=dtype, local_bytes=math.prod(leaf.local_shape) * np.dtype(dtype).itemsize)
        for leaf in plan.leaves
        if (dtype := dtypes.get(leaf.path)) is not None
    ]
    return replace(plan, leaves=tuple(leaves), batch=(), why="as imported")


def _check_equal(copy: Tensor, original: Tensor) -> None:
    is_same_type = (copy.dtype, copy.shape) == (original.dtype, original.shape)
    if not is_same_type or copy.read().view(np.uint8).data != original.read().view(np.uint8).data:
        raise WeightsError(
            f"'{copy.name}' differs from the embedding, and the model ties the two.",
            where=f"tie_word_embeddings is true or missing in config.json; '{copy.file}'",
            fix="use the config.json of these weights",
        )
