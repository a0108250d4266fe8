"""Tables that map the weights and settings of Spanax models to those of Hugging Face.

A `Weight` maps an array of a Spanax model to one or more Hugging Face tensors. Its `dims` are an einops-like pattern:
`(H K) D -> D H K` reshapes the first dim of a tensor into heads and moves its last dim to the front; right to left it
is the inverse. Several tensors of an array are stacked along the dim `*`. In paths and names, `*` is a layer index.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spanax.errors import UnknownNameError, nearest


@dataclass(frozen=True)
class Weight:
    """An array of a Spanax model by path, and the names and `dims` of its Hugging Face tensors."""

    path: str
    names: tuple[str, ...]
    dims: str = ""


@dataclass(frozen=True)
class Setting:
    """A setting of a Spanax model, its key in config.json, and its default there; None means the key is required."""

    name: str
    key: str
    default: Any = None


@dataclass(frozen=True)
class Family:
    """The mapping between a Spanax model and the equivalent models of transformers.

    Attributes:
      model: the module in `spanax.models` and its class.
      kinds: `model_type` in config.json -> class in transformers; `implied` has the Spanax settings of each type.
      prefix: the prefix of tensor names in a model with a head; base models do not have it.
      weights: all arrays of the model.
      left_out: names of tensors that are not trained, such as masks and rotary angles, which Spanax models compute.
      tied: the name of a tensor that may duplicate another tensor, and the name of that tensor.
      settings: the settings of the config.
      fixed: keys of config.json with a single supported meaning -> allowed values; the first one is the default.
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
    """Returns the kernel and bias of a layer with the tensors `weight` and `bias`."""
    return Weight(f"{path}.kernel", (f"{name}.weight",), weight), Weight(f"{path}.bias", (f"{name}.bias",), bias)


def _norm(path: str, name: str) -> tuple[Weight, Weight]:
    return Weight(f"{path}.scale", (f"{name}.weight",)), Weight(f"{path}.bias", (f"{name}.bias",))


_GPT2 = Family(
    model=("gpt", "GPT"),
    kinds={"gpt2": "GPT2LMHeadModel"},
    prefix="transformer.",
    # The matrices of GPT-2's Conv1D are (in, out), as in Flax.
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
    """Returns the family with this name.

    Raises:
      SpanaxError: no family has this name.

    Example:
      >>> family("gpt2").weights[0]
      Weight(path='embed', names=('transformer.wte.weight',), dims='')
    """
    if name not in FAMILIES:
        raise UnknownNameError(f"unknown kind of weights '{name}'.", fix=nearest(name, FAMILIES))
    return FAMILIES[name]
