"""Golden messages for invalid weights; `make golden` updates them."""

import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

import golden_messages
import spanax
from spanax.errors import SpanaxError
from spanax.interop import export_weights, import_weights
from spanax.interop.safetensors import Writer, tensors
from spanax.models.workloads import load

WEIGHTS = Path(__file__).parent / "weights"
GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "interop_errors.txt"


def configured(name: str = "gpt2", kind: str = "gpt2", **change: Any) -> Callable[[Path], Any]:
    """Imports weights next to a changed config.json."""

    def act(folder: Path) -> None:
        shutil.copytree(WEIGHTS / name, folder / name)
        config = json.loads((folder / name / "config.json").read_text()) | change
        (folder / name / "config.json").write_text(json.dumps(config))
        import_weights(folder / name, kind, folder / "new")

    return act


def rewritten(change: Callable[[dict[str, np.ndarray]], Any], name: str = "gpt2", kind: str = "gpt2") -> Any:
    """Imports weights in which something is changed."""

    def act(folder: Path) -> None:
        shutil.copytree(WEIGHTS / name, folder / name)
        result = {tensor: item.read() for tensor, item in tensors(folder / name).items()}
        change(result)
        (folder / name / "model.safetensors").unlink()
        with Writer(folder / name / "model.safetensors", result) as file:
            for tensor, array in result.items():
                file.put(tensor, array)
        import_weights(folder / name, kind, folder / "new")

    return act


def misspelt(result: dict[str, np.ndarray]) -> None:
    result["transformer.h.1.ln2.bias"] = result.pop("transformer.h.1.ln_2.bias")


def quantized(result: dict[str, np.ndarray]) -> None:
    result["transformer.h.0.mlp.c_fc.weight"] = result["transformer.h.0.mlp.c_fc.weight"].astype("int8")


def mixed(result: dict[str, np.ndarray]) -> None:
    result["transformer.h.1.mlp.c_fc.weight"] = result["transformer.h.1.mlp.c_fc.weight"].astype("bfloat16")


def untied(result: dict[str, np.ndarray]) -> None:
    result["lm_head.weight"] = result["model.embed_tokens.weight"] + np.float32(1)


@cache
def once() -> tempfile.TemporaryDirectory[str]:
    """A folder with imported weights, for all that want some."""
    held = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    import_weights(WEIGHTS / "gpt2", "gpt2", Path(held.name, "in"))
    return held


def imported(folder: Path) -> None:
    shutil.copytree(Path(once().name, "in"), folder / "in")


def too_long(folder: Path) -> None:
    imported(folder)
    load(str(folder / "in"), seq_len=64)


def too_deep(folder: Path) -> None:
    imported(folder)
    load(str(folder / "in"), num_layers=3)


def begun_as_another(folder: Path) -> None:
    imported(folder)
    workload = load("gpt-nano", batch_size=8)
    program = spanax.trace(build=workload.build, optimizer=optax.sgd(0.1), batch=workload.batch, loss=workload.loss)
    spanax.start(program, spanax.plan(program, spanax.cluster("cpu:1"), layout="data"), init=folder / "in")


def exported(kind: str, **how: Any) -> Callable[[Path], Any]:
    def act(folder: Path) -> None:
        imported(folder)
        if how:
            (folder / "in" / "model.json").unlink()
        export_weights(folder / "in", kind, folder / "new", **{key: value for key, value in how.items() if value})

    return act


def exported_with(config: str) -> Callable[[Path], Any]:
    """Exports weights next to another config.json."""

    def act(folder: Path) -> None:
        imported(folder)
        (folder / "in" / "config.json").write_text(config)
        export_weights(folder / "in", "gpt2", folder / "new")

    return act


def own(source: str = "", rows: str | None = None, name: str = "Own", weights: str = "llama", **how: Any) -> Any:
    """Imports weights into a class of a user's file."""

    def act(folder: Path) -> None:
        (folder / "own.py").write_text(f"import jax.numpy as jnp\nfrom flax import nnx\n{source}")
        if rows is not None:
            (folder / "rows.toml").write_text(rows)
            how["mapping"] = folder / "rows.toml"
        kind = how.pop("kind", None)
        import_weights(WEIGHTS / weights, kind, folder / "new", into=f"{folder}/own.py:{name}", **how)

    return act


def moved(folder: Path) -> None:
    """Loads weights whose class is no longer there."""
    imported(folder)
    description = json.loads((folder / "in" / "model.json").read_text()) | {"class": f"{folder}/gone.py:Own"}
    (folder / "in" / "model.json").write_text(json.dumps(description))
    load(str(folder / "in"))


NORMS = """
class Own(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(96, 16, rngs=rngs)
        self.square = nnx.Param(jnp.zeros((16, 16)))
"""
SIZED = "class Own(nnx.Module):\n    def __init__(self, size, rngs): ..."
ROPE = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}

WRONG: dict[str, Callable[[Path], Any]] = {
    "another model": configured(model_type="bert"),
    "read as another": configured("gpt2", "llama"),
    "more layers": configured(n_layer=3),
    "fewer layers": configured(n_layer=1),
    "absurdly many layers": configured(n_layer=10**9),
    "another width": configured(n_embd=32),
    "no width": configured(n_embd=0),
    "a width that is none": configured(n_embd="wide"),
    "a width of a galaxy": configured(n_embd=1 << 61),
    "heads that do not divide": configured(n_head=3),
    "another activation": configured(activation_function="relu"),
    "another epsilon": configured(layer_norm_epsilon=1e-3),
    "other rotary positions": configured("llama", "llama", **ROPE),
    "a window": configured("llama", "llama", model_type="mistral", sliding_window=4096),
    "a bias that ours has not": configured("llama", "llama", attention_bias=True),
    "no colours": configured("vit", "vit", num_channels=1),
    "a name misspelt": rewritten(misspelt),
    "quantized": rewritten(quantized),
    "two dtypes": rewritten(mixed),
    "a head of its own": rewritten(untied, "qwen2", "llama"),
    "a sequence that is too long": too_long,
    "another depth": too_deep,
    "begun as another model": begun_as_another,
    "exported as another model": exported("llama"),
    "exported, and nobody says what it is": exported("gpt2", dtype=None),
    "exported as what it is not": exported("gpt2", workload="gpt-nano"),
    "exported of another kind": exported("gpt2", workload="llama-nano"),
    "exported as another of its kind": exported("qwen3", workload="llama-nano"),
    "exported of no kind": exported("gpt2", workload="resnet-nano"),
    "into a class that is an example": own(kind="olmo2", weights="qwen2"),
    "of a family whose class is an example": configured("llama", "olmo2", model_type="olmo2"),
    "into no class": own(kind="llama"),
    "into a class of a family without a config": own(NORMS, kind="llama"),
    "into a name that is none": own(NORMS, name="Owm"),
    "into a class with sizes": own(SIZED),
    "into a class that the weights do not suit": own(NORMS),
    "rows for a kind": own(NORMS, "", kind="llama"),
    "rows that are none": own(NORMS, "tensor = 3"),
    "a row of no array": own(NORMS, '[tensors]\n"embed.embeddings" = []'),
    "a row of no tensor": own(NORMS, '[tensors]\n"embed.embedding" = ["model.embed_token.weight"]'),
    "a row of another shape": own(NORMS, '[tensors]\n"embed.embedding" = ["lm_head.weight", "D V -> V D"]'),
    "a class that was moved": moved,
    "exported with an empty config.json": exported_with(""),
    "exported with a config.json of another shape": exported_with("[]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_flags_are_reported_in_four_lines(name: str, tmp_path: Path) -> None:
    with pytest.raises(SpanaxError) as caught:
        WRONG[name](tmp_path)
    assert len(str(caught.value).splitlines()) <= 4
    assert not (tmp_path / "new").exists(), "something was left behind"
    message = str(caught.value).replace(str(tmp_path), "FOLDER").replace(str(WEIGHTS), "WEIGHTS")
    golden_messages.compare(GOLDEN, WRONG, name, f"{message}\n  [exit {caught.value.exit_code}]")


# The followed fix of an error, given the folder and the value of the flag; the others are about the content of files.
FOLLOWED: dict[str, Callable[[Path, str], Any]] = {
    "read as another": lambda folder, kind: import_weights(folder / "gpt2", kind, folder / "new"),
    "two dtypes": lambda folder, dtype: import_weights(folder / "gpt2", "gpt2", folder / "new", dtype=dtype),
    "a sequence that is too long": lambda folder, length: load(str(folder / "in"), seq_len=int(length)),
    "exported as another model": lambda folder, kind: export_weights(folder / "in", kind, folder / "new"),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_fix_works(name: str, tmp_path: Path) -> None:
    with pytest.raises(SpanaxError) as caught:
        WRONG[name](tmp_path)
    FOLLOWED[name](tmp_path, str(caught.value).partition("fix: --")[2].split()[1])


def test_the_golden_messages_of_errors() -> None:
    assert list(golden_messages.sections(GOLDEN)) == list(WRONG)
