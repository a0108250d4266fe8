"""`spanax export`: writes the parameters of a checkpoint for Hugging Face."""

from dataclasses import asdict, dataclass
from pathlib import Path

from tyro.conf import Positional

from spanax.commands.answer import Answer
from spanax.commands.weights.host_memory import ArchitectureFlag, use_host_memory


@dataclass(frozen=True)
class ExportCommand:
    """Write the parameters of a run or checkpoint as safetensors and config.json, for transformers.

    Attributes:
      checkpoint: a run folder, a folder of checkpoints, or the output of spanax import.
      kind: gpt2, vit, llama (also for those that follow), qwen2, qwen3 or gemma.
      output_dir: the folder to create.
      dtype: float32, bfloat16 or float16, instead of the saved dtype.
      workload: the workload of the checkpoint, if its folder does not record it.
      file_size: maximum size of one file.
      json: print one JSON object.
      traceback: show the full traceback of an error.
    """

    checkpoint: Positional[Path]
    kind: ArchitectureFlag
    output_dir: Path
    dtype: str | None = None
    workload: str | None = None
    file_size: str = "5 GB"
    json: bool = False
    traceback: bool = False


def answer(command: ExportCommand) -> Answer:
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
    )
    return Answer(str(result), asdict(result))
