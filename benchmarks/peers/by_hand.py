"""Hand-written JAX, the limit: pure functions over a dictionary of arrays, one jit, donated, nothing in between.

Shape suffixes: B batch, T and S positions, V vocab, D embed, F mlp, H heads, K head_dim.
"""

import argparse
import os
from functools import partial
from typing import Any

from serve import serve
from shape import Shape, shape_of, with_layout
from work_done import xla_flops


def norm(x_BTD: Any, scale_D: Any, bias_D: Any) -> Any:
    """Layer norm, epsilon 1e-5."""
    import jax

    dtype, x_BTD = x_BTD.dtype, x_BTD.astype("float32")
    mean, variance = x_BTD.mean(-1, keepdims=True), x_BTD.var(-1, keepdims=True)
    return ((x_BTD - mean) * (jax.lax.rsqrt(variance + 1e-5) * scale_D) + bias_D).astype(dtype)


def attend(q_BTHK: Any, k_BSHK: Any, v_BSHK: Any, is_flash: bool) -> Any:
    """Causal attention, written down or by cuDNN."""
    import jax
    import jax.numpy as jnp

    if is_flash:
        return jax.nn.dot_product_attention(q_BTHK, k_BSHK, v_BSHK, is_causal=True, implementation="cudnn")
    scores_BHTS = jnp.einsum("BTHK,BSHK->BHTS", q_BTHK, k_BSHK) / q_BTHK.shape[-1] ** 0.5
    causal_TS = jnp.tril(jnp.ones(scores_BHTS.shape[-2:], bool))
    weights_BHTS = jax.nn.softmax(jnp.where(causal_TS, scores_BHTS, -jnp.inf).astype("float32"))
    return jnp.einsum("BHTS,BSHK->BTHK", weights_BHTS.astype(v_BSHK.dtype), v_BSHK)


def block(x_BTD: Any, layer: dict[str, Any], is_flash: bool = False) -> Any:
    """One pre-norm block."""
    import jax
    import jax.numpy as jnp

    h_BTD = norm(x_BTD, layer["norm1_scale"], layer["norm1_bias"])
    q_BTHK, k_BTHK, v_BTHK = jnp.einsum("BTD,DCHK->CBTHK", h_BTD, layer["qkv"]) + layer["qkv_bias"][:, None, None]
    mixed_BTHK = attend(q_BTHK, k_BTHK, v_BTHK, is_flash)
    x_BTD = x_BTD + jnp.einsum("BTHK,HKD->BTD", mixed_BTHK, layer["out"]) + layer["out_bias"]
    h_BTD = norm(x_BTD, layer["norm2_scale"], layer["norm2_bias"])
    h_BTF = jax.nn.gelu(h_BTD @ layer["up"] + layer["up_bias"], approximate=True)
    return x_BTD + h_BTF @ layer["down"] + layer["down_bias"]


OUTSIDE = ("embed", "positions", "norm_scale", "norm_bias")
"""What is no part of a block."""


def loss_of(
    is_scanned: bool, weights: dict[str, Any], tokens_BT: Any, dtype: str = "float32", is_flash: bool = False
) -> Any:
    """Mean next-token cross-entropy."""
    import jax
    import jax.numpy as jnp
    import optax

    weights = {name: array.astype(dtype) for name, array in weights.items()}
    inputs_BT, targets_BT = tokens_BT[:, :-1], tokens_BT[:, 1:]
    layers = {name: array for name, array in weights.items() if name not in OUTSIDE}
    x_BTD = weights["embed"][inputs_BT] + weights["positions"][: inputs_BT.shape[1]]
    if is_scanned:
        x_BTD = jax.lax.scan(lambda x_BTD, layer: (block(x_BTD, layer, is_flash), None), x_BTD, layers)[0]
    else:
        for i in range(len(layers["qkv"])):
            x_BTD = block(x_BTD, jax.tree.map(lambda array: array[i], layers), is_flash)  # noqa: B023
    logits_BTV = norm(x_BTD, weights["norm_scale"], weights["norm_bias"]) @ weights["embed"].T
    logits_BTV = logits_BTV.astype("float32")
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT))


def optimizer_of(shape: Shape) -> Any:
    """AdamW as every peer has it."""
    import optax

    return optax.adamw(
        shape.learning_rate, b1=shape.beta1, b2=shape.beta2, eps=shape.epsilon, weight_decay=shape.weight_decay
    )


def specs_of(layout: str, weights: dict[str, Any], num_devices: int) -> dict[str, Any]:
    """Where each array lies: whole everywhere, or under `fsdp` split along its largest dim that can be."""
    from jax.sharding import PartitionSpec as P

    def spec(name: str, shape: tuple[int, ...]) -> Any:
        # Never along the layers: each is gathered when its turn comes.
        dims = range(name not in OUTSIDE, len(shape))
        fits = [dim for dim in dims if shape[dim] % num_devices == 0]
        dim = max(fits, key=lambda dim: shape[dim], default=None)
        return P() if dim is None or layout != "fsdp" else P(*[None] * dim, "data")

    return {name: spec(name, array.shape) for name, array in weights.items()}


def step_of(shape: Shape, tx: Any, placed: Any, is_scanned: bool, is_flash: bool = False) -> Any:
    """The step of a shape: (weights, moments) and tokens (B, T + 1) in, the new ones and the loss out."""
    import jax
    import optax

    def step(state: Any, tokens_BT: Any) -> Any:
        weights, moments = state
        of_loss = partial(loss_of, is_scanned, dtype=shape.dtype, is_flash=is_flash)
        loss, gradients = jax.value_and_grad(of_loss)(weights, tokens_BT)
        # Summed where they are stored, and not everywhere first.
        gradients = jax.lax.with_sharding_constraint(gradients, placed)
        updates, moments = tx.update(gradients, moments, weights)
        return (optax.apply_updates(weights, updates), moments), loss

    return step


def main() -> None:
    """Train by hand."""
    args = with_layout(argparse.ArgumentParser(description=__doc__), "data", "fsdp").parse_args()
    shape = shape_of(args, "bfloat16")
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={args.devices}"
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((args.devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tx, numbers = optimizer_of(shape), shape.weights()
    specs = specs_of(args.layout, numbers, args.devices)
    placed = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    weights = jax.device_put(numbers, placed)
    state = (weights, jax.jit(tx.init, out_shardings=_like(tx, weights, placed, mesh))(weights))
    pinned, rows = (placed, _like(tx, weights, placed, mesh)), NamedSharding(mesh, PartitionSpec("data"))

    whole = NamedSharding(mesh, PartitionSpec())
    jit = partial(jax.jit, donate_argnums=0, in_shardings=(pinned, rows), out_shardings=(pinned, whole))
    step = partial(step_of, shape, tx, placed, args.scan)
    plain = jit(step())
    jitted = jit(step(is_flash=True)) if args.flash and jax.default_backend() == "gpu" else plain
    held = [state]

    def take(tokens_BT: Any) -> float:
        held[0], loss = jitted(held[0], tokens_BT)
        return float(loss)

    count = sum(array.size for array in numbers.values())

    def work() -> float:
        tokens_BT = jax.ShapeDtypeStruct((shape.batch_size, shape.seq_len + 1), "int32")
        # Of a kernel nobody counts them: those of the same step with attention written down.
        return xla_flops(plain.lower(held[0], tokens_BT).compile(), args.devices)

    serve(
        shape,
        take,
        work,
        parameters=count,
        devices=args.devices,
        versions={"jax": jax.__version__},
        device=jax.devices()[0].device_kind,
        attention="cudnn" if jitted is not plain else "plain",
    )


def _like(tx: Any, weights: Any, placed: Any, mesh: Any) -> Any:
    """The shardings of the optimizer's state: moments lie where their parameters do."""
    import jax
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    whole = NamedSharding(mesh, PartitionSpec())
    return optax.tree_map_params(
        tx, lambda _, sharding: sharding, jax.eval_shape(tx.init, weights), placed, transform_non_params=lambda _: whole
    )


if __name__ == "__main__":
    main()
