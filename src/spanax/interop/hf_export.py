"""Export of a checkpoint's weights as safetensors for transformers, one array at a time."""

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from spanax import Workload
from spanax.entries.folder import Folder
from spanax.entries.local_path import local_path
from spanax.entries.names import IMPORTED, OF_TOKENIZER, TOKENIZER, TOKENIZER_CONFIG
from spanax.errors import AdapterError, WorkloadError
from spanax.interop.adapter import AdapterFiles, Merged, export_adapter, merged
from spanax.interop.auxiliary_files import copy_out, read_imported, writing
from spanax.interop.configs import CONFIG, Family, config_json, family_of, members
from spanax.interop.hf_import import check_dtype, params_of
from spanax.interop.mapping import Array, arrays_of
from spanax.interop.safetensors import INDEX, SINGLE, Writer, parse_index
from spanax.models.imported import MODELS, SavedModel, is_imported, model_class, read_model, saved_workload
from spanax.models.workloads import saved_definition
from spanax.train.data.text.chat_template import TEMPLATE
from spanax.train.data.text.tokenizer import tokenizer_config
from spanax.train.record.folder import saved_template, saved_tokenizer
from spanax.train.state import weights
from spanax.units import bytes_text, count_text

FILE_BYTES = 5_000_000_000
"""The default maximum size of a file."""


@dataclass(frozen=True)
class Exported:
    """A summary of exported weights.

    Attributes:
      kind: the name of the family.
      out: the folder with the files.
      step: the step of the checkpoint.
      num_params: the number of parameters.
      dtypes: the dtypes of the tensors.
      num_tensors: the number of tensors.
      files: name of a file -> size in bytes.
      is_averaged: whether they are the averages of the parameters, of `spanax train --ema`.
    """

    kind: str
    out: str
    step: int
    num_params: int
    dtypes: tuple[str, ...]
    num_tensors: int
    files: Mapping[str, int]
    is_averaged: bool = False

    def __str__(self) -> str:
        averaged = "averaged " if self.is_averaged else ""
        return (
            f"{self.kind}: {count_text(self.num_params)} {averaged}parameters of step {self.step} as "
            f"{self.num_tensors} tensors in {' and '.join(self.dtypes)}, {bytes_text(sum(self.files.values()))} in "
            f"{', '.join(self.files)} of {self.out}"
        )


def export_weights(
    checkpoint: str | os.PathLike[str],
    kind: str,
    out: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    workload: str | None = None,
    file_bytes: int = FILE_BYTES,
    merge: bool = False,
) -> Exported | AdapterFiles:
    """Writes the parameters of a checkpoint as safetensors and config.json for transformers.

    The export of a checkpoint that `import_weights` wrote is identical to the import byte for byte, including the
    accompanying files. Host memory holds two copies of one array at a time; the arrays of a trained run are stacked
    over layers.

    Args:
      checkpoint: a run folder, a folder of checkpoints, or the output of `import_weights`.
      kind: the name of a family, as in `import_weights`.
      out: the folder to create.
      dtype: float32, bfloat16 or float16 to replace the dtype of the checkpoint.
      workload: a name, or file.py:name, of the workload of the checkpoint, if its folder does not record it.
      file_bytes: the maximum size of a file.
      merge: add adapters to the weights. Otherwise a checkpoint with adapters is written as these alone, in the format
        of PEFT.

    Raises:
      DataError: the checkpoint has no valid step, or is of another model.
      SpanaxError: the kind or dtype is unknown, or the model of the checkpoint is unknown.
      WriteError: `out` is not empty, or cannot be written.

    Example:
      >>> from spanax.interop import export_weights
      >>> export_weights("no/such/run", "gpt2", "out")
      Traceback (most recent call last):
      spanax.errors.CheckpointError: no checkpoint found. [SPX506]
        where: ...no/such/run does not exist
        fix: pass the folder that has the numbered steps
    """
    out = local_path(out)
    members(kind)  # raises before files are read
    check_dtype(dtype)
    saved = weights.Source.of(checkpoint)
    definition = saved_definition(Path(checkpoint), workload)
    origin = _origin(Path(checkpoint), kind, saved_workload(Path(checkpoint), workload), definition)
    config = _with_saved_sizes(origin.config, saved.saved)
    family = family_of(kind, config)
    build = partial(model_class(family.model, origin.into).build, config)
    arrays = arrays_of(family, params_of(build))
    if definition.adapters is not None and not merge:
        written = export_adapter(saved, definition.adapters, family, arrays, out)
        _write_auxiliary(saved_tokenizer(Path(checkpoint)), saved_template(Path(checkpoint)), origin.folder, out)
        return written
    if definition.adapters is None and merge:
        raise AdapterError(f"'{checkpoint}' has no adapters to merge.", fix="leave --merge out")
    source = merged(saved, definition)
    stored = _stored(source, arrays)
    listed = _listed(family, stored, source, origin, dtype)
    dtypes = tuple(sorted({str(tensor.dtype) for tensor in listed.values()}))
    imported = None if origin.folder is None else read_imported(origin.folder)  # raises before gigabytes are written
    with writing(out):
        index = _imported_index(listed, origin.folder)
        files = _files(listed, index, file_bytes)
        with ExitStack() as stack:
            writers: dict[str, Writer] = {}
            for file, names in files.items():
                writer = stack.enter_context(Writer(out / file, {name: listed[name] for name in names}))
                writers |= dict.fromkeys(names, writer)
            for path, parts in stored.items():
                for name, values in _tensors(source, path, parts):
                    for output in _outputs(family, origin, name):
                        writers[output].put(output, values.astype(listed[output].dtype, copy=False))
        if origin.folder is not None and index is not None:
            copy_out(origin.folder, IMPORTED[-1], out)
        elif len(files) > 1:
            _write_index(listed, files, out)
        _write_auxiliary(saved_tokenizer(Path(checkpoint)), saved_template(Path(checkpoint)), origin.folder, out)
        described = config_json(family, config, dtypes[-1]) if imported is None else imported
        _write_config(described, dtypes[-1], origin.folder, out)
    num_params = sum(math.prod(array.shape) for array in arrays)
    sizes = {name: (out / name).stat().st_size for name in files}
    return Exported(kind, str(out), source.step, num_params, dtypes, len(listed), sizes, bool(saved.averages))


def _origin(checkpoint: Path, kind: str, name: str, definition: Workload) -> SavedModel:
    """Returns the origin of a checkpoint from its workload, and the name of this.

    Raises:
      SpanaxError: the model is of another kind.
    """
    model = members(kind)[0].model
    if is_imported(Path(name)):
        saved = read_model(Path(name))
        if saved.kind != model:
            raise WorkloadError(f"'{checkpoint}' was imported as {saved.kind}, not {kind}.", fix=f"--as {saved.kind}")
        return saved
    built = nnx.eval_shape(lambda: definition.build(nnx.Rngs(0)))
    config = getattr(built, "config", None)
    candidates = [other for other, types in MODELS.items() if isinstance(built, types[0]) and type(config) is types[1]]
    if model not in candidates:
        what = f"'{name}' is a {type(built).__name__}, which cannot be exported as '{kind}'."
        known = f"a model of {', '.join(MODELS)}, or one that began from imported weights"
        raise WorkloadError(what, fix=f"--as {candidates[0]}" if candidates else known)
    return SavedModel(model, config)


def _with_saved_sizes(config: Any, saved: Mapping[str, str]) -> Any:
    """Sets the vocabulary size and sequence length of a config to those saved, which a run may have changed."""
    sizes = {}
    if hasattr(config, "vocab_size") and "embed" in saved:
        sizes["vocab_size"] = weights.dtype_shape(saved["embed"])[1][0]
        if "positions" in saved:
            sizes["seq_len"] = weights.dtype_shape(saved["positions"])[1][0]
    return replace(config, **sizes)


def _stored(source: weights.Source | Merged, arrays: list[Array]) -> dict[str, list[Array]]:
    """Returns the arrays that each array of the checkpoint consists of: one, or all layers of a stack.

    Raises:
      DataError: an array is missing, or has another shape.
    """
    num_layers = Counter(array.stacked for array in arrays)
    stored: dict[str, list[Array]] = {}
    diff: dict[str, None] = {}
    for array in arrays:
        path = array.path
        shape = array.shape
        if path not in source.saved and array.stacked in source.saved:
            path, shape = array.stacked, (num_layers[array.stacked], *shape)
        saved = source.saved.get(path, "nothing")
        if saved == "nothing" or weights.dtype_shape(saved)[1] != shape:
            diff[f"{path}: expected {list(shape)}, saved {saved}"] = None
        stored.setdefault(path, []).append(array)
    for path in sorted(source.saved.keys() - stored.keys()):
        diff[f"{path}: expected nothing, saved {source.saved[path]}"] = None
    if diff:
        what = f"checkpoint step {source.step} is of another model: {len(diff)} arrays differ."
        where = f"{source.folder}: {'; '.join(list(diff)[:3])}"
        raise WorkloadError(what, where=where, fix="--workload NAME, the workload of the checkpoint")
    return stored


def _outputs(family: Family, origin: SavedModel, name: str) -> tuple[str, ...]:
    """Returns the names that a tensor of a family has in the files."""
    copies = origin.twice if family.tied and name == family.tied[-1] else ()
    return (name.removeprefix(family.prefix) if origin.is_bare else name, *copies)


def _listed(
    family: Family,
    stored: Mapping[str, list[Array]],
    source: weights.Source | Merged,
    origin: SavedModel,
    dtype: str | None,
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the tensors to write by name."""
    return {
        output: jax.ShapeDtypeStruct(array.tensor_shape, dtype or weights.dtype_shape(source.saved[path])[0])
        for path, arrays in stored.items()
        for array in arrays
        for name in array.names
        for output in _outputs(family, origin, name)
    }


def _imported_index(listed: Mapping[str, jax.ShapeDtypeStruct], imported: Path | None) -> dict[str, str] | None:
    """Returns the imported index (tensor -> file), if there is one with the same tensors."""
    if imported is None or Folder.of(imported).kind(INDEX) is None:
        return None
    index = parse_index(partial(Folder.of(imported).read, IMPORTED[-1]), imported / INDEX)
    return index if index.keys() == listed.keys() else None


def _files(
    listed: Mapping[str, jax.ShapeDtypeStruct], index: dict[str, str] | None, file_bytes: int
) -> dict[str, list[str]]:
    """Assigns tensors to files: by the imported index, or up to `file_bytes` per file unless a tensor is larger."""
    if index is not None:
        return {file: [name for name in index if index[name] == file] for file in sorted(set(index.values()))}
    parts: list[list[str]] = [[]]
    room = file_bytes
    for name, tensor in listed.items():
        if parts[-1] and _num_bytes(tensor) > room:
            parts.append([])
            room = file_bytes
        parts[-1].append(name)
        room -= _num_bytes(tensor)
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    return {f"model-{number:05}-of-{len(parts):05}.safetensors": names for number, names in enumerate(parts, 1)}


def _num_bytes(tensor: jax.ShapeDtypeStruct) -> int:
    return int(tensor.size * tensor.dtype.itemsize)


def _tensors(source: weights.Source | Merged, path: str, arrays: list[Array]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of an array of the checkpoint, which is read once."""
    values = source.part(path).make()
    for array in arrays:
        part = values if array.path == path else values[array.layer]
        for name, view in array.views(part):
            yield name, view.reshape(array.tensor_shape)


def _write_index(listed: Mapping[str, jax.ShapeDtypeStruct], files: Mapping[str, list[str]], out: Path) -> None:
    """Writes the index (tensor -> file)."""
    num_params = sum(tensor.size for tensor in listed.values())
    num_bytes = sum(map(_num_bytes, listed.values()))
    file_by_name = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_parameters": num_params, "total_size": num_bytes}, "weight_map": file_by_name}
    (out / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _write_auxiliary(tokenizer: str | None, template: Mapping[str, str], imported: Path | None, out: Path) -> None:
    """Writes the files that accompany weights: those of the imported folder, the tokenizer and template of the run."""
    origin = None if imported is None else Folder.of(imported)
    names = [name for name in IMPORTED[1:-1] if origin is not None and origin.kind(name) is not None]
    is_origins = origin is not None and TOKENIZER in names and origin.read(TOKENIZER).decode("utf-8") == tokenizer
    if tokenizer is not None and not is_origins:  # the others belong to the tokenizer of the imported weights
        names = [name for name in names if name not in OF_TOKENIZER]
        (out / TOKENIZER).write_text(tokenizer, encoding="utf-8")
        (out / TOKENIZER_CONFIG).write_text(json.dumps(tokenizer_config(tokenizer), indent=2) + "\n")
    if template:
        names = [name for name in names if name != TEMPLATE]
        (out / TEMPLATE).write_text(template["template"], encoding="utf-8")
    for name in names:
        if imported is not None:
            copy_out(imported, name, out)


def _write_config(config: dict[str, Any], dtype: str, imported: Path | None, out: Path) -> None:
    """Writes config.json with a dtype; an imported one that has it is copied."""
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    if imported is not None and config.get(key) in (None, dtype):
        copy_out(imported, IMPORTED[0], out)
        return
    (out / CONFIG).write_text(json.dumps(config | {key: dtype}, indent=2, sort_keys=True) + "\n")
