"""Adapters in PEFT's format: what PEFT answers, the same bytes again, merged weights, and what is refused."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from spanax.interop.adapter import CONFIG, FILE

WEIGHTS = Path(__file__).parent / "weights"
TOKENS = np.arange(8, dtype="int32")[None]
LAYERS = {"gpt2": ("attn.c_attn", "mlp.c_proj"), "llama": ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")}


def write_adapter(name: str, folder: Path, **changes: object) -> Path:
    """An adapter of rank 2 with numbers that anyone can make again; the oracle below read it with PEFT."""
    base = load_file(WEIGHTS / name / "model.safetensors") if name == "gpt2" else None
    del base
    tensors = {}
    rng = np.random.default_rng(0)
    for layer in range(2):
        for module in LAYERS[name]:
            inputs, outputs = sizes(name, layer, module)
            stem = f"base_model.model.{'transformer.h' if name == 'gpt2' else 'model.layers'}.{layer}.{module}"
            tensors[f"{stem}.lora_A.weight"] = rng.normal(0, 0.3, (2, inputs)).astype("float32")
            tensors[f"{stem}.lora_B.weight"] = rng.normal(0, 0.3, (outputs, 2)).astype("float32")
    folder.mkdir()
    save_file(tensors, folder / FILE)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": list(LAYERS[name])} | changes
    config |= {"fan_in_fan_out": name == "gpt2"}
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


def sizes(name: str, layer: int, module: str) -> tuple[int, int]:
    from spanax.interop.safetensors import tensors

    prefix = "transformer.h" if name == "gpt2" else "model.layers"
    stored = {
        key.removeprefix("transformer.").removeprefix("model."): each for key, each in tensors(WEIGHTS / name).items()
    }
    key = f"{prefix}.{layer}.{module}.weight".removeprefix("transformer.").removeprefix("model.")
    first, second = stored[key].shape
    return (first, second) if name == "gpt2" else (second, first)
