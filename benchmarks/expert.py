"""What an expert writes by hand: models with every activation pinned and a table of parameter layouts.

  inputs-only   parameters, optimizer and batch sharded as the guides teach it; nothing pinned inside
  expert        every value inside pinned to where it belongs as well: the bar for a layout found automatically

Both compile one training step (AdamW) from shapes alone; the table shows what it moves and needs, per device.

  PYTHONPATH=src:tests JAX_PLATFORMS=cpu NPROC=32 XLA_FLAGS=--xla_force_host_platform_device_count=8 \
      python benchmarks/expert.py [--check] [gpt] [mlp] [cnn] [moe]

Shape suffixes: B batch, T and S positions, V vocab, D embed, F mlp, H heads, K head_dim, E experts, C capacity; for
images H height, W width, C channels.
"""

import dataclasses
import itertools
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optax import softmax_cross_entropy_with_integer_labels as softmax_cross_entropy

from hlo_bytes import KINDS, collectives
from spanax.models import gpt
from zoo import ZOO, Case, batches, ints

# One table serves both layouts: an axis of size 1 splits nothing.
LAYOUTS = {"fsdp": {"fsdp": 8, "model": 1}, "fsdp+tensor": {"fsdp": 4, "model": 2}}
OPTIMIZER = optax.adamw(3e-4)

Tree = Any
Rules = list[tuple[str, P]]


class Constrain:
    """Pins values to a mesh; without one, does nothing."""

    def __init__(self, mesh: Mesh | None):
        self.mesh = mesh

    def __call__(self, x: jax.Array, *axes: Any) -> jax.Array:
        return x if self.mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*axes)))

    def top_k(self, x: jax.Array, k: int) -> list[jax.Array]:
        """XLA gathers the whole operand of a top-k, whatever its other dims are split over: run it by hand."""
        if self.mesh is None:
            return jax.lax.top_k(x, k)
        split = P("fsdp")
        return jax.shard_map(lambda x: jax.lax.top_k(x, k), mesh=self.mesh, in_specs=split, out_specs=split)(x)

    def gathered(self, params: Tree, rules: Rules, stacked: str = "") -> Tree:
        """Parameters where they are used: whole over `fsdp`, still split over `model`.

        Inside a loop over the stack of layers under the path `stacked`, they come without its dimension.
        """

        def gather(path: tuple, leaf: jax.Array) -> jax.Array:
            axes = tuple(spec_for(stacked + path_text(path), rules))[1 if stacked else 0 :]
            return self(leaf, *("model" if "model" in _names(axis) else None for axis in axes))

        return jax.tree.map_with_path(gather, params)


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model of the zoo, the layout of its parameters, and its loss written again over a tree of arrays."""

    case: Case
    batch_size: int
    rules: Rules
    loss: Callable[[Tree, Tree, dict[str, jax.Array], Constrain], tuple[jax.Array, Tree]]


def _names(axis: Any) -> tuple[str, ...]:
    return () if axis is None else (axis,) if isinstance(axis, str) else axis


def path_text(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def spec_for(name: str, rules: Rules) -> P:
    """The layout of the first rule that the path `name` matches; every leaf must have one."""
    for pattern, spec in rules:
        if re.fullmatch(pattern, name):
            return spec
    raise KeyError(f"no rule for {name}")


def guide_spec(name: str, shape: tuple[int, ...], rules: Rules, sizes: dict[str, int]) -> P:
    """What guides to FSDP teach: split the largest dim that divides, leave vectors whole; `model` as in the table.

    The kinder choice: with the expert's own table and nothing pinned, GPT moves 5 times as much and MoE 19 times.
    """
    axes = ["model" if "model" in _names(axis) else None for axis in spec_for(name, rules)]
    axes += [None] * (len(shape) - len(axes))
    if not name.endswith(("scale", "bias")):
        local = [size // sizes["model"] if axis else size for size, axis in zip(shape, axes, strict=True)]
        largest = max(range(len(shape)), key=lambda i: (local[i] % sizes["fsdp"] == 0, local[i]))
        axes[largest] = ("model", "fsdp") if axes[largest] else "fsdp"
    return P(*axes)


# --- GPT -------------------------------------------------------------------------------------------------------------

GPT_CONFIG = gpt.GPTConfig(vocab_size=8192, seq_len=256, num_layers=6, num_heads=8, embed_dim=256, remat=True)
GPT_RULES: Rules = [
    (r"embed", P("model", "fsdp")),
    (r"positions", P(None, "fsdp")),
    (r"norm/(scale|bias)", P("fsdp")),
    (r"blocks/attention/qkv/kernel", P(None, "fsdp", None, "model")),
    (r"blocks/attention/qkv/bias", P(None, None, "model", "fsdp")),
    (r"blocks/attention/out/kernel", P(None, "model", None, "fsdp")),
    (r"blocks/up/kernel", P(None, "fsdp", "model")),
    (r"blocks/up/bias", P(None, ("model", "fsdp"))),
    (r"blocks/down/kernel", P(None, "model", "fsdp")),
    (r"blocks/.*", P(None, "fsdp")),  # the other biases, and the norms
]


def layer_norm(x: jax.Array, params: Tree, epsilon: float = 1e-5) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    var = jnp.maximum(jnp.square(x).mean(-1, keepdims=True) - jnp.square(mean), 0)
    return (x - mean) * (jax.lax.rsqrt(var + epsilon) * params["scale"]) + params["bias"]


def gpt_block(x_BTD: jax.Array, params: Tree, pin: Constrain) -> jax.Array:
    h_BTD = pin(layer_norm(x_BTD, params["attention_norm"]), "fsdp")
    qkv = params["attention"]["qkv"]
    qkv_BT3HK = pin(jnp.einsum("BTD,DnHK->BTnHK", h_BTD, qkv["kernel"]) + qkv["bias"], "fsdp", None, None, "model")
    q_BTHK, k_BSHK, v_BSHK = (qkv_BT3HK[:, :, i] for i in range(3))
    scores_BHTS = pin(jnp.einsum("BTHK,BSHK->BHTS", q_BTHK, k_BSHK) / q_BTHK.shape[-1] ** 0.5, "fsdp", "model")
    scores_BHTS = jnp.where(jnp.tril(jnp.ones(scores_BHTS.shape[-2:], bool)), scores_BHTS, -jnp.inf)
    h_BTHK = jnp.einsum("BHTS,BSHK->BTHK", jax.nn.softmax(scores_BHTS), v_BSHK)
    h_BTHK = pin(h_BTHK, "fsdp", None, "model")
    out = params["attention"]["out"]
    x_BTD = pin(x_BTD + jnp.einsum("BTHK,HKD->BTD", h_BTHK, out["kernel"]) + out["bias"], "fsdp")

    h_BTD = pin(layer_norm(x_BTD, params["mlp_norm"]), "fsdp")
    h_BTF = pin(h_BTD @ params["up"]["kernel"] + params["up"]["bias"], "fsdp", None, "model")
    h_BTF = pin(jax.nn.gelu(h_BTF), "fsdp", None, "model")
    return pin(x_BTD + h_BTF @ params["down"]["kernel"] + params["down"]["bias"], "fsdp")


def gpt_loss(params: Tree, rest: Tree, batch: dict[str, jax.Array], pin: Constrain) -> tuple[jax.Array, Tree]:
    # Look up in the stored table, which is split over D: what moves is the result, and not the table's gradient.
    tokens_BTD = pin(params["embed"][pin(batch["inputs"])], None, None, "fsdp")
    blocks = params["blocks"]
    params = pin.gathered({name: leaf for name, leaf in params.items() if name != "blocks"}, GPT_RULES)
    x_BTD = pin(pin(tokens_BTD, "fsdp") + params["positions"], "fsdp")

    def body(x_BTD: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
        return gpt_block(x_BTD, pin.gathered(layer, GPT_RULES, stacked="blocks/"), pin), None

    x_BTD, _ = jax.lax.scan(jax.checkpoint(body, prevent_cse=False), x_BTD, blocks)
    logits_BTV = pin(layer_norm(x_BTD, params["norm"]) @ params["embed"].T, "fsdp", None, "model")
    return softmax_cross_entropy(logits_BTV, batch["targets"]).mean(), rest


# --- MLP -------------------------------------------------------------------------------------------------------------

MLP_RULES: Rules = [
    (r"up/kernel", P("fsdp", "model")),  # by columns, then by rows; the third layer is left whole
    (r"up/bias", P(("model", "fsdp"))),
    (r"mid/kernel", P("model", "fsdp")),
    (r"down/kernel|.*/bias", P("fsdp")),
]


def mlp_loss(params: Tree, rest: Tree, batch: dict[str, jax.Array], pin: Constrain) -> tuple[jax.Array, Tree]:
    params = pin.gathered(params, MLP_RULES)
    h_BF = pin(batch["x"] @ params["up"]["kernel"] + params["up"]["bias"], "fsdp", "model")
    h_BF = pin(jax.nn.relu(h_BF), "fsdp", "model")
    h_BD = pin(h_BF @ params["mid"]["kernel"], "fsdp") + params["mid"]["bias"]
    h_BD = pin(jax.nn.silu(h_BD), "fsdp")
    out = h_BD @ params["down"]["kernel"] + params["down"]["bias"]  # a constraint here would cost a copy
    return jnp.mean(jnp.square(out - batch["y"])), rest


# --- CNN -------------------------------------------------------------------------------------------------------------

CNN_RULES: Rules = [
    (r"(stem|depthwise)/kernel", P(None, None, None, ("model", "fsdp"))),
    (r".*_norm/(scale|bias)", P(("model", "fsdp"))),
    (r"pointwise/kernel", P(None, None, "model", "fsdp")),
    (r"pointwise/bias", P("fsdp")),
    (r"head/kernel", P("fsdp", "model")),
    (r"head/bias", P(("model", "fsdp"))),
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
    params, channels = pin.gathered(params, CNN_RULES), ("fsdp", None, None, "model")
    x = pin(convolve(batch["x"], params["stem"]["kernel"], stride=2), *channels)
    x, stem_stats = batch_norm(x, params["stem_norm"], rest["stem_norm"])
    x = pin(jax.nn.relu(x), *channels)  # without this pin, 16 kB more
    x = pin(pool(x, -jnp.inf, jax.lax.max), *channels)
    x = pin(convolve(x, params["depthwise"]["kernel"], groups=16), *channels)
    x, depthwise_stats = batch_norm(x, params["depthwise_norm"], rest["depthwise_norm"])
    x = pin(jax.nn.relu(x), *channels)
    x = pin(convolve(x, params["pointwise"]["kernel"]), "fsdp") + params["pointwise"]["bias"]
    x = pin(pool(x, 0.0, jax.lax.add) / 4, "fsdp").mean((1, 2))
    logits = pin(x @ params["head"]["kernel"] + params["head"]["bias"], "fsdp", "model")
    stats = {"stem_norm": stem_stats, "depthwise_norm": depthwise_stats}
    return softmax_cross_entropy(logits, batch["y"]).mean(), stats


# --- mixture of experts ----------------------------------------------------------------------------------------------

MOE_RULES: Rules = [
    (r"embed/embedding", P(None, ("model", "fsdp"))),
    (r"(blocks/\d/)?norm/(scale|bias)", P("fsdp")),
    (r"blocks/\d/router/kernel", P("fsdp")),
    (r"blocks/\d/up", P(None, "fsdp", "model")),
    (r"blocks/\d/down", P(None, "model", "fsdp")),
    (r"head/kernel", P("fsdp", "model")),
]


def moe_block(x_BTD: jax.Array, params: Tree, pin: Constrain) -> jax.Array:
    h_BTD, capacity = pin(layer_norm(x_BTD, params["norm"], 1e-6), "fsdp"), 2 * x_BTD.shape[1] // 8 + 2
    gates_BT2, chosen_BT2 = pin.top_k(pin(jax.nn.softmax(h_BTD @ params["router"]["kernel"]), "fsdp"), 2)
    gates_BT2 = pin(gates_BT2 / gates_BT2.sum(-1, keepdims=True), "fsdp")
    chosen_BT2E = pin(jax.nn.one_hot(pin(chosen_BT2, "fsdp"), 8), "fsdp")
    place_BSE = pin(jnp.cumsum(chosen_BT2E.reshape(x_BTD.shape[0], -1, 8), axis=1) - 1, "fsdp")
    place_BT2E = place_BSE.reshape(chosen_BT2E.shape).astype(jnp.int32)
    slot_BT2EC = pin(chosen_BT2E[..., None] * jax.nn.one_hot(place_BT2E, capacity), "fsdp")
    combine_BTEC = pin(jnp.einsum("btn,btnec->btec", gates_BT2, slot_BT2EC), "fsdp")
    h_EBCD = pin(jnp.einsum("btec,btd->ebcd", slot_BT2EC.sum(2), h_BTD), None, "fsdp")
    h_EBCF = jnp.einsum("ebcd,edf->ebcf", h_EBCD, params["up"])
    h_EBCF = pin(jax.nn.gelu(h_EBCF), None, "fsdp", None, "model")
    h_EBCD = pin(jnp.einsum("ebcf,efd->ebcd", h_EBCF, params["down"]), None, "fsdp")
    return pin(x_BTD + jnp.einsum("btec,ebcd->btd", combine_BTEC, h_EBCD), "fsdp")


def moe_loss(params: Tree, rest: Tree, batch: dict[str, jax.Array], pin: Constrain) -> tuple[jax.Array, Tree]:
    params = pin.gathered(params, MOE_RULES)
    x_BTD = pin(pin(params["embed"]["embedding"])[batch["x"]], "fsdp")  # whole: the table is smaller than its result
    for block in params["blocks"].values():
        x_BTD = moe_block(x_BTD, block, pin)
    x_BTD = pin(x_BTD * jax.lax.rsqrt(jnp.square(x_BTD).mean(-1, keepdims=True) + 1e-6), "fsdp")
    logits_BTV = pin(x_BTD * params["norm"]["scale"] @ params["head"]["kernel"], "fsdp", None, "model")
    return softmax_cross_entropy(logits_BTV, batch["y"]).mean(), rest


GPT_TEXT = batches(inputs=ints(8192, 256), targets=ints(8192, 256))
WORKLOADS = {
    "gpt": Workload(Case(lambda rngs: gpt.GPT(GPT_CONFIG, rngs), gpt.loss, GPT_TEXT), 32, GPT_RULES, gpt_loss),
    "mlp": Workload(ZOO["mlp"], 1024, MLP_RULES, mlp_loss),
    "cnn": Workload(ZOO["cnn"], 128, CNN_RULES, cnn_loss),
    "moe": Workload(ZOO["moe"], 64, MOE_RULES, moe_loss),
}


# --- the step ---------------------------------------------------------------------------------------------------------


def make_mesh(sizes: dict[str, int]) -> Mesh:
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(jax.sharding.AxisType.Auto,) * len(sizes))


def compile_step(workload: Workload, sizes: dict[str, int], constrain: bool) -> jax.stages.Compiled:
    """One donated AdamW step, all of its state pinned to the table; from shapes only."""
    mesh = make_mesh(sizes)
    pin = Constrain(mesh if constrain else None)
    _, params, rest = nnx.split(nnx.eval_shape(lambda: workload.case.build(nnx.Rngs(0))), nnx.Param, ...)
    params, rest = nnx.to_pure_dict(params), nnx.to_pure_dict(rest)

    def store(path: tuple, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        name, rules = path_text(path), workload.rules
        return NamedSharding(mesh, spec_for(name, rules) if constrain else guide_spec(name, leaf.shape, rules, sizes))

    stored, whole = jax.tree.map_with_path(store, params), NamedSharding(mesh, P())
    moments = jax.eval_shape(OPTIMIZER.init, params)
    moments_stored = optax.tree.map_params(
        OPTIMIZER, lambda _, sharding: sharding, moments, stored, transform_non_params=lambda _: whole
    )
    state = (params, moments, rest)
    shardings = (stored, moments_stored, jax.tree.map(lambda _: whole, rest))
    batch = workload.case.batch(workload.batch_size)

    def step(state: Tree, batch: dict[str, jax.Array]) -> tuple[Tree, jax.Array]:
        params, moments, rest = state
        (loss, rest), grads = jax.value_and_grad(workload.loss, has_aux=True)(params, rest, batch, pin)
        if constrain:  # reduce-scatter the gradients, keep the optimizer's arithmetic in the stored layout
            grads = jax.lax.with_sharding_constraint(grads, stored)
        updates, moments = OPTIMIZER.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments, rest), loss

    jitted = jax.jit(
        step,
        donate_argnums=0,
        in_shardings=(shardings, NamedSharding(mesh, P("fsdp"))),
        out_shardings=(shardings, whole),
    )
    return jitted.lower(state, jax.eval_shape(lambda: batch)).compile()


# How to build a step: a name, and a function of a workload and the sizes of the mesh axes.
STEPS: dict[str, Callable[[Workload, dict[str, int]], jax.stages.Compiled]] = {
    "inputs-only": lambda workload, sizes: compile_step(workload, sizes, constrain=False),
    "expert": lambda workload, sizes: compile_step(workload, sizes, constrain=True),
}


# --- the table --------------------------------------------------------------------------------------------------------


def check(name: str) -> None:
    """The loss written by hand is the model's own, on one device and under every layout."""
    workload = WORKLOADS[name]
    batch = workload.case.batch(8)
    model = nnx.jit(lambda: workload.case.build(nnx.Rngs(0)))()
    _, params, rest = nnx.split(model, nnx.Param, ...)
    params, rest = jax.tree.map(np.asarray, (nnx.to_pure_dict(params), nnx.to_pure_dict(rest)))
    expected = nnx.jit(workload.case.loss)(model, batch)
    for mesh in (None, *(make_mesh(sizes) for sizes in LAYOUTS.values())):
        loss, _ = jax.jit(workload.loss, static_argnums=3)(params, rest, batch, Constrain(mesh))
        np.testing.assert_allclose(loss, expected, rtol=1e-6)


def main(arguments: list[str]) -> None:
    names = [name for name in arguments if name != "--check"] or list(WORKLOADS)
    if "--check" in arguments:
        for name in names:
            check(name)
    print("kB per device and step".ljust(36), *(f"{kind:>18}" for kind in (*KINDS, "moved", "temporaries", "state")))
    for name, layout, step in itertools.product(names, LAYOUTS, STEPS):
        compiled = STEPS[step](WORKLOADS[name], LAYOUTS[layout])
        moved, memory = collectives(compiled.as_text()), compiled.memory_analysis()
        sizes = [moved.get(kind, 0) for kind in KINDS] + [sum(moved.values()), memory.temp_size_in_bytes]
        cells = [f"{size / 1e3:18,.1f}" for size in [*sizes, memory.argument_size_in_bytes]]
        print(f"{name:6}{layout:14}{step:16}", *cells, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
