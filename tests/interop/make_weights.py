"""Makes tests/interop/weights: tiny models of transformers, initialized at random, and what they answer.

    pip install "spanax[interop-test]"
    python tests/interop/make_weights.py

Each is a folder as `save_pretrained` writes it, and beside it NAME.safetensors with `inputs` and `logits`, and of a
language model the `greedy` tokens after the first input. Every number of a model is moved at random, so that no bias is
zero and no two norms are alike.

The other families are in `oracles.json`: the config.json of a model, and some logits that it computes with the tensors
that `tests/drawn.py` draws by their names.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from drawn import INPUTS, ORACLES, drawn  # noqa: E402

FOLDER = Path(__file__).parent / "weights"

LLAMA = {
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def models() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Name to model, and how it is saved."""
    gpt2 = transformers.GPT2Config(
        vocab_size=300, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    vit = transformers.ViTConfig(
        image_size=16, patch_size=8, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_labels=5,
    )  # fmt: skip
    llama32 = transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True, rope_parameters=ROPE)
    qwen2 = transformers.Qwen2Config(**LLAMA, tie_word_embeddings=True)
    qwen3 = transformers.Qwen3Config(**LLAMA, head_dim=8)
    return {
        "gpt2": (transformers.GPT2LMHeadModel(gpt2), {}),
        "llama": (transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)), {"max_shard_size": "4KB"}),
        "llama-tied": (transformers.LlamaForCausalLM(llama32), {}),
        "qwen2": (transformers.Qwen2ForCausalLM(qwen2), {}),
        "qwen3": (transformers.Qwen3ForCausalLM(qwen3), {}),
        "vit": (transformers.ViTForImageClassification(vit), {}),
    }


def moved(model: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A model with every number moved, as it is in a dtype."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def inputs_of(model: Any) -> torch.Tensor:
    """Four images of a ViT, or four texts of eight tokens."""
    config = model.config
    if config.model_type == "vit":
        return torch.rand(4, 3, config.image_size, config.image_size)
    return torch.randint(0, config.vocab_size, (4, 8))


def greedy(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    """The 512 most likely tokens after a text, or as many as the model has positions for."""
    model.generation_config.eos_token_id = None
    count = min(512, getattr(model.config, "n_positions", 1024) - len(prompt))
    tokens = model.generate(prompt[None], do_sample=False, use_cache=True, max_new_tokens=count)
    return tokens[0, len(prompt) :].int()


T5 = {"vocab_size": 96, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}


def others() -> dict[str, Any]:
    """Name to model, of those without a folder."""
    t = transformers
    llama = LLAMA | {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    layers = ["sliding_attention", "full_attention"]
    windows = {"head_dim": 8, "sliding_window": 3, "query_pre_attn_scalar": 16, "layer_types": layers}
    return {
        "gemma": t.GemmaForCausalLM(t.GemmaConfig(**llama, head_dim=8)),
        "gemma2": t.Gemma2ForCausalLM(t.Gemma2Config(**llama, **windows)),
        "gemma3_text": t.Gemma3ForCausalLM(t.Gemma3TextConfig(**llama, **windows)),
        "mistral": t.MistralForCausalLM(t.MistralConfig(**llama, sliding_window=None)),
        "mixtral": t.MixtralForCausalLM(t.MixtralConfig(**llama, num_local_experts=4)),
        "olmo2": t.Olmo2ForCausalLM(t.Olmo2Config(**llama)),
        "phi": t.PhiForCausalLM(t.PhiConfig(**llama | {"hidden_size": 32, "num_key_value_heads": 4})),
        "phi3": t.Phi3ForCausalLM(t.Phi3Config(**llama, sliding_window=3)),
        "t5": t.T5ForConditionalGeneration(t.T5Config(**T5)),
        "t5-gated": t.T5ForConditionalGeneration(t.T5Config(**T5, feed_forward_proj="gated-gelu")),
    }


def oracle(model: Any) -> dict[str, Any]:
    """The config.json of a model, and its last logits with tensors that are drawn."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads(Path(folder, "config.json").read_text())
        with torch.no_grad():
            shapes = {
                name: tuple(tensor.shape) for name, tensor in load_file(Path(folder, "model.safetensors")).items()
            }
            tensors = {name: torch.tensor(drawn(name, shape)) for name, shape in shapes.items()}
            save_file(tensors, Path(folder, "model.safetensors"), metadata={"format": "pt"})
            model = type(model).from_pretrained(folder).eval()
            tokens = torch.tensor(INPUTS)
            decoded = {"decoder_input_ids": tokens.flip(1)} if config["model_type"] == "t5" else {}
            logits = model(input_ids=tokens, **decoded).logits[:, -1, :6]
    return {"config": config, "logits": [[round(float(value), 6) for value in row] for row in logits]}


def main() -> None:
    """Writes all of them."""
    ORACLES.write_text(json.dumps({name: oracle(model) for name, model in others().items()}, indent=1) + "\n")
    shutil.rmtree(FOLDER, ignore_errors=True)
    torch.manual_seed(0)
    for name, (model, how) in models().items():
        model = moved(model, torch.bfloat16 if name == "llama" else torch.float32)
        model.save_pretrained(FOLDER / name, **how)
        inputs = inputs_of(model)
        with torch.no_grad():
            logits = model.float()(inputs).logits
        answers = {"inputs": inputs, "logits": logits}
        if name != "vit":
            answers |= {"inputs": inputs.int(), "greedy": greedy(model, inputs[0])}
        save_file(answers, FOLDER / f"{name}.safetensors")
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([Path(__file__).read_text()], vocab_size=300, show_progress=False)
    tokenizer.save(str(FOLDER / "gpt2" / "tokenizer.json"), pretty=False)


if __name__ == "__main__":
    main()
