"""Families: what Hugging Face calls the weights and the settings of our models, as tables.

A weight is one of our arrays and the tensors that make it up. `dims` says how, dim by dim: `(H K) D -> D H K` takes a
matrix of Hugging Face's apart into heads and puts its last dim first; read from right to left it is the way back. Where
several tensors make up one array, `*` is the dim they lie along. In paths and names, `*` is the number of a layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spanax.errors import SpanaxError, nearest


@dataclass(frozen=True)
class Weight:
    """One of our arrays, by its path, and the names and dims of the tensors that it is made of."""

    path: str
    names: tuple[str, ...]
    dims: str = ""


@dataclass(frozen=True)
class Setting:
    """A setting of our model, what config.json calls it, and what it is where that does not say; None: it must say."""

    name: str
    theirs: str
    default: Any = None


@dataclass(frozen=True)
class Family:
    """How a model of ours and one of transformers are each other.

    Attributes:
      model: the module and the class below `spanax.models`.
      kinds: `model_type` in config.json and the class it belongs to; `implied` says what of our settings each implies.
      prefix: what the names of a whole model begin with and those of a bare one do not.
      weights: every array.
      left_out: names of tensors that no training changes: masks and angles, which our models compute.
      tied: a name that may repeat another tensor.
      settings: of the shape, by our names.
      fixed: settings of config.json that our model has one way only: what they may be, and are where they are missing.
    """

    model: tuple[str, str]
    kinds: Mapping[str, str]
    prefix: str
    weights: tuple[Weight, ...]
    settings: tuple[Setting, ...]
    fixed: Mapping[str, tuple[Any, ...]]
    implied: Mapping[str, Mapping[str, Any]]
    left_out: tuple[str, ...] = ()
    tied: tuple[str, str] = ("", "")


def _linear(path: str, name: str, weight: str = "F D -> D F", bias: str = "") -> tuple[Weight, Weight]:
    """A layer whose matrix and bias are called `weight` and `bias` there."""
    return Weight(f"{path}.kernel", (f"{name}.weight",), weight), Weight(f"{path}.bias", (f"{name}.bias",), bias)


def _norm(path: str, name: str) -> tuple[Weight, Weight]:
    return Weight(f"{path}.scale", (f"{name}.weight",)), Weight(f"{path}.bias", (f"{name}.bias",))


_GPT2 = Family(
    model=("gpt", "GPT"),
    kinds={"gpt2": "GPT2LMHeadModel"},
    prefix="transformer.",
    # GPT-2's Conv1D keeps its matrices as (in, out), as we do.
    weights=(
        Weight("embed", ("transformer.wte.weight",)),
        Weight("positions", ("transformer.wpe.weight",)),
        *_norm("blocks.*.attention_norm", "transformer.h.*.ln_1"),
        *_linear("blocks.*.attention.qkv", "transformer.h.*.attn.c_attn", "D (3 H K) -> D 3 H K", "(3 H K) -> 3 H K"),
        *_linear("blocks.*.attention.out", "transformer.h.*.attn.c_proj", "(H K) D -> H K D"),
        *_norm("blocks.*.mlp_norm", "transformer.h.*.ln_2"),
        *_linear("blocks.*.up", "transformer.h.*.mlp.c_fc", ""),
        *_linear("blocks.*.down", "transformer.h.*.mlp.c_proj", ""),
        *_norm("norm", "transformer.ln_f"),
    ),
    settings=(
        Setting("vocab_size", "vocab_size"),
        Setting("seq_len", "n_positions", 1024),
        Setting("num_layers", "n_layer"),
        Setting("num_heads", "n_head"),
        Setting("embed_dim", "n_embd"),
    ),
    fixed={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "layer_norm_epsilon": (1e-5,),
        "n_inner": (None,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    },
    implied={"gpt2": {}},
    left_out=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
    tied=("lm_head.weight", "transformer.wte.weight"),
)

_LLAMA = Family(
    model=("llama", "Llama"),
    kinds={
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
    },
    prefix="model.",
    weights=(
        Weight("embed", ("model.embed_tokens.weight",)),
        Weight("blocks.*.attention_norm.scale", ("model.layers.*.input_layernorm.weight",)),
        *_linear("blocks.*.attention.q", "model.layers.*.self_attn.q_proj", "(H K) D -> D H K", "(H K) -> H K"),
        *_linear("blocks.*.attention.k", "model.layers.*.self_attn.k_proj", "(H K) D -> D H K", "(H K) -> H K"),
        *_linear("blocks.*.attention.v", "model.layers.*.self_attn.v_proj", "(H K) D -> D H K", "(H K) -> H K"),
        Weight("blocks.*.attention.q_norm.scale", ("model.layers.*.self_attn.q_norm.weight",)),
        Weight("blocks.*.attention.k_norm.scale", ("model.layers.*.self_attn.k_norm.weight",)),
        Weight("blocks.*.attention.out.kernel", ("model.layers.*.self_attn.o_proj.weight",), "D (H K) -> H K D"),
        Weight("blocks.*.mlp_norm.scale", ("model.layers.*.post_attention_layernorm.weight",)),
        Weight("blocks.*.mlp.gate.kernel", ("model.layers.*.mlp.gate_proj.weight",), "F D -> D F"),
        Weight("blocks.*.mlp.up.kernel", ("model.layers.*.mlp.up_proj.weight",), "F D -> D F"),
        Weight("blocks.*.mlp.down.kernel", ("model.layers.*.mlp.down_proj.weight",), "D F -> F D"),
        Weight("norm.scale", ("model.norm.weight",)),
        Weight("head.kernel", ("lm_head.weight",), "V D -> D V"),
    ),
    settings=(
        Setting("vocab_size", "vocab_size"),
        Setting("seq_len", "max_position_embeddings", 2048),
        Setting("num_layers", "num_hidden_layers"),
        Setting("num_heads", "num_attention_heads"),
        Setting("num_kv_heads", "num_key_value_heads"),
        Setting("embed_dim", "hidden_size"),
        Setting("mlp_dim", "intermediate_size"),
        Setting("head_dim", "head_dim"),
        Setting("norm_epsilon", "rms_norm_eps", 1e-6),
        Setting("tied_embeddings", "tie_word_embeddings", False),
        Setting("rope_theta", "rope_theta", 10_000.0),
    ),
    fixed={
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "sliding_window": (None,),
        "pretraining_tp": (1, None),
    },
    implied={"llama": {}, "mistral": {}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}},
    left_out=("model.layers.*.self_attn.rotary_emb.inv_freq",),
    tied=("lm_head.weight", "model.embed_tokens.weight"),
)

_LAYER = "vit.encoder.layer.*"
_QKV = tuple(f"{_LAYER}.attention.attention.{name}" for name in ("query", "key", "value"))

_VIT = Family(
    model=("vit", "ViT"),
    kinds={"vit": "ViTForImageClassification"},
    prefix="vit.",
    weights=(
        Weight("class_token", ("vit.embeddings.cls_token",)),
        Weight("positions", ("vit.embeddings.position_embeddings",)),
        *_linear("patches", "vit.embeddings.patch_embeddings.projection", "D C Y X -> Y X C D"),
        *_norm("blocks.*.attention_norm", f"{_LAYER}.layernorm_before"),
        Weight("blocks.*.attention.qkv.kernel", tuple(f"{name}.weight" for name in _QKV), "(H K) D -> D * H K"),
        Weight("blocks.*.attention.qkv.bias", tuple(f"{name}.bias" for name in _QKV), "(H K) -> * H K"),
        *_linear("blocks.*.attention.out", f"{_LAYER}.attention.output.dense", "D (H K) -> H K D"),
        *_norm("blocks.*.mlp_norm", f"{_LAYER}.layernorm_after"),
        *_linear("blocks.*.up", f"{_LAYER}.intermediate.dense"),
        *_linear("blocks.*.down", f"{_LAYER}.output.dense"),
        *_norm("norm", "vit.layernorm"),
        *_linear("head", "classifier"),
    ),
    settings=(
        Setting("image_size", "image_size"),
        Setting("patch_size", "patch_size"),
        Setting("num_layers", "num_hidden_layers"),
        Setting("num_heads", "num_attention_heads"),
        Setting("embed_dim", "hidden_size"),
        Setting("mlp_dim", "intermediate_size"),
        Setting("num_classes", "num_labels", 2),
        Setting("norm_epsilon", "layer_norm_eps", 1e-12),
    ),
    fixed={"hidden_act": ("gelu",), "qkv_bias": (True,), "num_channels": (3,)},
    implied={"vit": {}},
)

FAMILIES: Mapping[str, Family] = {"gpt2": _GPT2, "llama": _LLAMA, "vit": _VIT}


def family(name: str) -> Family:
    """The family of a name.

    Raises:
      SpanaxError: there is none.

    Example:
      >>> family("gpt2").weights[0]
      Weight(path='embed', names=('transformer.wte.weight',), dims='')
    """
    if name not in FAMILIES:
        raise SpanaxError(f"weights cannot be read or written as '{name}'.", fix=nearest(name, FAMILIES))
    return FAMILIES[name]
