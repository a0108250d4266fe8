"""Workloads of folders that `spanax import` wrote."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from spanax import Workload
from spanax.adapters.lora import LoRA
from spanax.documents import parse_json
from spanax.entries.folder import Folder
from spanax.entries.names import MODEL
from spanax.errors import EntryError, FileError, RangeError, WorkloadError, first_line
from spanax.models import gpt, images, llama, vit
from spanax.schema import parsed
from spanax.train.record.folder import recorded

MODELS: dict[str, tuple[Any, Any]] = {
    "gpt2": (gpt.GPT, gpt.GPTConfig),
    "llama": (llama.Llama, llama.LlamaConfig),
    "vit": (vit.ViT, vit.ViTConfig),
}
"""The supported models by kind: the module and its configuration class."""

SEQ_LEN = 4096
"""The default limit of tokens per example, since a model may support a hundred thousand positions."""


def workload_of(kind: str, config: Any, folder: Path, adapters: LoRA | None = None) -> Callable[..., Workload]:
    """Returns a function of the sizes of a batch: it returns the workload that fine-tunes the weights in a folder."""
    if adapters is not None:
        return partial(_adapted_workload, workload_of(kind, config, folder), adapters)
    build = partial(MODELS[kind][0], replace(config, remat=True))
    options = {"build": build, "learning_rate": 2e-5, "num_steps": 1000, "init": str(folder)}
    if kind == "vit":
        return partial(_image_workload, config, options)
    return partial(_text_workload, kind, config, folder, options)


def _adapted_workload(base: Callable[..., Workload], adapters: LoRA, **sizes: int) -> Workload:
    return base(**sizes).adapted(adapters)


def _image_workload(config: Any, options: Mapping[str, Any], *, batch_size: int | None = None) -> Workload:
    return Workload(batch=images.example_batch(batch_size or 256, config.image_size), loss=images.loss, **options)


def _text_workload(
    kind: str,
    config: Any,
    folder: Path,
    options: Mapping[str, Any],
    *,
    batch_size: int | None = None,
    seq_len: int | None = None,
    vocab_size: int | None = None,
    is_chat: bool = False,
) -> Workload:
    """Returns a workload on text, with the folder's tokenizer.

    `vocab_size`, that of the trainer's tokenizer, does not matter: the weights determine it, and the trainer compares.

    Raises:
      SpanaxError: `seq_len` exceeds the model's learned positions.
    """
    if kind == "gpt2" and (seq_len or 0) > config.seq_len:
        what = f"'{folder}' has {config.seq_len} positions, but --seq-len is {seq_len}."
        raise RangeError(what, fix=f"--seq-len {config.seq_len}")
    return Workload(
        batch=gpt.example_batch(batch_size or 8, seq_len or min(config.seq_len, SEQ_LEN), is_chat),
        loss=gpt.loss,
        source="python",
        tokenizer=str(folder / "tokenizer.json"),
        vocab_size=config.vocab_size,
        **options,
    )


def is_imported(folder: Path) -> bool:
    """Returns whether a folder contains imported weights."""
    return Folder.of(folder).kind(MODEL) is not None


@dataclass(frozen=True)
class SavedModel:
    """The model of saved weights.

    Attributes:
      kind: its kind.
      config: its configuration.
      is_bare: whether the names of its tensors lack the prefix.
      twice: the names of duplicate tensors.
      folder: the folder to which the weights were imported; None for those of another run.
      adapters: those of an imported adapter.
    """

    kind: str
    config: Any
    is_bare: bool = False
    twice: tuple[str, ...] = ()
    folder: Path | None = None
    adapters: LoRA | None = None


def read_model(folder: Path) -> SavedModel:
    """Reads the model whose weights are in a folder.

    Raises:
      DataError: the description is missing or invalid.
    """
    try:
        data = parse_json(Folder.of(folder).read(MODEL))
        config = parsed(MODELS[data["model"]][1], data["shape"])
        naming = data["theirs"]
        adapters = LoRA.parse(data["lora"]) if "lora" in data else None
        twice = tuple(map(str, naming["twice"]))
        return SavedModel(data["model"], config, bool(naming["is_bare"]), twice, folder, adapters)
    except EntryError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileError(f"'{folder / MODEL}' does not describe a model.", where=first_line(error)) from None


def saved_workload(checkpoint: Path, workload: str | None) -> str:
    """Returns the name of the workload of a checkpoint: as given, the folder of imported weights, or as a run recorded.

    Raises:
      WorkloadError: there is none.
    """
    name = workload or (str(checkpoint) if is_imported(checkpoint) else recorded(checkpoint).get("workload"))
    if name is None:
        raise WorkloadError(f"'{checkpoint}' does not record its model.", fix="--workload NAME, or file.py:name")
    return str(name)


def from_folder(folder: Path) -> Callable[..., Workload]:
    """Returns a function that builds the workload of a folder of weights for given batch sizes.

    Raises:
      DataError: the folder's description of the model is missing or invalid.
    """
    model = read_model(folder)
    return workload_of(model.kind, model.config, folder, model.adapters)
