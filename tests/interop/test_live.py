"""Models compared with transformers, with random weights: `pip install "spanax[interop-test]"`."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spanax
from spanax.interop import export_weights, import_weights
from spanax.interop.configs import members
from spanax.models.workloads import load

INSTALL = 'pip install "spanax[interop-test]"'
transformers = pytest.importorskip("transformers", reason=INSTALL)
torch = pytest.importorskip("torch", reason=INSTALL)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TEXT = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3, "vocab_size": 512}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128}
LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


KINDS = ("gpt2", "vit", "gemma2", "gemma3", "mixtral", "olmo2", "phi", "phi3", "t5")


def theirs(name: str) -> tuple[str, Any]:
    """What it is read as, and a model of transformers, every number of it at random."""
    t, sizes = transformers, TEXT | HEADS
    gpt2 = {"vocab_size": 512, "n_positions": 128, "n_embd": 96, "n_layer": 3, "n_head": 6}
    windows = {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 24}
    # The scores of T5 have no scale: a wider one rounds by more than the tolerance in either library.
    t5 = {"vocab_size": 512, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4}
    vit = {"image_size": 32, "patch_size": 8, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3}
    built = {
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(**gpt2)),
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**sizes)),
        "llama, all heads": lambda: t.LlamaForCausalLM(t.LlamaConfig(**sizes | {"num_key_value_heads": 6})),
        "llama 3.2": lambda: t.LlamaForCausalLM(
            t.LlamaConfig(**sizes, tie_word_embeddings=True, rope_parameters=LLAMA_3)
        ),
        "mistral": lambda: t.MistralForCausalLM(t.MistralConfig(**sizes, sliding_window=None)),
        "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**sizes)),
        "qwen2, tied": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**sizes, tie_word_embeddings=True)),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**sizes, head_dim=32)),
        "gemma": lambda: t.GemmaForCausalLM(t.GemmaConfig(**sizes, head_dim=32)),
        "gemma2": lambda: t.Gemma2ForCausalLM(t.Gemma2Config(**sizes, **windows)),
        "gemma3": lambda: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**sizes | {"num_hidden_layers": 7}, **windows)),
        "mixtral": lambda: t.MixtralForCausalLM(t.MixtralConfig(**sizes, num_local_experts=4)),
        "olmo2": lambda: t.Olmo2ForCausalLM(t.Olmo2Config(**sizes)),
        "phi": lambda: t.PhiForCausalLM(t.PhiConfig(**sizes)),
        "phi3": lambda: t.Phi3ForCausalLM(t.Phi3Config(**sizes, sliding_window=16, pad_token_id=0)),
        "t5": lambda: t.T5ForConditionalGeneration(t.T5Config(**t5)),
        "t5, gated": lambda: t.T5ForConditionalGeneration(t.T5Config(**t5, feed_forward_proj="gated-gelu")),
        "vit": lambda: t.ViTForImageClassification(t.ViTConfig(**vit, num_attention_heads=6, num_labels=7)),
    }
    torch.manual_seed(1)
    model = built[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    kind = name.partition(",")[0]
    return kind if kind in KINDS else "llama", model.eval()


def asked(kind: str, image_size: int = 32) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.normal(size=(4, image_size, image_size, 3)).astype("float32") if kind == "vit" else rng.integers(
        0, 256, (4, 64)
    )  # fmt: skip


def answer(model: Any, kind: str, inputs: np.ndarray) -> np.ndarray:
    arguments = torch.tensor(inputs.transpose(0, 3, 1, 2) if kind == "vit" else inputs)
    answers = {"decoder_input_ids": arguments.flip(1)} if kind == "t5" else {}
    with torch.no_grad():
        return model(arguments, **answers).logits.numpy()


def begun(folder: Path) -> spanax.Run:
    workload = load(str(folder), batch_size=4)
    program = spanax.trace(build=workload.build, optimizer=optax.sgd(0.1), batch=workload.batch, loss=workload.loss)
    plan = spanax.plan(program, spanax.cluster("cpu:8"), mesh="fsdp=4,model=2")
    return spanax.start(program, plan, init=folder)


NAMES = [
    "gpt2", "llama", "llama, all heads", "llama 3.2", "mistral", "qwen2", "qwen2, tied", "qwen3", "gemma", "vit",
    "gemma2", "gemma3", "mixtral", "olmo2", "phi", "phi3", "t5", "t5, gated",
]  # fmt: skip
MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"


@pytest.mark.parametrize("name", NAMES)
def test_import_and_export_preserve_logits(name: str, tmp_path: Path) -> None:
    kind, model = theirs(name)
    model.save_pretrained(tmp_path / "theirs")
    inputs = asked(kind)
    expected = answer(model, kind, inputs)
    example = members(kind)[0].example
    import_weights(tmp_path / "theirs", kind, tmp_path / "in", into=example and f"{MODELS}/{example}")
    tokens = jnp.asarray(inputs)
    result = jax.jit(begun(tmp_path / "in").model())(*(tokens, tokens[:, ::-1]) if kind == "t5" else [tokens])
    actual = np.asarray(result[0] if kind == "mixtral" else result)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(actual, expected, atol=1e-4, rtol=0)
    export_weights(tmp_path / "in", kind, tmp_path / "out")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "theirs" / file).read_bytes()


@pytest.mark.parametrize("workload, kind", [("gpt-nano", "gpt2"), ("llama-nano", "llama"), ("vit-nano", "vit")])
def test_transformers_reads_a_model_that_was_not_imported(workload: str, kind: str, tmp_path: Path) -> None:
    """Weights and config.json of a run, read by transformers without Spanax."""
    ours = load(workload, batch_size=8)
    program = ours.trace(learning_rate=0.01, num_steps=4)
    run = spanax.start(program, spanax.plan(program, spanax.cluster("cpu:8"), layout="fsdp"))
    for _ in range(3):  # the head of a ViT begins as zeros
        run.step(jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), ours.batch))
    run.save(tmp_path / "steps").wait()
    export_weights(tmp_path / "steps", kind, tmp_path / "out", workload=workload)
    auto = transformers.AutoModelForImageClassification if kind == "vit" else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(tmp_path / "out").eval()
    inputs = asked(kind)
    actual = np.asarray(jax.jit(run.model())(jnp.asarray(inputs)))
    assert np.abs(actual).max() > 0.1
    np.testing.assert_allclose(answer(model, kind, inputs), actual, atol=1e-4, rtol=0)
