"""The workloads that have names, and those that a user's file holds."""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import jax

from spanax import SpanaxError, Workload
from spanax.errors import nearest
from spanax.models import gpt


def gpt_workload(
    size: str,
    *,
    batch_size: int = 8,
    seq_len: int | None = None,
    vocab_size: int | None = None,
    learning_rate: float = 6e-4,
    num_steps: int = 1000,
    tokenizer: str = "bpe:50257",
) -> Workload:
    """A GPT of a size in `gpt.SIZES` on text; 175B is for planning, and takes as long to train as it sounds."""
    config = gpt.SIZES[size]
    config = replace(
        config,
        seq_len=seq_len or config.seq_len,
        vocab_size=max(vocab_size or 0, config.vocab_size) if size != "nano" else vocab_size or config.vocab_size,
        remat=size != "nano",
    )
    return Workload(
        build=partial(gpt.GPT, config),
        batch=gpt.example_batch(batch_size, config.seq_len),
        loss=gpt.loss,
        source="python",
        learning_rate=learning_rate,
        num_steps=num_steps,
        tokenizer=tokenizer,
        vocab_size=config.vocab_size,
    )


WORKLOADS: dict[str, Callable[..., Workload]] = {
    "gpt-nano": partial(gpt_workload, "nano", batch_size=32, learning_rate=2e-3, num_steps=200, tokenizer="bytes"),
    "gpt2": partial(gpt_workload, "gpt2"),
    "gpt2-medium": partial(gpt_workload, "gpt2-medium", learning_rate=3e-4),
    "gpt2-large": partial(gpt_workload, "gpt2-large", learning_rate=2.5e-4),
    "gpt2-xl": partial(gpt_workload, "gpt2-xl", learning_rate=2e-4),
    "gpt3-175b": partial(gpt_workload, "gpt3-175b", learning_rate=6e-5),
}


def load(
    name: str, *, batch_size: int | None = None, seq_len: int | None = None, vocab_size: int | None = None
) -> Workload:
    """A workload by name, or from `file.py:name`, in the sizes asked for.

    Raises:
      SpanaxError: there is no such workload, file or name, or it cannot have another size.

    Example:
      >>> load("gpt2", batch_size=4).batch["inputs"].shape
      (4, 1024)
    """
    sizes = {"batch_size": batch_size, "seq_len": seq_len, "vocab_size": vocab_size}
    asked = {key: value for key, value in sizes.items() if value is not None}
    for key, value in asked.items():
        if value < 1:
            raise SpanaxError(f"{key} is {value}; it takes a whole number from 1.")
    made = WORKLOADS.get(name) or _from_file(name)
    if isinstance(made, Workload):
        return _resized(name, made, asked)
    takes = inspect.signature(made).parameters
    is_open = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    workload = made(**{key: value for key, value in asked.items() if key in takes or is_open})
    if not isinstance(workload, Workload):
        raise SpanaxError(f"'{name}' returned a {type(workload).__name__}, not a spanax.Workload.")
    ignored = {key: value for key, value in asked.items() if key not in takes and not is_open}
    return _resized(name, workload, ignored)


def _resized(name: str, workload: Workload, asked: dict[str, int]) -> Workload:
    """A ready-made workload with another batch size; its other sizes are its own."""
    if "seq_len" in asked:
        raise SpanaxError(
            f"'{name}' has no sequence length to change.",
            where=f"--seq {asked['seq_len']}",
            fix="let the name be a function of seq_len that returns the Workload",
        )
    if "batch_size" not in asked:
        return workload
    shaped = jax.eval_shape(lambda tree: tree, workload.batch)
    size = asked["batch_size"]
    return replace(
        workload, batch=jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype), shaped)
    )


def _from_file(name: str) -> Workload | Callable[..., Workload]:
    path, colon, attribute = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise SpanaxError(f"unknown workload '{name}'.", fix=nearest(name, [*WORKLOADS, "file.py:name"]))
    if not Path(path).is_file():
        raise SpanaxError(f"there is no file '{path}'.", where=f"workload '{name}'")
    module = _imported(Path(path))
    found = getattr(module, attribute, None)
    if isinstance(found, Workload) or callable(found):
        return found
    known = [key for key, value in vars(module).items() if isinstance(value, Workload)]
    raise SpanaxError(
        f"'{path}' has no workload '{attribute}'.",
        fix=nearest(attribute, known) if known else f"{attribute} = spanax.Workload(build=..., batch=..., loss=...)",
    )


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    # Like `python file.py`, so that a file finds its neighbours.
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except SpanaxError:
        raise
    except Exception as error:
        line = getattr(error.__traceback__, "tb_lineno", "")
        raise SpanaxError(f"'{path}' cannot be imported.", where=f"{type(error).__name__}: {error} {line}") from error
    return module
