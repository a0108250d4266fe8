"""Import of Hugging Face weights into a checkpoint, one tensor at a time."""

import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import spanax
from spanax.entries.local_path import local_path
from spanax.errors import MissingError, UnknownNameError, WeightsError, nearest
from spanax.interop.auxiliary_files import auxiliary_files, write_model, writing
from spanax.interop.configs import CONFIG, config_of, families, members, read_config
from spanax.interop.mapping import SHOWN, Array, TensorMatch, arrays_of, match_tensors, numberless
from spanax.interop.own_class.match import Rows, is_equal, match_own
from spanax.interop.safetensors import Tensor, tensors
from spanax.models.imported import SavedModel, model_class, workload_of
from spanax.models.workloads import builder
from spanax.show.tables import table_text
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
      train: what `spanax train` takes to train from them.
    """

    kind: str
    out: str
    num_params: int
    num_tensors: int
    dtypes: tuple[str, ...]
    left_out: Mapping[str, int]
    twice: tuple[str, ...]
    auxiliary_files: tuple[str, ...]
    train: str

    def __str__(self) -> str:
        lines = [
            f"{self.kind}: {count_text(self.num_params)} parameters of {self.num_tensors} tensors in "
            f"{' and '.join(self.dtypes)}, into {self.out}"
        ]
        lines += [f"  skipped: {count} x {name}, which the model computes" for name, count in self.left_out.items()]
        lines += [f"  {name} duplicates another tensor, and is stored once" for name in self.twice]
        if self.auxiliary_files:
            lines.append(f"  copied: {', '.join(self.auxiliary_files)}")
        return "\n".join([*lines, f"to train from it: spanax train {self.train} --data ..."])


def import_weights(
    source: str | os.PathLike[str],
    kind: str | None,
    out: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    into: str | None = None,
    mapping: str | os.PathLike[str] | None = None,
) -> Imported:
    """Converts Hugging Face weights to a checkpoint that initializes a run.

    Host memory holds at most two copies of the largest tensor. A tensor that is missing, unknown or whose shape differs
    from the model is an error, in which case nothing is written.

    Args:
      source: a folder with safetensors and config.json, or a safetensors file in a folder with its config.json.
      kind: a family, which is `model_type` in config.json, or `llama` for all of its class; None for that of
        config.json, or for an `into` that is not of a family.
      out: the folder to create, for `spanax train OUT`, `--init OUT` or `spanax.start(..., init=OUT)`.
      dtype: float32, bfloat16 or float16 to replace the dtype of the tensors.
      into: `FILE.py:Class` of the model: with a kind, a class that takes the configuration of the family, such as those
        in `examples/models`; without one, any class, which is matched by names and shapes.
      mapping: a TOML file with the rows that names and shapes do not determine.

    Raises:
      DataError: the files are invalid, or the model is not supported.
      SpanaxError: the kind, class or dtype is unknown.
      WriteError: `out` is not empty, or cannot be written.

    Example:
      >>> import tempfile
      >>> from spanax.interop import import_weights
      >>> import_weights(tempfile.mkdtemp(), "gpt2", "runs/imported")
      Traceback (most recent call last):
      spanax.errors.MissingFileError: '...' has no safetensors files. [SPX503]
        fix: a folder with model.safetensors and config.json
    """
    out = local_path(out)
    check_dtype(dtype)
    matched = match_weights(source, kind, into=into, mapping=mapping)
    if matched.problems:
        what = f"{len(matched.problems)} arrays or tensors do not match, of '{into}' and '{source}'."
        fix = "--dry-run lists all; a row for each in --map FILE.toml"
        raise WeightsError(what, where="; ".join(matched.problems[:SHOWN]), fix=fix)
    arrays = matched.arrays
    match = matched.match
    dtypes = _dtypes(arrays, match, dtype)
    parts = {
        array.path: weights.Part(
            array.shape, np.dtype(dtypes[array.stacked]), partial(_read_array, array, match, dtypes[array.stacked])
        )
        for array in arrays
    }
    accompanying = auxiliary_files(matched.folder)
    with writing(out):
        for path in accompanying:
            shutil.copyfile(path, out / path.name)
        if matched.model is not None:
            write_model(out, matched.model)
        plan = weights_plan(matched.program(out), dtypes)
        meta = {"imported": {"kind": matched.kind, "from": Path(source).name}}
        weights.write(out, parts, plan_json=plan.to_json(), meta=meta)
    num_params = sum(math.prod(array.shape) for array in arrays)
    dtype_names = tuple(sorted(set(dtypes.values())))
    names = tuple(path.name for path in accompanying)
    train = str(out) if matched.model is not None else f"FILE.py:WORKLOAD --init {out}"
    return Imported(
        matched.kind, str(out), num_params, matched.num_tensors, dtype_names, match.left_out, match.twice, names, train
    )


@dataclass(frozen=True)
class Matched:
    """The arrays of a model, with the tensors that they consist of.

    Attributes:
      kind: the family, or the class.
      folder: the folder of the tensors.
      arrays: the arrays, with layers unstacked.
      match: their tensors.
      num_tensors: the number of tensors in the files.
      model: the model, which is saved with its weights; None for one of a class whose configuration is unknown.
      build: builds the module.
      problems: a line for each array or tensor that does not match.
    """

    kind: str
    folder: Path
    arrays: list[Array]
    match: TensorMatch
    num_tensors: int
    model: SavedModel | None
    build: Callable[[nnx.Rngs], nnx.Module]
    problems: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = Counter(self.rows())
        rows = [
            (theirs, ours, str(list(shape)), dims, str(count)) for (theirs, ours, shape, dims), count in counts.items()
        ]
        table = table_text(("tensor", "array", "shape", "dims", "number"), rows)
        lines = [f"skipped: {count} x {name}" for name, count in self.match.left_out.items()]
        lines += [f"{name} duplicates another tensor, and is stored once" for name in self.match.twice]
        lines += [f"not matched: {problem}" for problem in self.problems]
        return "\n".join([table, *lines, f"{len(self.arrays)} arrays match; nothing was written"])

    def to_json(self) -> dict[str, Any]:
        """Returns the matches as JSON values."""
        rows = [
            {"tensors": array.names, "array": array.path, "shape": array.shape, "dims": array.dims}
            for array in self.arrays
        ]
        twice = list(self.match.twice)
        return {"arrays": rows, "left_out": dict(self.match.left_out), "twice": twice, "not_matched": self.problems}

    def rows(self) -> Iterator[tuple[str, str, tuple[int, ...], str]]:
        """Yields the tensor, the path, the shape and the dims of each array, with `*` for numbers."""
        for array in self.arrays:
            names = dict.fromkeys(numberless(name) for name in array.names)
            left, _, right = array.dims.partition(" -> ")
            yield ", ".join(names), numberless(array.path), array.shape, "as it is" if left == right else array.dims

    def program(self, out: Path) -> spanax.Program:
        """Returns the traced step of the model, for the plan of its weights in a folder."""
        if self.model is None:
            batch = jax.ShapeDtypeStruct((1,), "float32")
            return spanax.trace(build=self.build, optimizer=optax.sgd(0.0), batch=batch, loss=_sum)
        return imported_program(self.model, out)


def imported_program(model: SavedModel, folder: Path) -> spanax.Program:
    """Returns the traced step of a model, for the plan of its weights in a folder."""
    sizes = {} if hasattr(model.config, "image_size") else {"seq_len": min(model.config.seq_len, 128)}
    return workload_of(model, folder)(batch_size=1, **sizes).trace(learning_rate=0.0, num_steps=1)


def match_weights(
    source: str | os.PathLike[str],
    kind: str | None,
    *,
    into: str | None = None,
    mapping: str | os.PathLike[str] | None = None,
) -> Matched:
    """Returns the arrays of a model and their tensors, as `import_weights` writes them.

    Raises:
      DataError, SpanaxError: as `import_weights`.
    """
    source = local_path(source)
    if kind is not None:
        members(kind)  # raises before files are read
    stored = tensors(source)
    folder = source if source.is_dir() else source.parent
    if kind is None and into is not None:
        return _match_own(source, folder, stored, into, None if mapping is None else Path(mapping))
    if mapping is not None:
        raise MissingError("--map is for the arrays of a class of your own.", fix="--into FILE.py:Class without --as")
    family, config = read_config(folder, kind, into)
    if config.num_layers > len(stored):
        what = f"'{folder / CONFIG}' describes {config.num_layers:,} layers, but there are only {len(stored)} tensors."
        raise WeightsError(what, fix="use the config.json of these weights")
    build = partial(model_class(family.model, into).build, config)
    arrays = arrays_of(family, params_of(build))
    match = match_tensors(family, arrays, stored, str(source))
    for name in match.twice:
        _check_equal(stored[name], match.tensors[family.tied[-1]])
    if into is not None:
        path, _, name = into.rpartition(":")
        into = f"{Path(path).resolve()}:{name}"
    model = SavedModel(family.model, config, into, match.is_bare, match.twice)
    return Matched(kind or family.name, folder, arrays, match, len(stored), model, build)


def _match_own(source: Path, folder: Path, stored: Mapping[str, Tensor], into: str, mapping: Path | None) -> Matched:
    """Returns the arrays of the user's own class, matched by names and shapes."""
    build = builder(into)
    rows = Rows() if mapping is None else Rows.read(mapping)
    family = families().get(str(config_of(folder).get("model_type"))) if (folder / CONFIG).exists() else None
    model = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    arrays, match, problems = match_own(model, stored, family, rows, str(source))
    return Matched(into, folder, arrays, match, len(stored), None, build, tuple(problems))


def _sum(model: nnx.Module, batch: jax.Array) -> jax.Array:
    """A loss that every parameter is part of."""
    return batch.mean() + sum(jax.numpy.sum(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def check_dtype(dtype: str | None) -> None:
    """Checks that weights can be converted to a dtype; None is allowed.

    Raises:
      SpanaxError: the dtype is unknown.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UnknownNameError(f"unknown dtype '{dtype}'.", fix=nearest(dtype, DTYPES))


def params_of(build: Callable[[nnx.Rngs], nnx.Module]) -> dict[str, tuple[int, ...]]:
    """Returns the parameter shapes of a model by path."""
    built = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
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
        dtypes[array.path] = dtypes[array.stacked]
    return dtypes


def weights_plan(program: spanax.Program, dtypes: Mapping[str, str]) -> spanax.Plan:
    """Returns the plan of the parameters on a single device, in the dtypes of the checkpoint."""
    plan = spanax.plan(program, spanax.cluster("cpu:1"), layout="data")
    leaves = [
        replace(leaf, dtype=dtype, local_bytes=math.prod(leaf.local_shape) * np.dtype(dtype).itemsize)
        for leaf in plan.leaves
        if (dtype := dtypes.get(leaf.path)) is not None
    ]
    return replace(plan, leaves=tuple(leaves), batch=(), why="as imported")


def _check_equal(copy: Tensor, original: Tensor) -> None:
    if not is_equal(copy, original):
        raise WeightsError(
            f"'{copy.name}' differs from the embedding, and the model ties the two.",
            where=f"tie_word_embeddings is true or missing in config.json; '{copy.file}'",
            fix="use the config.json of these weights",
        )
