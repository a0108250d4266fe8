"""Workloads of folders that `spanax import` wrote."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from flax import nnx

from spanax import Workload
from spanax.adapters.lora import RATE, LoRA
from spanax.documents import parse_json
from spanax.entries.folder import Folder
from spanax.entries.names import MODEL
from spanax.errors import EntryError, FileError, RangeError, UnknownNameError, WorkloadError, first_line
from spanax.models import gpt, images, llama, moe, vit
from spanax.models.user_file import module_of, no_class
from spanax.schema import parsed
from spanax.trace.workload import AdaptedBuild
from spanax.train.record.folder import recorded


class ModelClass(NamedTuple):
    """A module class, the class of its configuration, and its loss."""

    build: Any
    config: Any
    loss: Callable[..., Any]


MODELS = {
    "gpt2": ModelClass(gpt.GPT, gpt.GPTConfig, gpt.loss),
    "llama": ModelClass(llama.Llama, llama.LlamaConfig, llama.loss),
    "mixtral": ModelClass(moe.Mixtral, moe.MoEConfig, moe.loss),
    "vit": ModelClass(vit.ViT, vit.ViTConfig, images.loss),
}
"""The built-in models by kind."""

SEQ_LEN = 4096
"""The default limit of tokens per example, since a model may support a hundred thousand positions."""


def model_class(kind: str, into: str | None) -> ModelClass:
    """Returns the class of a model: the built-in one of a kind, or that of a user's file.

    Args:
      kind: the kind of the model.
      into: `FILE.py:Class` of a class like the built-in ones: `Class(config, rngs)`, whose `config` is annotated with a
        dataclass. If the file has a `loss(model, batch)`, it is used, and that of GPT otherwise.

    Raises:
      SpanaxError: the file does not exist, or has no such class.
    """
    if into is None:
        return MODELS[kind]
    module, name = module_of(into, "class")
    value = getattr(module, name, None)
    if not isinstance(value, type):
        raise no_class(module, name)
    config = get_type_hints(inspect.getattr_static(value, "__init__")).get("config")
    if not is_dataclass(config):
        what = f"'{into}' takes no configuration."
        raise WorkloadError(what, fix="def __init__(self, config: Config, rngs), where Config is a dataclass")
    return ModelClass(value, config, getattr(module, "loss", gpt.loss))


def workload_of(model: "SavedModel", folder: Path) -> Callable[..., Workload]:
    """Returns a function of the sizes of a batch: it returns the workload that fine-tunes the weights in a folder."""
    config = model.config
    named = model_class(model.kind, model.into)
    with_remat = replace(config, remat=True) if hasattr(config, "remat") else config
    options: dict[str, Any] = {
        "build": partial(named.build, with_remat),
        "loss": named.loss,
        "learning_rate": 2e-5,
        "num_steps": 1000,
        "init": str(folder),
    }
    if model.adapters is not None:
        build = AdaptedBuild(options["build"], model.adapters)
        options |= {"build": build, "wrt": nnx.LoRAParam, "learning_rate": RATE * options["learning_rate"]}
    if model.kind == "mixtral":  # as is usual, each microbatch balances the load of its experts by itself
        options["accumulate"] = "mean"
    if hasattr(config, "image_size"):
        return partial(_image_workload, config, options)
    return partial(_text_workload, model, folder, options)


def _image_workload(config: Any, options: Mapping[str, Any], *, batch_size: int | None = None) -> Workload:
    return Workload(batch=images.example_batch(batch_size or 256, config.image_size), **options)


def _text_workload(
    model: "SavedModel",
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

    A class of the user takes no documents that share a row.

    Raises:
      SpanaxError: `seq_len` exceeds the model's learned positions, or the loss of a user's class is of text only.
    """
    config = model.config
    if is_chat and model.into is not None and options["loss"] is not gpt.loss:
        what = f"the `loss` of '{model.into}' decides what counts, and not the `weights` of conversations."
        raise WorkloadError(what, fix="a spanax.Workload of your own, whose batch has `weights`")
    if model.kind == "gpt2" and (seq_len or 0) > config.seq_len:
        what = f"'{folder}' has {config.seq_len} positions, but --seq-len is {seq_len}."
        raise RangeError(what, fix=f"--seq-len {config.seq_len}")
    batch = gpt.example_batch(batch_size or 8, seq_len or min(config.seq_len, SEQ_LEN), is_chat)
    if model.into is not None:
        batch = {name: leaf for name, leaf in batch.items() if name not in ("segments", "positions")}
    return Workload(
        batch=batch,
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
      into: `FILE.py:Class` of its class; None for a built-in model.
      is_bare: whether the names of its tensors lack the prefix.
      twice: the names of duplicate tensors.
      folder: the folder to which the weights were imported; None for those of another run.
      adapters: those of an imported adapter.
    """

    kind: str
    config: Any
    into: str | None = None
    is_bare: bool = False
    twice: tuple[str, ...] = ()
    folder: Path | None = None
    adapters: LoRA | None = None


def read_model(folder: Path) -> SavedModel:
    """Reads the model whose weights are in a folder.

    Raises:
      DataError: the description is missing or invalid.
      SpanaxError: the file of its class does not exist.
    """
    try:
        data = parse_json(Folder.of(folder).read(MODEL))
        into = None if data.get("class") is None else str(data["class"])
        if into is not None and not Path(into.rpartition(":")[0]).is_file():
            what = f"the file of the class of '{folder}' does not exist."
            raise WorkloadError(what, where=into, fix="import the weights again, with --into FILE.py:Class")
        config = parsed(model_class(data["model"], into).config, data["shape"])
        naming = data["theirs"]
        adapters = LoRA.parse(data["lora"]) if "lora" in data else None
        twice = tuple(map(str, naming["twice"]))
        return SavedModel(str(data["model"]), config, into, bool(naming["is_bare"]), twice, folder, adapters)
    except (EntryError, UnknownNameError, WorkloadError):
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
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
    return workload_of(read_model(folder), folder)
