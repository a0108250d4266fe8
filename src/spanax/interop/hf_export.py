"""Export of a checkpoint's weights as safetensors for transformers, one array at a time."""

import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from spanax.documents import parse_json
from spanax.entries.folder import Folder
from spanax.entries.local_path import local_path
from spanax.entries.names import IMPORTED, OF_TOKENIZER, TOKENIZER, TOKENIZER_CONFIG
from spanax.errors import EntryError, WorkloadError, first_line
from spanax.interop.auxiliary_files import copy_out, read_names, writing
from spanax.interop.configs import CONFIG, config_json
from spanax.interop.dims import tensor_of
from spanax.interop.families import Family, family
from spanax.interop.hf_import import check_dtype, params_of
from spanax.interop.safetensors import INDEX, SINGLE, Writer, parse_index, partition
from spanax.interop.tensor_matching import Array, arrays_of
from spanax.models.imported import MODELS, is_imported, read_shape
from spanax.models.workloads import load
from spanax.train.data.text.tokenizer import tokenizer_config
from spanax.train.record.folder import recorded, saved_tokenizer
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
    """

    kind: str
    out: str
    step: int
    num_params: int
    dtypes: tuple[str, ...]
    num_tensors: int
    files: Mapping[str, int]

    def __str__(self) -> str:
        return (
            f"{self.kind}: {count_text(self.num_params)} parameters of step {self.step} as {self.num_tensors} tensors "
            f"in {' and '.join(self.dtypes)}, {bytes_text(sum(self.files.values()))} in {', '.join(self.files)} "
            f"of {self.out}"
        )


@dataclass(frozen=True)
class _Origin:
    """The config of a checkpoint's model, the naming scheme of its tensors, and the folder it was imported to."""

    config: Any
    is_bare: bool = False
    twice: tuple[str, ...] = ()
    folder: Path | None = None


@dataclass(frozen=True)
class _Named:
    """A tensor to write: its name, its array and index along `*`, its shape and its dtype."""

    name: str
    array: Array
    index: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def export_weights(
    checkpoint: str | os.PathLike[str],
    kind: str,
    out: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    workload: str | None = None,
    file_bytes: int = FILE_BYTES,
) -> Exported:
    """Writes the parameters of a checkpoint as safetensors and config.json for transformers.

    The export of a checkpoint that `import_weights` wrote is identical to the import byte for byte, including the
    accompanying files. Host memory holds two copies of one array at a time; the arrays of a trained run are stacked
    over layers.

    Args:
      checkpoint: a run folder, a folder of checkpoints, or the output of `import_weights`.
      kind: the name of the family: `gpt2`, `llama` or `vit`.
      out: the folder to create.
      dtype: float32, bfloat16 or float16 to replace the dtype of the checkpoint.
      workload: a name, or file.py:name, of the workload of the checkpoint, if its folder does not record it.
      file_bytes: the maximum size of a file.

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
    tables, out = family(kind), local_path(out)
    check_dtype(dtype)
    source = weights.Source.of(checkpoint)
    origin = _origin(Path(checkpoint), kind, workload)
    config = _with_saved_sizes(kind, origin.config, source.saved)
    arrays = arrays_of(tables, params_of(kind, config))
    saved_as = _saved(source, arrays)
    listed = _listed(tables, arrays, source, saved_as, origin, dtype)
    dtypes = tuple(sorted({tensor.dtype for tensor in listed.values()}))
    imported = None if origin.folder is None else _read_config(origin.folder)  # raises before gigabytes are written
    with writing(out):
        index = _imported_index(listed, origin)
        files = _files(listed, index, file_bytes)
        _write(source, saved_as, listed, files, out)
        if len(files) > 1:
            _write_index(listed, files, None if index is None else origin.folder, out)
        _write_auxiliary(saved_tokenizer(Path(checkpoint)), origin.folder, out)
        _write_config(config_json(tables, config, dtypes[-1]), imported, origin.folder, out)
    num_params = sum(math.prod(array.shape) for array in arrays)
    sizes = {name: (out / name).stat().st_size for name in files}
    return Exported(kind, str(out), source.step, num_params, dtypes, len(listed), sizes)


def _write_auxiliary(tokenizer: str | None, imported: Path | None, out: Path) -> None:
    """Writes the files that accompany weights: those of the imported folder, and the tokenizer of the run."""
    origin = None if imported is None else Folder.of(imported)
    names = [name for name in IMPORTED[:-1] if name != CONFIG and origin is not None and origin.kind(name) is not None]
    is_origins = origin is not None and TOKENIZER in names and origin.read(TOKENIZER).decode("utf-8") == tokenizer
    if tokenizer is not None and not is_origins:  # the others belong to the tokenizer of the imported weights
        names = [name for name in names if name not in OF_TOKENIZER]
        (out / TOKENIZER).write_text(tokenizer, encoding="utf-8")
        (out / TOKENIZER_CONFIG).write_text(json.dumps(tokenizer_config(tokenizer), indent=2) + "\n")
    for name in names:
        if imported is not None:
            copy_out(imported, name, out)


def _origin(checkpoint: Path, kind: str, workload: str | None) -> _Origin:
    """Returns the origin of a checkpoint from its folder, its run or a workload.

    Raises:
      SpanaxError: the model is not recorded, or is of another kind.
    """
    name = workload or (str(checkpoint) if is_imported(checkpoint) else recorded(checkpoint).get("workload"))
    if name is None:
        raise WorkloadError(f"'{checkpoint}' does not record its model.", fix="--workload NAME, or file.py:name")
    if is_imported(Path(name)):
        kind_of_folder, config = read_shape(Path(name))
        if kind_of_folder != kind:
            raise WorkloadError(
                f"'{checkpoint}' was imported as {kind_of_folder}, not {kind}.", fix=f"--as {kind_of_folder}"
            )
        return _Origin(config, *read_names(Path(name)), Path(name))
    model = nnx.eval_shape(lambda: load(name).build(nnx.Rngs(0)))
    config = getattr(model, "config", None)
    if not isinstance(model, MODELS[kind][0]) or not isinstance(config, MODELS[kind][1]):
        candidates = [name_of_kind for name_of_kind, (model_kind, _) in MODELS.items() if isinstance(model, model_kind)]
        what = f"'{name}' is a {type(model).__name__}, which cannot be exported as '{kind}'."
        raise WorkloadError(what, fix=f"--as {candidates[0]}" if candidates else f"a model of {', '.join(MODELS)}")
    return _Origin(config)


def _with_saved_sizes(kind: str, config: Any, saved: Mapping[str, str]) -> Any:
    """Sets the vocabulary size and sequence length of a config to those saved, which a run may have changed."""
    sizes = {}
    if kind != "vit" and "embed" in saved:
        sizes["vocab_size"] = _shape(saved["embed"])[0]
    if kind == "gpt2" and "positions" in saved:
        sizes["seq_len"] = _shape(saved["positions"])[0]
    return replace(config, **sizes)


def _shape(summary: str) -> tuple[int, ...]:
    return tuple(int(size) for size in summary.partition("[")[2].rstrip("]").split(",") if size)


def _saved(source: weights.Source, arrays: list[Array]) -> dict[str, tuple[str, int | None]]:
    """Returns the path of each array in the checkpoint, and its layer index if layers are stacked.

    Raises:
      DataError: an array is missing, or has another shape.
    """
    saved_names: dict[str, tuple[str, int | None]] = {}
    num_layers, diff = Counter(array.weight.path for array in arrays), []
    for array in arrays:
        path, number, shape = array.path, None, array.shape
        stacked = array.weight.path.replace(".*", "")
        if path not in source.saved and stacked in source.saved:
            number = next(int(part) for part in path.split(".") if part.isdecimal())
            path, shape = stacked, (num_layers[array.weight.path], *shape)
        has = source.saved.get(path, "nothing")
        if _shape(has) != shape or has == "nothing":
            diff.append(f"{path}: expected {list(shape)}, saved {has}")
        saved_names[array.path] = (path, number)
    for path in sorted(source.saved.keys() - {path for path, _ in saved_names.values()}):
        diff.append(f"{path}: expected nothing, saved {source.saved[path]}")
    if diff:
        diff = list(dict.fromkeys(diff))
        what = f"checkpoint step {source.step} is of another model: {len(diff)} arrays differ."
        raise WorkloadError(
            what, where=f"{source.folder}: {'; '.join(diff[:3])}", fix="--workload NAME, the workload of the checkpoint"
        )
    return saved_names


def _listed(
    tables: Family,
    arrays: list[Array],
    source: weights.Source,
    saved_as: Mapping[str, tuple[str, int | None]],
    origin: _Origin,
    dtype: str | None,
) -> dict[str, _Named]:
    """Returns the tensors to write by name."""
    tensors: dict[str, _Named] = {}
    for array in arrays:
        tensor_dtype = dtype or source.saved[saved_as[array.path][0]].partition("[")[0]
        for index, family_name in enumerate(array.names):
            name = family_name.removeprefix(tables.prefix) if origin.is_bare else family_name
            copies = [copy for copy in origin.twice if family_name == tables.tied[1]]
            for tensor_name in (name, *copies):
                tensors[tensor_name] = _Named(tensor_name, array, index, array.tensor_shape, tensor_dtype)
    return tensors


def _imported_index(listed: Mapping[str, _Named], origin: _Origin) -> dict[str, str] | None:
    """Returns the imported index (tensor -> file), if there is one with the same tensors."""
    if origin.folder is None or Folder.of(origin.folder).kind(INDEX) is None:
        return None
    index = parse_index(partial(Folder.of(origin.folder).read, IMPORTED[-1]), origin.folder / INDEX)
    return index if index.keys() == listed.keys() else None


def _files(listed: Mapping[str, _Named], index: dict[str, str] | None, file_bytes: int) -> dict[str, list[str]]:
    """Assigns tensors to files: by the imported index, or up to `file_bytes` per file."""
    if index is not None:
        return {file: [name for name in index if index[name] == file] for file in sorted(set(index.values()))}
    parts = partition([(name, tensor.num_bytes) for name, tensor in listed.items()], file_bytes)
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    return {f"model-{number:05}-of-{len(parts):05}.safetensors": names for number, names in enumerate(parts, 1)}


def _write(
    source: weights.Source,
    saved_as: Mapping[str, tuple[str, int | None]],
    listed: Mapping[str, _Named],
    files: Mapping[str, list[str]],
    out: Path,
) -> None:
    """Writes all tensors to their files, reading each array of the checkpoint once."""
    parts: dict[str, list[_Named]] = {}
    for tensor in listed.values():
        parts.setdefault(saved_as[tensor.array.path][0], []).append(tensor)
    with ExitStack() as stack:
        writers: dict[str, Writer] = {}
        for file, names in files.items():
            writer = stack.enter_context(Writer(out / file, {name: listed[name] for name in names}))
            writers |= dict.fromkeys(names, writer)
        for path, named in parts.items():
            array = _read(source, path)
            for tensor in named:
                _, number = saved_as[tensor.array.path]
                part = array if number is None else array[number]
                dims, writer = tensor.array.weight.dims, writers[tensor.name]
                writer.put(tensor.name, tensor_of(dims, part, tensor.index).astype(tensor.dtype, copy=False))
            del array, part  # before the next is read


def _read(source: weights.Source, path: str) -> np.ndarray:
    """Reads an array of a checkpoint to host memory."""
    summary = source.saved[path]
    # A NumPy view of a scalar as target takes no memory; a JAX array would temporarily be copied.
    target = np.broadcast_to(np.zeros((), summary.partition("[")[0]), _shape(summary))
    return source.read({path: target})[path]


def _write_index(
    listed: Mapping[str, _Named], files: Mapping[str, list[str]], imported: Path | None, out: Path
) -> None:
    """Writes the index (tensor -> file), copying the imported index if there is one."""
    if imported is not None:
        copy_out(imported, IMPORTED[-1], out)
        return
    num_params = sum(math.prod(tensor.shape) for tensor in listed.values())
    num_bytes = sum(tensor.num_bytes for tensor in listed.values())
    file_by_name = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_parameters": num_params, "total_size": num_bytes}, "weight_map": file_by_name}
    (out / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _read_config(folder: Path) -> dict[str, Any]:
    """Reads the config.json that was imported with the weights of a folder.

    Raises:
      DataError: it cannot be read, or is not a JSON object.
    """
    try:
        config = parse_json(Folder.of(folder).read(IMPORTED[0]))
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    except EntryError:
        raise
    except (OSError, ValueError) as error:
        what = f"cannot read '{folder / CONFIG}', which was imported with the weights."
        raise WorkloadError(what, where=first_line(error), fix="import the weights again") from None
    return config


def _write_config(exported: dict[str, Any], imported: dict[str, Any] | None, folder: Path | None, out: Path) -> None:
    """Writes config.json: the imported one, with the dtype replaced if it differs, or else the default."""
    config = exported if imported is None else imported
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    if folder is not None and config.get(key) in (None, exported["dtype"]):
        copy_out(folder, IMPORTED[0], out)
        return
    (out / CONFIG).write_text(json.dumps(config | {key: exported["dtype"]}, indent=2, sort_keys=True) + "\n")
