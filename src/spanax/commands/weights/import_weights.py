"""`spanax import`: converts weights of Hugging Face into a checkpoint."""

from dataclasses import asdict, dataclass
from pathlib import Path

from tyro.conf import Positional

from spanax.commands.answer import Answer
from spanax.commands.weights.host_memory import ArchitectureFlag, use_host_memory


@dataclass(frozen=True)
class ImportCommand:
    """Convert Hugging Face weights into a checkpoint for spanax train CKPT, or --init CKPT.

    Attributes:
      source: a folder with safetensors and config.json, or one file next to its config.json.
      kind: gpt2, vit, llama (also for those that follow), mistral (without a window), qwen2, qwen3 or gemma.
      output_dir: the folder to create.
      dtype: float32, bfloat16 or float16, instead of the dtype of the tensors.
      json: print one JSON object.
    """

    source: Positional[Path]
    kind: ArchitectureFlag
    output_dir: Path
    dtype: str | None = None
    json: bool = False


def answer(command: ImportCommand) -> Answer:
    """Writes the checkpoint.

    Raises:
      SpanaxError: the architecture or dtype is unknown.
      DataError: the weights cannot be read.
      WriteError: the checkpoint cannot be written.
    """
    use_host_memory()
    from spanax.interop.hf_import import import_weights

    result = import_weights(command.source, command.kind, command.output_dir, dtype=command.dtype)
    fields = asdict(result)
    return Answer(str(result), fields | {"kept": fields.pop("auxiliary_files")})
