"""What an expert writes by hand: models with every activation pinned and a table of parameter layouts.

  inputs-only   parameters, optimizer and batch sharded as the guides teach it; nothing pinned inside
  expert        every value inside pinned to where it belongs as well: the bar for a layout found automatically

Both lower one training step (AdamW) from shapes alone. Dims have logical names, and `expert_rules.py` says what
they mean under each preset. `collective_bytes.py` prints what the steps move and need, beside Spanax's.

  PYTHONPATH=src:tests JAX_PLATFORMS=cpu NPROC=32 XLA_FLAGS=--xla_force_host_platform_device_count=8 \
      python benchmarks/expert.py [gpt] [vit] [mlp] [cnn] [moe]    # the losses by hand are the models' own

Shape suffixes: B batch, T and S positions, V vocab, D embed, F mlp, H heads, K head_dim, E experts, C capacity; for
images H height, W width, C channels.
"""

import dataclasses
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optax import softmax_cross_entropy_with_integer_labels as softmax_cross_entropy

from expert_rules import DENSE, EXPERTS, PRESETS, SEQUENCES, Constrain, Preset, Rules, path_text, several, spec_for
from spanax.adapters.lora import LoRA
from spanax.check.compilers.lowered_step import abstract_mesh
from spanax.hardware.mesh import MeshShape
from spanax.models import gpt, images, llama, vit
from spanax.trace.workload import AdaptedBuild
from zoo import ZOO, Case, batches, floats, ints

OPTIMIZER = optax.adamw(3e-4)

Tree = Any


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, the names of its parameters' dims, and its loss written again over a tree of arrays."""

    case: Case
    batch_size: int
    rules: Rules
    loss: Callable[[Tree, Tree, dict[str, jax.Array], Constrain], tuple[jax.Array, Tree]]
    presets: tuple[str, ...] = DENSE


def guide_spec(name: str, shape: tuple[int, ...], rules: Rules, preset: Preset) -> P:
    """What guides to FSDP teach: split the largest dim that divides, leave vectors whole; the rest as in the table.

    The kinder choice: with the expert's own table and nothing pinned, GPT moves 5 times as much and MoE 19 times.
    """
    names = [tuple(one for one in several(name) if one != "stored") for name in spec_for(name, rules)]
    names += [()] * (len(shape) - len(names))
    if not name.endswith(("scale", "bias", "mean", "var")):
        local = [size // math.prod(map(preset.ways, each)) for size, each in zip(shape, names, strict=True)]
        largest = max(range(len(shape)), key=lambda i: (local[i] % preset.ways("stored") == 0, local[i]))
        names[largest] += ("stored",)
    return preset.spec(*names)


# --- GPT -------------------------------------------------------------------------------------------------------------

GPT_CONFIG = gpt.GPTConfig(vocab_size=8192, seq_len=256, num_layers=6, num_heads=8, embed_dim=256, remat=True)
GPT_RULES: Rules = [
    (r"embed", ("split", "stored")),
    (r"positions", (None, "stored")),
    (r"norm/(scale|bias)", ("stored",)),
    (r"blocks/attention/qkv/kernel", (None, "stored", None, "split")),
    (r"blocks/attention/qkv/bias", (None, None, "split", "stored")),
    (r"blocks/attention/out/kernel", (None, "split", None, "stored")),
    (r"blocks/up/kernel", (None, "stored", "split")),
    (r"blocks/up/bias", (None, ("split", "stored"))),
    (r"blocks/down/kernel", (None, "split", "stored")),
    (r"blocks/.*", (None, "stored")),  # the other biases, and the norms
]


def layer_norm(x: jax.Array, params: Tree, epsilon: float = 1e-5) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    var = jnp.maximum(jnp.square(x).mean(-1, keepdims=True) - jnp.square(mean), 0)
    return (x - mean) * (jax.lax.rsqrt(var + epsilon) * params["scale"]) + params["bias"]


def attention(h_BTD: jax.Array, params: Tree, pin: Constrain, *, causal: bool) -> jax.Array:
    qkv = params["qkv"]
    qkv_BT3HK = jnp.einsum("BTD,DnHK->BTnHK", h_BTD, qkv["kernel"]) + qkv["bias"]
    qkv_BT3HK = pin(qkv_BT3HK, "batch", "queries", None, "split")
    q_BTHK, k_BSHK, v_BSHK = (qkv_BT3HK[:, :, i] for i in range(3))
    k_BSHK, v_BSHK = (pin(x, "batch", None, "split") for x in (k_BSHK, v_BSHK))
    scores_BHTS = jnp.einsum("BTHK,BSHK->BHTS", q_BTHK, k_BSHK) / q_BTHK.shape[-1] ** 0.5
    scores_BHTS = pin(scores_BHTS, "batch", "split", "queries")
    if causal:
        scores_BHTS = jnp.where(jnp.tril(jnp.ones(scores_BHTS.shape[-2:], bool)), scores_BHTS, -jnp.inf)
    h_BTHK = jnp.einsum("BHTS,BSHK->BTHK", jax.nn.softmax(scores_BHTS), v_BSHK)
    h_BTHK = pin(h_BTHK, "batch", "queries", "split")
    return jnp.einsum("BTHK,HKD->BTD", h_BTHK, params["out"]["kernel"]) + params["out"]["bias"]


def block(x_BTD: jax.Array, params: Tree, pin: Constrain, *, causal: bool, epsilon: float) -> jax.Array:
    """A pre-norm transformer block, of GPT and of ViT."""
    h_BTD = pin(layer_norm(x_BTD, params["attention_norm"], epsilon), "batch", "seq")
    x_BTD = pin(x_BTD + attention(h_BTD, params["attention"], pin, causal=causal), "batch", "seq")
    h_BTD = pin(layer_norm(x_BTD, params["mlp_norm"], epsilon), "batch", "seq")
    h_BTF = pin(h_BTD @ params["up"]["kernel"] + params["up"]["bias"], "batch", "queries", "split")
    h_BTF = pin(jax.nn.gelu(h_BTF, approximate=causal), "batch", "queries", "split")
    return pin(x_BTD + h_BTF @ params["down"]["kernel"] + params["down"]["bias"], "batch", "seq")


def blocks(x_BTD: jax.Array, params: Tree, rules: Rules, pin: Constrain, **how: Any) -> jax.Array:
    def body(x_BTD: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
        return block(x_BTD, pin.gathered(layer, rules, stacked="blocks/"), pin, **how), None

    return jax.lax.scan(jax.checkpoint(body, prevent_cse=False), x_BTD, params)[0]


def gpt_loss(params: Tree, rest: Tree, batch: dict[str, jax.Array], pin: Constrain) -> tuple[jax.Array, Tree]:
    tokens_BTD = pin.look_up(params["embed"], batch["inputs"])
    stack = params["blocks"]
    params = pin.gathered({name: leaf for name, leaf in params.items() if name != "blocks"}, GPT_RULES)
    x_BTD = pin(pin(tokens_BTD, "batch", "seq") + params["positions"], "batch", "seq")
    x_BTD = blocks(x_BTD, stack, GPT_RULES, pin, causal=True, epsilon=1e-5)
    logits_BTV = pin(layer_norm(x_BTD, params["norm"]) @ params["embed"].T, "batch", "queries", "split")
    return softmax_cross_entropy(logits_BTV, batch["targets"]).mean(), rest


# --- ViT -------------------------------------------------------------------------------------------------------------

VIT_CONFIG = vit.ViTConfig(32, 4, num_layers=4, num_heads=8, embed_dim=256, mlp_dim=1024, remat=True)
VIT_RULES: Rules = [
    (r"patches/kernel", (None, None, None, "stored")),
    (r"patches/bias|norm/(scale|bias)", ("stored",)),
    (r"class_token|positions", (None, None, "stored")),
    (r"head/kernel", ("stored", "split")),
    (r"head/bias", (("split", "stored"),)),
    *(rule for rule in GPT_RULES if rule[0].startswith("blocks")),
]


def vit_loss(params: Tree, rest: Tree, batch: dict[str, jax.Array], pin: Constrain) -> tuple[jax.Array, Tree]:
    stack = params["blocks"]
    params = pin.gathered({name: leaf for name, leaf in params.items() if name != "blocks"}, VIT_RULES)
    x_BYXD = jax.lax.conv_general_dilated(
        batch["images"], params["patches"]["kernel"], (4, 4), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    x_BTD = pin((x_BYXD + params["patches"]["bias"]).reshape(x_BYXD.shape[0], -1, x_BYXD.shape[-1]), "batch")
    class_B1D = jnp.broadcast_to(params["class_token"], (x_BTD.shape[0], 1, x_BTD.shape[-1]))
    x_BTD = pin(jnp.concatenate([class_B1D, x_BTD], axis=1) + params["positions"], "batch")
    x_BTD = blocks(x_BTD, stack, VIT_RULES, pin, causal=False, epsilon=1e-6)
    h_BD = layer_norm(pin(x_BTD[:, 0], "batch"), params["norm"], 1e-6)
    logits_BV = pin(h_BD @ params["head"]["kernel"] + params["head"]["bias"], "batch", "split")
    return softmax_cross_entropy(logits_BV, batch["labels"]).mean(), rest


# --- MLP -------------------------------------------------------------------------------------------------------------

MLP_RULES: Rules = [
    (r"up/kernel", ("stored", "split")),  # by columns, then by rows; the third layer is left whole
    (r"up/bias", (("split", "stored"),)),
    (r"mid/kernel", ("split", "stored")),
    (r"down/kernel|.*/bias", ("stored",)),
]


def mlp_loss(params: Tree, rest: Tree, batch: dict[str, jax.Array], pin: Constrain) -> tuple[jax.Array, Tree]:
    params = pin.gathered(params, MLP_RULES)
    h_BF = pin(batch["x"] @ params["up"]["kernel"] + params["up"]["bias"], "batch", "split")
    h_BF = pin(jax.nn.relu(h_BF), "batch", "split")
    h_BD = pin(h_BF @ params["mid"]["kernel"], "batch") + params["mid"]["bias"]
    h_BD = pin(jax.nn.silu(h_BD), "batch")
    out = h_BD @ params["down"]["kernel"] + params["down"]["bias"]  # a constraint here would cost a copy
    return jnp.mean(jnp.square(out - batch["y"])), rest


# --- CNN -------------------------------------------------------------------------------------------------------------

CNN_RULES: Rules = [
    (r"(stem|depthwise)/kernel", (None, None, None, ("split", "stored"))),
    (r".*_norm/(scale|bias)", (("split", "stored"),)),
    (r"pointwise/kernel", (None, None, "split", "stored")),
    (r"pointwise/bias", ("stored",)),
    (r"head/kernel", ("stored", "split")),
    (r"head/bias", (("split", "stored"),)),
    (r".*_norm/(mean|var)", ()),
]


def convolve(x_BHWC: jax.Array, kernel: jax.Array, stride: int = 1, groups: int = 1) -> jax.Array:
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x_BHWC, kernel, (stride, stride), "SAME", dimension_numbers=layout, feature_group_count=groups
    )


def batch_norm(x_BHWC: jax.Array, params: Tree, stats: Tree) -> tuple[jax.Array, Tree]:
    mean = x_BHWC.mean((0, 1, 2))
    var = jnp.maximum(jnp.square(x_BHWC).mean((0, 1, 2)) - jnp.square(mean), 0)
    new = {"mean": 0.99 * stats["mean"] + 0.01 * mean, "var": 0.99 * stats["var"] + 0.01 * var}
    return (x_BHWC - mean) * (jax.lax.rsqrt(var + 1e-5) * params["scale"]) + params["bias"], new


def pool(x_BHWC: jax.Array, init: float, reduce: Callable[..., jax.Array]) -> jax.Array:
    return jax.lax.reduce_window(x_BHWC, init, reduce, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def cnn_loss(params: Tree, rest: Tree, batch: dict[str, jax.Array], pin: Constrain) -> tuple[jax.Array, Tree]:
    params, channels = pin.gathered(params, CNN_RULES), ("batch", None, None, "split")
    x = pin(convolve(batch["x"], params["stem"]["kernel"], stride=2), *channels)
    x, stem_stats = batch_norm(x, params["stem_norm"], rest["stem_norm"])
    x = pin(jax.nn.relu(x), *channels)  # without this pin, 16 KiB more
    x = pin(pool(x, -jnp.inf, jax.lax.max), *channels)
    x = pin(convolve(x, params["depthwise"]["kernel"], groups=16), *channels)
    x, depthwise_stats = batch_norm(x, params["depthwise_norm"], rest["depthwise_norm"])
    x = pin(jax.nn.relu(x), *channels)
    x = pin(convolve(x, params["pointwise"]["kernel"]), "batch") + params["pointwise"]["bias"]
    x = pin(pool(x, 0.0, jax.lax.add) / 4, "batch").mean((1, 2))
    logits = pin(x @ params["head"]["kernel"] + params["head"]["bias"], "batch", "split")
    stats = {"stem_norm": stem_stats, "depthwise_norm": depthwise_stats}
    return softmax_cross_entropy(logits, batch["y"]).mean(), stats


# --- mixture of experts ----------------------------------------------------------------------------------------------

MOE_RULES: Rules = [
    (r"embed/embedding", (None, ("split", "stored"))),
    (r"(blocks/\d/)?norm/(scale|bias)", ("stored",)),
    (r"blocks/\d/router/kernel", ("stored",)),
    (r"blocks/\d/up", ("experts", "stored", "split")),
    (r"blocks/\d/down", ("experts", "split", "stored")),
    (r"head/kernel", ("stored", "split")),
]


def moe_block(x_BTD: jax.Array, params: Tree, pin: Constrain) -> jax.Array:
    h_BTD, capacity = pin(layer_norm(x_BTD, params["norm"], 1e-6), "batch"), 2 * x_BTD.shape[1] // 8 + 2
    gates_BT2, chosen_BT2 = pin.top_k(pin(jax.nn.softmax(h_BTD @ params["router"]["kernel"]), "batch"), 2)
    gates_BT2 = pin(gates_BT2 / gates_BT2.sum(-1, keepdims=True), "batch")
    chosen_BT2E = pin(jax.nn.one_hot(pin(chosen_BT2, "batch"), 8), "batch")
    place_BSE = pin(jnp.cumsum(chosen_BT2E.reshape(x_BTD.shape[0], -1, 8), axis=1) - 1, "batch")
    place_BT2E = place_BSE.reshape(chosen_BT2E.shape).astype(jnp.int32)
    slot_BT2EC = pin(chosen_BT2E[..., None] * jax.nn.one_hot(place_BT2E, capacity), "batch")
    combine_BTEC = pin(jnp.einsum("btn,btnec->btec", gates_BT2, slot_BT2EC), "batch")
    h_EBCD = pin(jnp.einsum("btec,btd->ebcd", slot_BT2EC.sum(2), h_BTD), "experts", "rows")
    h_EBCF = jnp.einsum("ebcd,edf->ebcf", h_EBCD, params["up"])
    h_EBCF = pin(jax.nn.gelu(h_EBCF), "experts", "rows", None, "split")
    h_EBCD = pin(jnp.einsum("ebcf,efd->ebcd", h_EBCF, params["down"]), "experts", "rows")
    return pin(x_BTD + jnp.einsum("btec,ebcd->btd", combine_BTEC, h_EBCD), "batch")


def moe_loss(params: Tree, rest: Tree, batch: dict[str, jax.Array], pin: Constrain) -> tuple[jax.Array, Tree]:
    params = pin.gathered(params, MOE_RULES)
    x_BTD = pin(pin(params["embed"]["embedding"])[batch["x"]], "batch")  # whole: the table is smaller than its result
    for block in params["blocks"].values():
        x_BTD = moe_block(x_BTD, block, pin)
    x_BTD = pin(x_BTD * jax.lax.rsqrt(jnp.square(x_BTD).mean(-1, keepdims=True) + 1e-6), "batch")
    logits_BTV = pin(x_BTD * params["norm"]["scale"] @ params["head"]["kernel"], "batch", None, "split")
    return softmax_cross_entropy(logits_BTV, batch["y"]).mean(), rest


# --- adapters ---------------------------------------------------------------------------------------------------------

LORA = LoRA(16, 32.0)
LORA_CONFIG = dataclasses.replace(llama.SIZES["8b"], num_layers=4, seq_len=512, remat=True)
LORA_RULES: Rules = [
    (r"embed", ("split", "stored")),
    (r"head/kernel", ("stored", "split")),
    (r"norm/scale", ("stored",)),
    (r"blocks/\w+_norm/scale", (None, "stored")),
    (r"blocks/\w+/(q|k|v|gate|up)/kernel", (None, "stored", "split")),
    (r"blocks/\w+/(q|k|v|gate|up)/lora_a", (None, "stored")),
    (r"blocks/\w+/(q|k|v|gate|up)/lora_b", (None, "stored", "split")),
    (r"blocks/attention/out/kernel", (None, "split", None, "stored")),
    (r"blocks/attention/out/lora_a", (None, "split", "stored")),
    (r"blocks/mlp/down/kernel", (None, "split", "stored")),
    (r"blocks/mlp/down/lora_a", (None, ("split", "stored"))),
    (r"blocks/\w+/(out|down)/lora_b", (None, None, "stored")),
]


def rms_norm(x: jax.Array, params: Tree) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5) * params["scale"]).astype(x.dtype)


def adapted(x: jax.Array, layer: Tree, pin: Constrain, *names: Any, dims: int = 1) -> jax.Array:
    """A linear layer that contracts the last dims, with its adapter; `names` are those of the result."""
    low_BTR = pin(jnp.tensordot(x, layer["lora_a"], dims), "batch", "queries")
    update = jnp.tensordot(low_BTR, layer["lora_b"], 1) * LORA.scale
    return pin(jnp.tensordot(x, layer["kernel"], dims) + update, "batch", *names)


def llama_block(x_BTD: jax.Array, params: Tree, pin: Constrain) -> jax.Array:
    layers, heads = params["attention"], ("batch", "queries", "split")
    h_BTD = pin(rms_norm(x_BTD, params["attention_norm"]), "batch", "seq")
    q_BTHK, k_BTHK, v_BTHK = (adapted(h_BTD, layers[name], pin, "queries", "split") for name in "qkv")
    q_BTHK, k_BTHK = (
        pin(llama.rotate(x, LORA_CONFIG.rope_theta), "batch", "queries", "split") for x in (q_BTHK, k_BTHK)
    )
    h_BTHK = pin(jax.nn.dot_product_attention(q_BTHK, k_BTHK, v_BTHK, is_causal=True), *heads)
    x_BTD = pin(x_BTD + adapted(h_BTHK, layers["out"], pin, "seq", dims=2), "batch", "seq")
    h_BTD = pin(rms_norm(x_BTD, params["mlp_norm"]), "batch", "seq")
    gate_BTF, up_BTF = (adapted(h_BTD, params["mlp"][name], pin, "queries", "split") for name in ("gate", "up"))
    h_BTF = pin(jax.nn.silu(gate_BTF) * up_BTF, "batch", "queries", "split")
    return pin(x_BTD + adapted(h_BTF, params["mlp"]["down"], pin, "seq"), "batch", "seq")


def lora_loss(adapters: Tree, frozen: Tree, batch: dict[str, jax.Array], pin: Constrain) -> tuple[jax.Array, Tree]:
    adapters = jax.tree.map(lambda leaf: leaf.astype(frozen["embed"].dtype), adapters)
    layers = nnx.traversals.flatten_mapping(adapters["blocks"]) | nnx.traversals.flatten_mapping(frozen["blocks"])
    params = pin.gathered({name: leaf for name, leaf in frozen.items() if name != "blocks"}, LORA_RULES)

    def body(x_BTD: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
        return llama_block(x_BTD, pin.gathered(layer, LORA_RULES, stacked="blocks/"), pin), None

    x_BTD = pin(pin.look_up(frozen["embed"], batch["inputs"]), "batch", "seq")
    stack = nnx.traversals.unflatten_mapping(layers)
    x_BTD, _ = jax.lax.scan(jax.checkpoint(body, prevent_cse=False), x_BTD, stack)
    logits_BTV = pin(rms_norm(x_BTD, params["norm"]) @ params["head"]["kernel"], "batch", "queries", "split")
    return softmax_cross_entropy(logits_BTV.astype(jnp.float32), batch["targets"]).mean(), frozen


def lora_model_loss(model: llama.Llama, batch: dict[str, jax.Array]) -> jax.Array:
    """The model's own loss, computed in the dtype of the frozen parameters."""
    graph, state = nnx.split(model)
    return llama.loss(nnx.merge(graph, jax.tree.map(lambda leaf: leaf.astype(model.embed.dtype), state)), batch)


def lora_case(config: llama.LlamaConfig, dtype: str) -> Case:
    text = batches(inputs=ints(config.vocab_size, config.seq_len), targets=ints(config.vocab_size, config.seq_len))
    return Case(AdaptedBuild(partial(llama.Llama, config), LORA, dtype=dtype), lora_model_loss, text, wrt=nnx.LoRAParam)


GPT_TEXT = batches(inputs=ints(8192, 256), targets=ints(8192, 256))
LABELLED = batches(images=floats(32, 32, 3), labels=ints(1000))
GPT = Case(lambda rngs: gpt.GPT(GPT_CONFIG, rngs), gpt.loss, GPT_TEXT)
VIT = Case(lambda rngs: vit.ViT(VIT_CONFIG, rngs), lambda *args: images.loss(*args)[0], LABELLED)
WORKLOADS = {
    "gpt": Workload(GPT, 32, GPT_RULES, gpt_loss, SEQUENCES),
    "vit": Workload(VIT, 64, VIT_RULES, vit_loss),  # 65 tokens: no preset can split them
    "moe": Workload(ZOO["moe"], 64, MOE_RULES, moe_loss, EXPERTS),
    "lora": Workload(lora_case(LORA_CONFIG, "bfloat16"), 16, LORA_RULES, lora_loss),
    "mlp": Workload(ZOO["mlp"], 1024, MLP_RULES, mlp_loss, ("fsdp", "fsdp+tensor")),
    "cnn": Workload(ZOO["cnn"], 128, CNN_RULES, cnn_loss, ("fsdp", "fsdp+tensor")),
}


# --- the step ---------------------------------------------------------------------------------------------------------


def make_mesh(sizes: dict[str, int], platform: str = "cpu") -> Mesh | AbstractMesh:
    """A mesh of this process's devices, or one without devices for another platform's compiler."""
    if platform != "cpu":
        return abstract_mesh(MeshShape.of(sizes), platform)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(jax.sharding.AxisType.Auto,) * len(sizes))


def lower_step(workload: Workload, preset: Preset, platform: str, constrain: bool) -> jax.stages.Lowered:
    """One donated AdamW step, all of its state pinned to the table; from shapes only."""
    mesh, rules = make_mesh(preset.sizes, platform), workload.rules
    pin = Constrain(mesh if constrain else None, preset)
    model = nnx.eval_shape(lambda: workload.case.build(nnx.Rngs(0)))
    _, params, rest = nnx.split(model, workload.case.wrt, ...)
    params, rest = nnx.to_pure_dict(params), nnx.to_pure_dict(rest)

    def store(path: tuple, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        name = path_text(path)
        known = preset.spec(*spec_for(name, rules)) if constrain else guide_spec(name, leaf.shape, rules, preset)
        return NamedSharding(mesh, known)

    stored, whole = jax.tree.map_with_path(store, params), NamedSharding(mesh, P())
    moments = jax.eval_shape(OPTIMIZER.init, params)
    moments_stored = optax.tree.map_params(
        OPTIMIZER, lambda _, sharding: sharding, moments, stored, transform_non_params=lambda _: whole
    )
    state = (params, moments, rest)
    shardings = (stored, moments_stored, jax.tree.map_with_path(store, rest))
    batch = jax.eval_shape(lambda: workload.case.batch(workload.batch_size))
    given = {
        name: NamedSharding(mesh, preset.spec("batch", *(["queries"] if leaf.ndim == 2 else [])))
        for name, leaf in batch.items()
    }

    def step(state: Tree, batch: dict[str, jax.Array]) -> tuple[Tree, jax.Array]:
        params, moments, rest = state
        (loss, rest), grads = jax.value_and_grad(workload.loss, has_aux=True)(params, rest, batch, pin)
        if constrain:  # reduce-scatter the gradients, keep the optimizer's arithmetic in the stored layout
            grads = jax.lax.with_sharding_constraint(grads, stored)
        updates, moments = OPTIMIZER.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments, rest), loss

    jitted = jax.jit(step, donate_argnums=0, in_shardings=(shardings, given), out_shardings=(shardings, whole))
    return jitted.trace(state, batch).lower(lowering_platforms=(platform,))


# How to build a step: a name, and a function of a workload, a preset and a platform.
STEPS: dict[str, Callable[[Workload, Preset, str], jax.stages.Lowered]] = {
    "inputs-only": partial(lower_step, constrain=False),
    "expert": partial(lower_step, constrain=True),
}


# --- the same numbers ------------------------------------------------------------------------------------------------


def check(name: str) -> None:
    """The loss written by hand is the model's own, on one device and under every preset."""
    workload = WORKLOADS[name]
    if name == "lora":  # 8B shapes are for compilers, and bfloat16 would hide what differs
        config = dataclasses.replace(llama.SIZES["nano"], num_kv_heads=8, seq_len=32, remat=True)
        workload = dataclasses.replace(workload, case=lora_case(config, "float32"))
    batch = workload.case.batch(16)
    model, random = nnx.jit(lambda: workload.case.build(nnx.Rngs(0)))(), np.random.default_rng(0)
    _, params, rest = nnx.split(model, workload.case.wrt, ...)
    # What is born as zero, such as ViT's head, would hide what comes before it.
    params = jax.tree.map(lambda leaf: leaf + 0.02 * random.normal(size=leaf.shape).astype(leaf.dtype), params)
    nnx.update(model, params)
    params, rest = jax.tree.map(np.asarray, (nnx.to_pure_dict(params), nnx.to_pure_dict(rest)))
    expected = nnx.jit(workload.case.loss)(model, batch)
    for each in (None, *workload.presets):
        rules = PRESETS[each or "data"]
        pin = Constrain(None if each is None else make_mesh(rules.sizes), rules)
        loss, _ = jax.jit(workload.loss, static_argnums=3)(params, rest, batch, pin)
        np.testing.assert_allclose(loss, expected, rtol=1e-6, err_msg=f"{name} {each}")
        print(f"{name} {each or 'one device'}: {float(loss):.6f}", flush=True)


if __name__ == "__main__":
    for name in sys.argv[1:] or WORKLOADS:
        check(name)
