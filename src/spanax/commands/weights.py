"""Commands: the flags of `spanax import`, `export` and `export-rules`, and what carries them out."""

import ctypes
import json as text
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

Kind = Annotated[str, arg(name="as")]


@dataclass(frozen=True)
class ImportCommand:
    """Bring Hugging Face's weights into a checkpoint that spanax train begins from: spanax train CKPT, or --init CKPT.

    Attributes:
      source: a folder with safetensors and config.json, or one file beside its config.json.
      kind: gpt2; llama, for Llama, Qwen2, Qwen3 and Mistral without a window; or vit.
      out: the folder to make.
      dtype: float32, bfloat16 or float16 in place of that of the tensors.
      json: print one JSON object.
    """

    source: Positional[Path]
    kind: Kind
    out: Path
    dtype: str | None = None
    json: bool = False


@dataclass(frozen=True)
class ExportCommand:
    """Write the parameters of a run or checkpoint as safetensors and config.json, for transformers.

    Attributes:
      checkpoint: a run folder, a folder of checkpoints, or what spanax import wrote.
      kind: gpt2, llama or vit.
      out: the folder to make.
      dtype: float32, bfloat16 or float16 in place of the dtype that they are saved in.
      workload: what the checkpoint is of, where its folder does not say.
      file_size: how large a file may become before another one is begun.
      json: print one JSON object.
      traceback: show the full traceback of an error.
    """

    checkpoint: Positional[Path]
    kind: Kind
    out: Path
    dtype: str | None = None
    workload: str | None = None
    file_size: str = "5 GB"
    json: bool = False
    traceback: bool = False


@dataclass(frozen=True)
class ExportRulesCommand:
    """Print a layout as logical axis names and rules, for MaxText and Flax.

    Attributes:
      workload: a name, or file.py:name.
      mesh: axis sizes, slowest first.
      layout: the layout; what the mesh's names mean if left out.
      batch: examples in a batch.
      seq: tokens in an example.
      json: print one JSON object.
      traceback: show the full traceback of an error.
    """

    workload: Positional[str]
    mesh: str
    layout: str | None = None
    batch: int | None = None
    seq: int | None = None
    json: bool = False
    traceback: bool = False


M_MMAP_THRESHOLD = -3
"""Of mallopt(3). Source: malloc.h of glibc."""

INTEROP: dict[str, type] = {"import": ImportCommand, "export": ExportCommand, "export-rules": ExportRulesCommand}


def carry_out(command: Any) -> str:
    """What a command prints.

    Raises:
      SpanaxError: it cannot be carried out; also its kinds DataError and WriteError.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # all of it is done on the host
    with suppress(OSError, AttributeError):
        # Large arrays go back to the system one by one: of glibc's own pools a tenth of a model stays behind.
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
    if isinstance(command, ExportRulesCommand):
        rules = _rules(command)
        return text.dumps({"workload": command.workload, **rules.to_json()}) if command.json else str(rules)
    done = _import(command) if isinstance(command, ImportCommand) else _export(command)
    return text.dumps(asdict(done)) if command.json else str(done)


def _import(command: ImportCommand) -> Any:
    from spanax.interop.hf_import import import_weights

    return import_weights(command.source, command.kind, command.out, dtype=command.dtype)


def _export(command: ExportCommand) -> Any:
    from spanax.interop.hf_export import export_weights
    from spanax.units import quantity

    file_bytes = int(quantity(command.file_size, "bytes", key="--file-size", where=""))
    return export_weights(
        command.checkpoint,
        command.kind,
        command.out,
        dtype=command.dtype,
        workload=command.workload,
        file_bytes=file_bytes,
    )


def _rules(command: ExportRulesCommand) -> Any:
    import spanax
    from spanax.interop.rules import export_rules
    from spanax.models.workloads import load

    workload = load(command.workload, batch_size=command.batch, seq_len=command.seq)
    program = workload.trace(learning_rate=workload.learning_rate, num_steps=workload.num_steps)
    mesh = spanax.MeshShape.of(command.mesh)
    return export_rules(spanax.plan(program, spanax.cluster(f"cpu:{mesh.size}"), layout=command.layout, mesh=mesh))
