"""Adapters in PEFT's format: what PEFT answers, the same bytes again, merged weights, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sampling import sampled
from spanax.errors import SpanaxError
from spanax.interop import export_weights, import_weights
from spanax.interop.adapter import CONFIG, FILE, import_adapter
from spanax.interop.loaded_model import load_model

WEIGHTS = Path(__file__).parent / "weights"
TOKENS = np.arange(8, dtype="int32")[None]

SIZES = {
    "gpt2": {"transformer.h.*.attn.c_attn": (16, 48), "transformer.h.*.mlp.c_proj": (64, 16)},
    "qwen3": {"model.layers.*.self_attn.q_proj": (16, 32), "model.layers.*.mlp.down_proj": (24, 16)},
}
"""By module, the sizes of its input and output."""

ANSWERS: dict[str, tuple[float, ...]] = {
    "gpt2": (
        -0.60477, 0.155413, 0.352895, 0.90955, -0.59032, 0.566542, 0.502809, -0.367907, -0.01749, 0.024523, -0.623944,
        -1.328775, -0.073419, -0.202551, 0.047797, -0.400583, 0.214088, 0.547016, -0.611422, 0.725469, -0.001011,
        -0.770037, -0.184673, -0.10419, -0.558071,
    ),
    "qwen3": (0.159375, -0.312441, -0.088852, 0.021015, 0.292866, 0.219884, -0.275305, 1.043263),
}  # fmt: skip
"""The last logits that PEFT 0.21 with transformers 5.24 computes for the first tokens, at every twelfth entry."""


def adapter(name: str, folder: Path, **changes: Any) -> Path:
    """An adapter of rank 2 whose numbers anyone can make again."""
    rng = np.random.default_rng(0)
    tensors = {}
    for layer in range(2):
        for module, (inputs, outputs) in SIZES[name].items():
            stem = f"base_model.model.{module.replace('*', str(layer))}"
            tensors[f"{stem}.lora_A.weight"] = rng.normal(0, 0.3, (2, inputs)).astype("float32")
            tensors[f"{stem}.lora_B.weight"] = rng.normal(0, 0.3, (outputs, 2)).astype("float32")
    folder.mkdir()
    save_file(tensors, folder / FILE)
    modules = [module.partition("*.")[2] for module in SIZES[name]]
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": modules, "bias": "none"}
    (folder / CONFIG).write_text(json.dumps(config | {"fan_in_fan_out": name == "gpt2"} | changes))
    return folder


@pytest.mark.parametrize("name", sampled(SIZES, ["gpt2"]))
def test_an_adapter_is_read_as_peft_reads_it_and_written_again(name: str, tmp_path: Path) -> None:
    source = adapter(name, tmp_path / "adapter")
    import_weights(WEIGHTS / name, name, tmp_path / "base")
    import_adapter(source, tmp_path / "base", tmp_path / "in")
    logits = load_model(tmp_path / "in").model(TOKENS)[0, -1]
    np.testing.assert_allclose(logits[::12], ANSWERS[name], atol=1e-5)
    export_weights(tmp_path / "in", name, tmp_path / "out")
    before, after = (load_file(folder / FILE) for folder in (source, tmp_path / "out"))
    assert before.keys() == after.keys() and all(np.array_equal(before[key], after[key]) for key in before)
    known, written = (json.loads((folder / CONFIG).read_text()) for folder in (source, tmp_path / "out"))
    assert {key: written[key] for key in known} == known | {"target_modules": sorted(known["target_modules"])}
    export_weights(tmp_path / "in", name, tmp_path / "merged", merge=True)
    import_weights(tmp_path / "merged", name, tmp_path / "again")
    np.testing.assert_allclose(load_model(tmp_path / "again").model(TOKENS)[0, -1], logits, atol=1e-5)


def shorter(folder: Path) -> None:
    tensors = load_file(folder / FILE)
    name = next(iter(tensors))
    save_file(tensors | {name: np.zeros((2, 8), "float32")}, folder / FILE)


def of_one_layer(folder: Path) -> None:
    tensors = {name: values for name, values in load_file(folder / FILE).items() if ".h.0." in name}
    save_file(tensors, folder / FILE)


def of_another_module(folder: Path) -> None:
    tensors = {name.replace("c_attn", "c_other"): values for name, values in load_file(folder / FILE).items()}
    save_file(tensors, folder / FILE)


def of_another_base(folder: Path) -> None:
    save_file(load_file(folder / FILE), folder / FILE, {"spanax_base": "0" * 16})


REFUSED: dict[str, tuple[dict[str, Any], Callable[[Path], None] | None]] = {
    "DoRA": ({"use_dora": True}, None),
    "another method": ({"peft_type": "IA3"}, None),
    "ranks by layer": ({"rank_pattern": {"c_attn": 8}}, None),
    "no rank": ({"r": "2"}, None),
    "another shape": ({}, shorter),
    "some layers": ({}, of_one_layer),
    "another module": ({}, of_another_module),
    "another base": ({}, of_another_base),
    "no file": ({}, lambda folder: (folder / FILE).unlink()),
    "a file that is none": ({}, lambda folder: (folder / FILE).write_bytes(b"{}") and None),
}


def test_an_adapter_that_is_refused_writes_nothing(tmp_path: Path) -> None:
    import_weights(WEIGHTS / "gpt2", "gpt2", tmp_path / "base")
    for name, (changes, damage) in REFUSED.items():
        source = adapter("gpt2", tmp_path / name, **changes)
        if damage is not None:
            damage(source)
        with pytest.raises(SpanaxError) as raised:
            import_adapter(source, tmp_path / "base", tmp_path / "out")
        assert "Traceback" not in str(raised.value) and not (tmp_path / "out").exists(), name
    source = adapter("gpt2", tmp_path / "right")
    import_adapter(source, tmp_path / "base", tmp_path / "in")
    with pytest.raises(SpanaxError, match="has adapters already"):
        import_adapter(source, tmp_path / "in", tmp_path / "out")
    with pytest.raises(SpanaxError, match="no adapters to merge"):
        export_weights(tmp_path / "base", "gpt2", tmp_path / "out", merge=True)
