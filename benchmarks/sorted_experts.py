"""Experts that drop nothing: the step that Spanax derives, beside two exchanges written by hand in `shard_map`.

One layer of experts, SGD, compiled for 8 simulated devices from shapes alone. By hand, tokens are gathered along
`expert` and the sums of results scattered back; or rows are sent by an all-to-all, padded for the worst case, and sent
back. FLOPs and KiB sent per device and step, and KiB held.

Usage:
  python benchmarks/sorted_experts.py
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import spanax

if __name__ == "__main__":
    spanax.simulate(8)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from collective_bytes import measured  # noqa: E402
from spanax.check.hlo.flops import program_flops  # noqa: E402
from spanax.check.hlo.module import read_module  # noqa: E402
from spanax.hardware.mesh import MeshShape  # noqa: E402
from spanax.train.run import Run  # noqa: E402

TOKENS, DIM, FF, EXPERTS, TOP, RATE = 1024, 128, 256, 8, 2, 0.1
MESHES = ("data=8", "data=2,expert=4", "expert=8")

Arrays = dict[str, jax.Array]


class Experts(nnx.Module):
    """As a user writes it."""

    def __init__(self, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.1)
        self.router = nnx.Param(init(rngs.params(), (DIM, EXPERTS)))
        self.up = nnx.Param(init(rngs.params(), (EXPERTS, DIM, FF)))
        self.down = nnx.Param(init(rngs.params(), (EXPERTS, FF, DIM)))

    def __call__(self, x: jax.Array) -> jax.Array:
        weights, chosen = lax.top_k(jax.nn.softmax(x @ self.router[...]), TOP)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=EXPERTS).astype(jnp.int32)
        rows = jax.nn.silu(lax.ragged_dot(x[order // TOP], self.up[...], sizes))
        rows = lax.ragged_dot(rows, self.down[...], sizes) * weights.reshape(-1)[order][:, None]
        return x + jnp.zeros_like(x).at[order // TOP].add(rows)


def derived(mesh: str) -> jax.stages.Lowered:
    program = spanax.trace(
        build=Experts,
        optimizer=optax.sgd(RATE),
        batch=jax.ShapeDtypeStruct((TOKENS, DIM), "float32"),
        loss=lambda model, x: jnp.square(model(x)).mean(),
    )
    plan = spanax.plan(program, "cpu:8", mesh=mesh)
    return Run(program, plan, plan.mesh.build(), state=[]).lower()


def matmuls(rows: jax.Array, sizes: jax.Array, params: Arrays) -> jax.Array:
    return lax.ragged_dot(jax.nn.silu(lax.ragged_dot(rows, params["up"], sizes)), params["down"], sizes)


def gathered(params: Arrays, x: jax.Array, weights: jax.Array, chosen: jax.Array, ways: int) -> jax.Array:
    """Gathers the tokens of the devices with other experts, computes the rows of its own, scatters the sums."""
    number = EXPERTS // ways
    own = chosen
    if ways > 1:
        x, weights, own = (lax.all_gather(each, "expert", tiled=True) for each in (x, weights, chosen))
        own = own - lax.axis_index("expert") * number
    keys = jnp.where((own >= 0) & (own < number), own, number).reshape(-1)
    order = jnp.argsort(keys)[: len(x) * min(TOP, number)]
    sizes = jnp.bincount(keys, length=number).astype(jnp.int32)
    rows = matmuls(x[order // TOP], sizes, params) * weights.reshape(-1)[order][:, None]
    out = jnp.zeros_like(x).at[order // TOP].add(rows)
    return lax.psum_scatter(out, "expert", tiled=True) if ways > 1 else out


def sent(params: Arrays, x: jax.Array, weights: jax.Array, chosen: jax.Array, ways: int) -> jax.Array:
    """Sends each row to the device of its expert, in a buffer for the worst case, and the results back."""
    number = EXPERTS // ways
    room = len(x) * min(TOP, number)
    flat = chosen.reshape(-1)
    to = flat // number
    place = (jnp.cumsum(jax.nn.one_hot(to, ways, dtype=jnp.int32), 0) - 1)[jnp.arange(len(flat)), to]
    exchange = partial(lax.all_to_all, axis_name="expert", split_axis=0, concat_axis=0, tiled=True)
    slots = jnp.zeros((ways * room, DIM)).at[to * room + place].set(x[jnp.arange(len(flat)) // TOP])
    keys = jnp.full(ways * room, number).at[to * room + place].set(flat % number)
    if ways > 1:
        slots, keys = exchange(slots), exchange(keys)
    order = jnp.argsort(keys)
    sizes = jnp.bincount(keys, length=number).astype(jnp.int32)
    rows = jnp.zeros_like(slots).at[order].set(matmuls(slots[order], sizes, params))
    rows = (exchange(rows) if ways > 1 else rows)[to * room + place]
    return (rows.reshape(-1, TOP, DIM) * weights[..., None]).sum(1)


def by_hand(exchange: Callable[..., jax.Array], text: str) -> jax.stages.Lowered:
    mesh = MeshShape.of(text).build()
    tokens = PartitionSpec(mesh.axis_names)
    ways = mesh.shape.get("expert", 1)
    experts = PartitionSpec("expert" if ways > 1 else None)
    specs = {"router": PartitionSpec(), "up": experts, "down": experts}

    @partial(jax.shard_map, mesh=mesh, in_specs=(specs, tokens, tokens, tokens), out_specs=tokens, check_vma=False)
    def layer(*args: Any) -> jax.Array:
        return exchange(*args, ways)

    def loss(params: Arrays, x: jax.Array) -> jax.Array:
        weights, chosen = lax.top_k(jax.nn.softmax(x @ params["router"]), TOP)
        return jnp.square(x + layer(params, x, weights, chosen)).mean()

    def step(params: Arrays, x: jax.Array) -> tuple[Arrays, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda param, grad: param - RATE * grad, params, grads), value

    sharded = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    shapes = {"router": (DIM, EXPERTS), "up": (EXPERTS, DIM, FF), "down": (EXPERTS, FF, DIM)}
    params = {name: jax.ShapeDtypeStruct(shape, "float32", sharding=sharded[name]) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((TOKENS, DIM), "float32", sharding=NamedSharding(mesh, tokens))
    return jax.jit(step, out_shardings=(sharded, None), donate_argnums=0).lower(params, x)


def main() -> None:
    print("| mesh | step | MFLOP | KiB sent | KiB held |\n|---|---|---|---|---|")
    for mesh in MESHES:
        steps = {"Spanax": derived(mesh), "gathered": by_hand(gathered, mesh), "all-to-all": by_hand(sent, mesh)}
        for name, lowered in steps.items():
            moved = measured(lowered, MeshShape.of(mesh))
            (module,) = lowered.compile().runtime_executable().hlo_modules()
            flops = program_flops(read_module(module.as_serialized_hlo_module_proto())) / 1e6
            sizes = (math.ceil(moved[key] / 1024) for key in ("sent_bytes", "peak_bytes"))
            print(f"| `{mesh}` | {name} | {flops:.1f} |", " | ".join(f"{size:,}" for size in sizes), "|")


if __name__ == "__main__":
    main()
