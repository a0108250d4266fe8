"""Named workloads, and workloads loaded from a user's file or from a folder of imported weights."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from spanax import Workload
from spanax.adapters.lora import LoRA
from spanax.errors import RangeError, SizeError, UnknownNameError, WorkloadError, nearest
from spanax.models import gpt, images, llama, moe, resnet, unet, vit
from spanax.models.imported import from_folder, is_imported, saved_workload
from spanax.models.user_file import module_of, no_class
from spanax.trace.optimizers.named import sgd
from spanax.train.record.folder import recorded


def text_workload(  # noqa: PLR0913  its options are settings
    model: Callable[..., Any],
    loss: Callable[..., Any],
    config: Any,
    *,
    batch_size: int = 8,
    seq_len: int | None = None,
    vocab_size: int | None = None,
    num_layers: int | None = None,
    embed_dim: int | None = None,
    learning_rate: float = 3e-4,
    num_steps: int = 1000,
    tokenizer: str | None = None,
    nano: bool = False,
    accumulate: str = "exact",
    is_chat: bool = False,
) -> Workload:
    """Returns the workload of a language model on text.

    Args:
      model: builds a module from a configuration and rngs.
      loss: the loss of the model on `inputs` and `targets`.
      config: the configuration; the sizes passed here replace its sizes.
      nano: whether `vocab_size` may be below the configuration's, and layers are not rematerialized.
      accumulate: how microbatches are combined.
      is_chat: whether the batch is of conversations.
    """
    config = replace(
        _widened(config, embed_dim),
        seq_len=seq_len or config.seq_len,
        vocab_size=(vocab_size or config.vocab_size) if nano else max(vocab_size or 0, config.vocab_size),
        num_layers=num_layers or config.num_layers,
        remat=not nano,
    )
    return Workload(
        build=partial(model, config),
        accumulate=accumulate,
        batch=gpt.example_batch(batch_size, config.seq_len, is_chat),
        loss=loss,
        source="python",
        learning_rate=learning_rate,
        num_steps=num_steps,
        tokenizer=tokenizer or f"bpe:{config.vocab_size}",
        vocab_size=config.vocab_size,
    )


def vit_workload(
    config: vit.ViTConfig,
    *,
    batch_size: int = 256,
    num_layers: int | None = None,
    embed_dim: int | None = None,
    nano: bool = False,
) -> Workload:
    """Returns the workload of a vision transformer."""
    config = replace(_widened(config, embed_dim), num_layers=num_layers or config.num_layers, remat=not nano)
    return _image_workload(partial(vit.ViT, config), config, batch_size, nano, learning_rate=1e-3)


def resnet_workload(config: resnet.ResNetConfig, *, batch_size: int = 256, nano: bool = False) -> Workload:
    """Returns the workload of a ResNet."""
    build = partial(resnet.ResNet, config)
    learning_rate = 0.1 * batch_size / 256
    return _image_workload(build, config, batch_size, nano, optimizer=sgd, learning_rate=learning_rate)


def unet_workload(config: unet.UNetConfig, *, batch_size: int = 128, nano: bool = False) -> Workload:
    """Returns the workload of a diffusion U-Net."""
    build = partial(unet.UNet, config)
    learning_rate = 2e-3 if nano else 2e-4
    workload = _image_workload(build, config, batch_size, nano, optimizer=unet.adam, learning_rate=learning_rate)
    batch = unet.example_batch(batch_size, config.image_size)
    unlabelled = {"noise": 0.1, "labelled": False}
    sources = {key: replace(getattr(workload, key), **unlabelled) for key in ("source", "validation") if nano}
    return replace(workload, batch=batch, loss=unet.loss, **sources)


def _image_workload(build: Callable[..., Any], config: Any, batch_size: int, nano: bool, **options: Any) -> Workload:
    """Returns the workload of a classifier of images; only a nano one comes with a data source."""
    if nano:
        synthetic = images.SyntheticImages(config.image_size, getattr(config, "num_classes", 10), 10_000)
        options |= {"source": synthetic, "validation": replace(synthetic, num_examples=1_000, first=1)}
    batch = images.example_batch(batch_size, config.image_size)
    return Workload(build=build, batch=batch, loss=images.loss, num_steps=200 if nano else 1000, **options)


def _widened(config: Any, embed_dim: int | None) -> Any:
    """Returns the configuration with `embed_dim`: `head_dim` is unchanged, the number of heads and `mlp_dim` scale.

    Raises:
      SpanaxError: `embed_dim` does not divide by the width of the heads that share a key.
    """
    if embed_dim is None:
        return config
    head_dim = config.embed_dim // config.num_heads
    num_kv_heads = getattr(config, "num_kv_heads", 1)
    unit = head_dim * num_kv_heads
    if embed_dim % unit:
        below = embed_dim // unit * unit
        raise RangeError(
            f"--embed is {embed_dim}; expected a multiple of {unit}.",
            where=f"heads of {getattr(config, 'head_dim', None) or head_dim}"
            + (f" on {num_kv_heads} keys and values" if num_kv_heads > 1 else ""),
            fix=f"--embed {below} or {below + unit}" if below else f"--embed {unit}",
        )
    wider = {"embed_dim": embed_dim, "num_heads": embed_dim // head_dim}
    if hasattr(config, "mlp_dim"):
        wider["mlp_dim"] = config.mlp_dim * embed_dim // config.embed_dim
    return replace(config, **wider)


_gpt = partial(text_workload, gpt.GPT, gpt.loss)
_llama = partial(text_workload, llama.Llama, llama.loss)
# As is usual, each microbatch balances the load of its experts by itself.
_moe = partial(text_workload, moe.Mixtral, moe.loss, accumulate="mean")
_nano = {"batch_size": 32, "learning_rate": 2e-3, "num_steps": 200, "tokenizer": "bytes", "nano": True}

WORKLOADS: dict[str, Callable[..., Workload]] = {
    "gpt-nano": partial(_gpt, gpt.SIZES["nano"], **_nano),
    "llama-nano": partial(_llama, llama.SIZES["nano"], **_nano),
    "moe-nano": partial(_moe, moe.SIZES["nano"], **_nano),
    "moe-nano-dropless": partial(_moe, replace(moe.SIZES["nano"], capacity_factor=None), **_nano),
    "vit-nano": partial(vit_workload, vit.SIZES["nano"], batch_size=64, nano=True),
    "resnet-nano": partial(resnet_workload, resnet.SIZES["nano"], batch_size=64, nano=True),
    "unet-nano": partial(unet_workload, unet.SIZES["nano"], batch_size=64, nano=True),
    "gpt2": partial(_gpt, gpt.SIZES["gpt2"], learning_rate=6e-4),
    "gpt2-medium": partial(_gpt, gpt.SIZES["gpt2-medium"], learning_rate=3e-4),
    "gpt2-large": partial(_gpt, gpt.SIZES["gpt2-large"], learning_rate=2.5e-4),
    "gpt2-xl": partial(_gpt, gpt.SIZES["gpt2-xl"], learning_rate=2e-4),
    "gpt3-175b": partial(_gpt, gpt.SIZES["gpt3-175b"], learning_rate=6e-5),
    "llama3-8b": partial(_llama, llama.SIZES["8b"], learning_rate=3e-4),
    "llama3-70b": partial(_llama, llama.SIZES["70b"], learning_rate=1.5e-4),
    "llama3-405b": partial(_llama, llama.SIZES["405b"], learning_rate=8e-5),
    "llama3.1-8b": partial(_llama, llama.SIZES["3.1-8b"], learning_rate=3e-4),
    "llama3.2-1b": partial(_llama, llama.SIZES["3.2-1b"]),
    "llama3.2-3b": partial(_llama, llama.SIZES["3.2-3b"]),
    "qwen2-0.5b": partial(_llama, llama.SIZES["qwen2-0.5b"]),
    "qwen2-7b": partial(_llama, llama.SIZES["qwen2-7b"]),
    "qwen3-0.6b": partial(_llama, llama.SIZES["qwen3-0.6b"]),
    "qwen3-8b": partial(_llama, llama.SIZES["qwen3-8b"]),
    "qwen3-32b": partial(_llama, llama.SIZES["qwen3-32b"]),
    "mixtral-8x7b": partial(_moe, moe.SIZES["8x7b"]),
    "mixtral-8x7b-dropless": partial(_moe, replace(moe.SIZES["8x7b"], capacity_factor=None)),
    "qwen3-30b-a3b": partial(_moe, moe.SIZES["qwen3-30b-a3b"]),
    "qwen3-30b-a3b-dropless": partial(_moe, replace(moe.SIZES["qwen3-30b-a3b"], capacity_factor=None)),
    "vit-b16": partial(vit_workload, vit.SIZES["b16"]),
    "vit-l16": partial(vit_workload, vit.SIZES["l16"]),
    "vit-h14": partial(vit_workload, vit.SIZES["h14"]),
    "vit-1b": partial(vit_workload, vit.SIZES["g14"]),
    "resnet50": partial(resnet_workload, resnet.SIZES["50"]),
    "ddpm-cifar10": partial(unet_workload, unet.SIZES["cifar10"]),
}


USUAL = {"batch_size": 32, "seq_len": 128, "vocab_size": 50_257, "num_layers": 12, "embed_dim": 768}
"""Usual sizes, for the `fix` of an error."""


def saved_definition(checkpoint: Path, workload: str | None = None, **sizes: Any) -> Workload:
    """Returns the workload of a checkpoint, with the adapters of its run.

    Args:
      checkpoint: a run folder, a folder of checkpoints, or one that `spanax import` wrote.
      workload: the name of the workload, if the folder does not record it.
      sizes: as in `load`.

    Raises:
      SpanaxError: the workload is unknown.
    """
    settings = recorded(checkpoint)
    definition = load(saved_workload(checkpoint, workload), **sizes)
    if settings.get("lora") is None:
        return definition
    adapters = LoRA.parse(settings["lora"])
    return definition.adapted(adapters, quantize=settings.get("quantize"), dtype=settings.get("dtype"))


def load(
    name: str,
    *,
    batch_size: int | None = None,
    seq_len: int | None = None,
    vocab_size: int | None = None,
    num_layers: int | None = None,
    embed_dim: int | None = None,
    is_chat: bool = False,
) -> Workload:
    """Returns a workload by name or from `file.py:name`, with the requested sizes.

    Args:
      name: one of `WORKLOADS`; `file.py:name` of a Workload or of a function that returns one; or a folder that
        `spanax import` wrote.
      batch_size: examples per batch.
      seq_len: tokens per example.
      vocab_size: the number of tokens in the vocabulary; published sizes are a lower limit.
      num_layers: the number of layers.
      embed_dim: the embedding width; `head_dim` is unchanged, so the number of heads scales.
      is_chat: whether the batch is of conversations, where a workload without `is_chat` has that of text.

    Raises:
      SpanaxError: the workload, file or name does not exist, or the workload has a fixed size.

    Example:
      >>> load("gpt2", batch_size=4).batch["inputs"].shape
      (4, 1024)
    """
    sizes = {
        "batch_size": batch_size,
        "seq_len": seq_len,
        "vocab_size": vocab_size,
        "num_layers": num_layers,
        "embed_dim": embed_dim,
    }
    requested = {key: value for key, value in sizes.items() if value is not None}
    for key, value in requested.items():
        if value < 1:
            raise RangeError(f"{key} is {value}; expected an integer >= 1.", fix=f"{key}={USUAL[key]}")
    source = WORKLOADS.get(name) or (from_folder(Path(name)) if is_imported(Path(name)) else _from_file(name))
    if isinstance(source, Workload):
        return _resized(name, source, requested)
    parameters = inspect.signature(source).parameters
    is_open = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    options = requested | ({"is_chat": True} if is_chat and "is_chat" in parameters else {})
    workload = source(**{key: value for key, value in options.items() if key in parameters or is_open})
    if not isinstance(workload, Workload):
        raise WorkloadError(f"'{name}' returned a {type(workload).__name__}, not a spanax.Workload.")
    ignored = {key: value for key, value in requested.items() if key not in parameters and not is_open}
    return _resized(name, workload, ignored)


def builder(name: str) -> Callable[[nnx.Rngs], nnx.Module]:
    """Returns what builds the module of `FILE.py:NAME`, a class or function of `rngs`, or a workload.

    Raises:
      SpanaxError: the file or name does not exist, or it takes more than `rngs`.
    """
    module, attribute = module_of(name, "class")
    value = getattr(module, attribute, None)
    if isinstance(value, Workload):
        return value.build
    if not callable(value):
        raise no_class(module, attribute)
    is_class = isinstance(value, type)  # the metaclass of nnx.Module hides its parameters
    parameters = inspect.signature(inspect.getattr_static(value, "__init__") if is_class else value).parameters
    if "rngs" not in parameters:
        return load(name).build
    required = [key for key, each in parameters.items() if each.default is each.empty and "VAR" not in each.kind.name]
    others = [key for key in required if key not in ("self", "rngs")]
    if others:
        what = f"'{name}' takes {', '.join(others)} besides rngs."
        raise WorkloadError(what, fix=f"a function: def build(rngs): return {name.rpartition(':')[2]}(..., rngs=rngs)")
    return lambda rngs: value(rngs=rngs)


_FIXED_SIZES = {
    "seq_len": ("sequence length", "--seq-len"),
    "num_layers": ("number of layers", "--layers"),
    "embed_dim": ("width", "--embed"),
}
"""Sizes that only the author of a workload can make configurable: their description and option."""


def _resized(name: str, workload: Workload, requested: dict[str, int]) -> Workload:
    """Returns the workload with another batch size.

    Raises:
      SizeError: another size was requested, which the workload fixes.
    """
    for key, (words, flag) in _FIXED_SIZES.items():
        if key in requested:
            raise SizeError(
                f"the {words} of '{name}' is fixed.",
                where=f"{flag} {requested[key]}",
                fix="another --global-batch-size instead, or another workload"
                if name in WORKLOADS or is_imported(Path(name))
                else f"make '{name}' a function that takes {key} and returns the Workload",
            )
    if "batch_size" not in requested:
        return workload
    shaped = jax.eval_shape(lambda tree: tree, workload.batch)
    size = requested["batch_size"]
    return replace(
        workload, batch=jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype), shaped)
    )


def _from_file(name: str) -> Workload | Callable[..., Workload]:
    path, colon, _ = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise UnknownNameError(f"unknown workload '{name}'.", fix=nearest(name, ["file.py:name", *WORKLOADS]))
    module, attribute = module_of(name, "workload")
    value = getattr(module, attribute, None)
    if isinstance(value, Workload) or callable(value):
        return value
    known = [key for key, value in vars(module).items() if isinstance(value, Workload)]
    raise UnknownNameError(
        f"'{path}' has no workload '{attribute}'.",
        fix=nearest(attribute, known) if known else f"{attribute} = spanax.Workload(build=..., batch=..., loss=...)",
    )
