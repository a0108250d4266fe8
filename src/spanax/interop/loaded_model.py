"""A trained or imported model as an object, with its tokenizer."""

import inspect
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from spanax.decoding.decoder import called
from spanax.decoding.programs import tokens_of
from spanax.entries.names import TOKENIZER
from spanax.errors import CheckpointError, WorkloadError
from spanax.jit.init import init
from spanax.jit.jit import jit
from spanax.jit.objects import Objects
from spanax.jit.sharded_function import ShardedFunction
from spanax.models.imported import is_imported, read_model, saved_workload
from spanax.models.workloads import saved_definition
from spanax.train.data.text.chat_template import ChatTemplate, recorded_template, template_of
from spanax.train.data.text.tokenizer import Tokenizer, TrainedTokenizer, load_tokenizer
from spanax.train.record.folder import recorded, saved_template, saved_tokenizer
from spanax.train.state import weights

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model with the parameters of a checkpoint.

    Attributes:
      model: the model.
      forward: the function whose mesh and layout its arrays have.
      step: the step of the checkpoint.
      tokenizer: that of the run or of the import; None if it has none.
      end_id: the end-of-text token.
      folder: the folder that the weights were imported to; None if they were not.
      length: the number of positions; None if the batch of the workload is no sequences of tokens.
      chat_template: that of the run, or of the imported tokenizer; None if it has none.
    """

    model: nnx.Module
    forward: ShardedFunction
    step: int
    tokenizer: "tokenizers.Tokenizer | None"
    end_id: int | None
    folder: Path | None
    length: int | None
    chat_template: ChatTemplate | None = None


def load_model(
    checkpoint: Path,
    *,
    workload: str | None = None,
    dtype: str | None = None,
    layout: str | None = None,
    mesh: str | None = None,
) -> LoadedModel:
    """Returns the model of a run, of a folder of checkpoints, or of weights that `import_weights` wrote.

    Args:
      checkpoint: the folder.
      workload: the workload of the checkpoint, if its folder does not record it.
      dtype: that of the parameters; as saved by default.
      layout: as in `spanax.jit`.
      mesh: as in `spanax.jit`; the first device by default.

    Raises:
      SpanaxError: the model is not recorded, or does not take tokens.
      DataError: there is no intact checkpoint, or it is of another model.
    """
    import tokenizers

    if not checkpoint.is_dir():
        raise CheckpointError(f"there is no folder '{checkpoint}'.", fix="a run folder, such as runs/a")
    settings = recorded(checkpoint)
    name = saved_workload(checkpoint, workload)
    sizes = {"seq_len": settings["seq_len"]} if settings.get("seq_len") is not None else {}
    definition = saved_definition(checkpoint, workload, **sizes)
    tokenizer = _tokenizer(checkpoint, settings, definition.tokenizer)
    if definition.vocab_size is None:
        raise WorkloadError(f"the model of '{name}' does not read tokens.", fix="a language model")
    if tokenizer is not None and tokenizer.vocab_size != definition.vocab_size:
        definition = saved_definition(checkpoint, workload, **sizes, vocab_size=tokenizer.vocab_size)
    if layout is None and mesh is None:
        mesh = "data=1"
    forward = jit(called, layout=layout, mesh=mesh)
    batch = jax.ShapeDtypeStruct((len(jax.devices()), 8), "int32")  # every mesh axis divides these sequences
    model = init(partial(_built, definition.build), like=forward, batch=batch)
    placements = forward.plan.leaves
    arrays, loaded = weights.load(forward.program, placements, forward.placement.mesh, checkpoint)
    Objects.of((model,)).update([*arrays], [_cast(array, dtype) for array in arrays.values()])
    model.eval()
    engine = None if tokenizer is None else tokenizers.Tokenizer.from_str(tokenizer.to_json())
    folder = Path(name) if is_imported(Path(name)) else None
    end_id = None if tokenizer is None else tokenizer.end_id
    _, length = tokens_of(definition.batch) or (None, None)
    length = length if folder is None else read_model(folder).config.seq_len
    template = recorded_template(saved_template(checkpoint)) or (None if folder is None else template_of(folder))
    return LoadedModel(model, forward, loaded.step, engine, end_id, folder, length, template)


def _cast(array: jax.Array, dtype: str | None) -> jax.Array:
    is_cast = dtype is not None and jax.numpy.issubdtype(array.dtype, jax.numpy.floating)
    return array.astype(dtype) if is_cast else array


def _built(build: Any) -> nnx.Module:
    model = build(nnx.Rngs(0))
    assert isinstance(model, nnx.Module)
    _, _, *others = inspect.signature(type(model).__call__).parameters.values()
    required = [each.name for each in others if each.default is each.empty and "VAR" not in each.kind.name]
    if required:
        what = f"{type(model).__name__} takes {', '.join(required)} besides tokens."
        raise WorkloadError(what, fix="a model of one sequence of tokens; this one can be called in Python")
    return model


def _tokenizer(checkpoint: Path, settings: dict[str, Any], default: str) -> Tokenizer | None:
    """Returns the tokenizer that a run saved, that of imported weights, or the default of the workload."""
    name = settings.get("tokenizer") or default
    if is_imported(checkpoint):
        path = checkpoint / TOKENIZER
        return load_tokenizer(str(path)) if path.exists() else None
    saved = saved_tokenizer(checkpoint)
    if saved is not None:
        return load_tokenizer(TrainedTokenizer(name, saved))
    return load_tokenizer(name) if name == "bytes" or name.endswith(".json") else None
