"""`spanax import`, `export` and `export-rules`: weights of Hugging Face, and rules of MaxText and Flax."""

import ctypes
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, Positional, arg

from spanax.commands.answer import Answer
from spanax.errors import MissingError
from spanax.train.flags import BatchSizeFlags, BatchSizes

ArchitectureFlag = Annotated[str, arg(name="as")]
"""The flag --as."""

M_MMAP_THRESHOLD = -3
"""Parameter of mallopt(3). Source: malloc.h of glibc."""


def use_host_memory() -> None:
    """Selects JAX's CPU backend, and maps large arrays separately.

    Without it, glibc's pools retain a tenth of a model after its arrays are freed.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)


@dataclass(frozen=True)
class ImportCommand:
    """Convert Hugging Face weights into a checkpoint for spanax train CKPT, or --init CKPT.

    Attributes:
      source: a folder with safetensors and config.json, or one file next to its config.json.
      kind: a family, such as llama. Default: that of config.json; with --into, any class.
      output_dir: the folder to create.
      into: FILE.py:Class of the model, if it is not built in.
      map: a TOML file with the arrays of a class of your own that names and shapes do not determine.
      dry_run: list which tensor is which array, and write nothing.
      dtype: float32, bfloat16 or float16, instead of the dtype of the tensors.
      base: of an adapter of PEFT, the imported weights that it is for.
      json: print one JSON object.
      traceback: show the full traceback of an error.
    """

    source: Positional[Path]
    kind: Annotated[str | None, arg(name="as")] = None
    output_dir: Path | None = None
    into: str | None = None
    map: Path | None = None
    dry_run: bool = False
    dtype: str | None = None
    base: Path | None = None
    json: bool = False
    traceback: bool = False


def import_answer(command: ImportCommand) -> Answer:
    """Writes the checkpoint.

    Raises:
      SpanaxError: the architecture, class or dtype is unknown.
      DataError: the weights cannot be read, or do not match.
      WriteError: the checkpoint cannot be written.
    """
    use_host_memory()
    from spanax.interop.adapter import import_adapter, is_adapter
    from spanax.interop.hf_import import import_weights, match_weights

    if command.base is None and is_adapter(command.source):
        fix = "--base weights/NAME, the imported weights that it is for"
        raise MissingError(f"'{command.source}' is an adapter.", fix=fix)
    if command.dry_run:
        matched = match_weights(command.source, command.kind, into=command.into, mapping=command.map)
        return Answer(str(matched), matched.to_json())
    if command.output_dir is None:
        raise MissingError("--output-dir is missing.", fix="--output-dir weights/NAME, or --dry-run")
    if command.base is not None:
        adapter = import_adapter(command.source, command.base, command.output_dir)
        return Answer(f"{adapter}\nto train from it: spanax train {adapter.out} --data ...", asdict(adapter))
    result = import_weights(
        command.source,
        command.kind,
        command.output_dir,
        dtype=command.dtype,
        into=command.into,
        mapping=command.map,
    )
    fields = asdict(result)
    return Answer(str(result), fields | {"kept": fields.pop("auxiliary_files")})


@dataclass(frozen=True)
class ExportCommand:
    """Write the parameters of a run or checkpoint as safetensors and config.json, for transformers.

    Attributes:
      checkpoint: a run folder, a folder of checkpoints, or the output of spanax import.
      kind: a family, such as llama.
      output_dir: the folder to create.
      dtype: float32, bfloat16 or float16, instead of the saved dtype.
      workload: the workload of the checkpoint, if its folder does not record it.
      file_size: maximum size of one file.
      merge: of a run with --lora, write the weights with its adapters added; otherwise only the adapters are written,
        as PEFT does.
      json: print one JSON object.
      traceback: show the full traceback of an error.
    """

    checkpoint: Positional[Path]
    kind: ArchitectureFlag
    output_dir: Path
    dtype: str | None = None
    workload: str | None = None
    file_size: str = "5 GB"
    merge: Annotated[bool, FlagCreatePairsOff] = False
    json: bool = False
    traceback: bool = False


def export_answer(command: ExportCommand) -> Answer:
    """Writes the files.

    Raises:
      SpanaxError: the architecture, dtype or file size is invalid.
      DataError: the checkpoint cannot be read.
      WriteError: the files cannot be written.
    """
    use_host_memory()
    from spanax.interop.hf_export import export_weights
    from spanax.units import quantity

    file_bytes = int(quantity(command.file_size, "bytes", key="--file-size", where=""))
    result = export_weights(
        command.checkpoint,
        command.kind,
        command.output_dir,
        dtype=command.dtype,
        workload=command.workload,
        file_bytes=file_bytes,
        merge=command.merge,
    )
    return Answer(str(result), asdict(result))


@dataclass(frozen=True)
class ExportRulesCommand:
    """Print a layout as logical axis names and rules, for MaxText and Flax.

    Attributes:
      workload: a name, or file.py:name.
      mesh: sizes of the mesh axes, slowest first.
      layout: name of the layout. Default: what the names of the mesh axes imply.
      json: print one JSON object.
      traceback: show the full traceback of an error.
    """

    workload: Positional[str]
    mesh: str
    layout: str | None = None
    sizes: BatchSizeFlags = BatchSizes()
    json: bool = False
    traceback: bool = False


def rules_answer(command: ExportRulesCommand) -> Answer:
    """Returns the rules of the planned layout.

    Raises:
      SpanaxError: the workload, layout or mesh is invalid.
    """
    use_host_memory()
    import spanax
    from spanax.interop.rules import export_rules
    from spanax.models.workloads import load

    program = command.sizes.load(partial(load, command.workload)).trace()
    mesh = spanax.MeshShape.of(command.mesh)
    plan = spanax.plan(program, spanax.cluster(f"cpu:{mesh.size}"), layout=command.layout, mesh=mesh)
    rules = export_rules(plan)
    return Answer(str(rules), {"workload": command.workload, **rules.to_json()})
