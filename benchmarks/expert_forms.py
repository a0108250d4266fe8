"""Experts in five forms, without annotations: the step that Spanax derives, beside exchanges written by hand.

One layer of experts, SGD, compiled for 8 simulated devices from shapes alone. By hand, in `shard_map`: the slots of a
form with a capacity are sent by an all-to-all and the results sent back; otherwise tokens are gathered along `expert`
and the sums of results scattered. For sorted rows, also an all-to-all of rows, padded for the worst case. FLOPs, KiB
sent per device and step, and KiB held.

Usage:
  python benchmarks/expert_forms.py [--ratios [--write docs/expert.md]]
"""

import argparse
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
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
from generated_tables import write_figures  # noqa: E402
from spanax.hardware.mesh import MeshShape  # noqa: E402
from spanax.train.run import Run  # noqa: E402

EXAMPLES, LENGTH, DIM, FF, EXPERTS, TOP, CAPACITY, RATE = 32, 32, 128, 256, 8, 2, 10, 0.1
MESHES = ("data=8", "data=2,expert=4", "expert=8")

Arrays = dict[str, jax.Array]


def chosen_of(router: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return tuple(lax.top_k(jax.nn.softmax(x @ router), TOP))


def places(chosen: jax.Array) -> jax.Array:
    """The slot of each choice among those of its expert and example; CAPACITY or more where there is none."""
    flat = jax.nn.one_hot(chosen.reshape(len(chosen), -1), EXPERTS, dtype=jnp.int32)
    return ((jnp.cumsum(flat, 1) - 1) * flat).sum(-1).reshape(chosen.shape)


def one_hot(x: jax.Array, weights: jax.Array, chosen: jax.Array, experts: Any) -> jax.Array:
    """Tokens are dispatched to slots and combined by matmuls."""
    slots = jax.nn.one_hot(chosen, EXPERTS)[..., None] * jax.nn.one_hot(places(chosen), CAPACITY)[..., None, :]
    y = experts(jnp.einsum("btkec,btd->becd", slots, x))
    return jnp.einsum("btkec,btk,becd->btd", slots, weights, y)


def written(x: jax.Array, weights: jax.Array, chosen: jax.Array, experts: Any) -> jax.Array:
    """Tokens are written into slots and read out of them, by index."""

    def write(x: jax.Array, chosen: jax.Array, place: jax.Array) -> jax.Array:
        rows = jnp.broadcast_to(x[:, None], (*chosen.shape, DIM))
        return jnp.zeros((EXPERTS, CAPACITY, DIM)).at[chosen, place].add(rows, mode="drop")

    def read(y: jax.Array, chosen: jax.Array, place: jax.Array) -> jax.Array:
        return y.at[chosen, place].get(mode="fill", fill_value=0)

    place = places(chosen)
    y = experts(jax.vmap(write)(x, chosen, place))
    return (jax.vmap(read)(y, chosen, place) * weights[..., None]).sum(2)


def taken(x: jax.Array, weights: jax.Array, chosen: jax.Array, experts: Any) -> jax.Array:
    """Each slot takes its token, by index, and tokens take the results."""

    def read(x: jax.Array, chosen: jax.Array, place: jax.Array) -> jax.Array:
        numbers = jnp.broadcast_to(jnp.arange(LENGTH)[:, None], chosen.shape)
        token = jnp.full((EXPERTS, CAPACITY), LENGTH).at[chosen, place].set(numbers, mode="drop")
        return jnp.take(x, token, axis=0, mode="fill", fill_value=0)

    def back(y: jax.Array, chosen: jax.Array, place: jax.Array) -> jax.Array:
        return y.at[chosen, place].get(mode="fill", fill_value=0)

    place = places(chosen)
    y = experts(jax.vmap(read)(x, chosen, place))
    return (jax.vmap(back)(y, chosen, place) * weights[..., None]).sum(2)


def of_slots(params: Arrays, slots: jax.Array) -> jax.Array:
    hidden = jax.nn.silu(jnp.einsum("becd,edf->becf", slots, params["up"]))
    return jnp.einsum("becf,efd->becd", hidden, params["down"])


def combined(params: Arrays, x: jax.Array, weights: jax.Array, chosen: jax.Array, first: Any = 0) -> jax.Array:
    """Every expert computes every token."""
    gates = (jax.nn.one_hot(chosen - first, len(params["up"])) * weights[..., None]).sum(2)
    hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", x, params["up"])) * gates[..., None]
    return jnp.einsum("btef,efd->btd", hidden, params["down"])


def sorted_rows(params: Arrays, x: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
    flat = chosen.reshape(-1)
    rows = x.reshape(-1, DIM)
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat, length=EXPERTS).astype(jnp.int32)
    y = matmuls(rows[order // TOP], sizes, params) * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(rows).at[order // TOP].add(y).reshape(x.shape)


def matmuls(rows: jax.Array, sizes: jax.Array, params: Arrays) -> jax.Array:
    return lax.ragged_dot(jax.nn.silu(lax.ragged_dot(rows, params["up"], sizes)), params["down"], sizes)


SLOTTED = {"one-hot": one_hot, "capacity": written, "gather": taken}


class Experts(nnx.Module):
    """As a user writes it."""

    def __init__(self, form: str, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.1)
        self.form = form
        self.router = nnx.Param(init(rngs.params(), (DIM, EXPERTS)))
        self.up = nnx.Param(init(rngs.params(), (EXPERTS, DIM, FF)))
        self.down = nnx.Param(init(rngs.params(), (EXPERTS, FF, DIM)))

    def __call__(self, x: jax.Array) -> jax.Array:
        params = {"up": self.up[...], "down": self.down[...]}
        weights, chosen = chosen_of(self.router[...], x)
        if self.form in SLOTTED:
            return x + SLOTTED[self.form](x, weights, chosen, partial(of_slots, params))
        return x + (combined if self.form == "dense" else sorted_rows)(params, x, weights, chosen)


def derived(build: Callable[[nnx.Rngs], nnx.Module], mesh: str) -> jax.stages.Lowered:
    program = spanax.trace(
        build=build,
        optimizer=optax.sgd(RATE),
        batch=jax.ShapeDtypeStruct((EXAMPLES, LENGTH, DIM), "float32"),
        loss=lambda model, x: jnp.square(model(x)).mean(),
    )
    plan = spanax.plan(program, "cpu:8", mesh=mesh)
    return Run(program, plan, plan.mesh.build(), state=[]).lower()


def sent_slots(form: str, params: Arrays, x: jax.Array, weights: jax.Array, chosen: jax.Array, ways: int) -> jax.Array:
    """Sends the slots of each expert to its device, and the results back."""
    exchange = partial(lax.all_to_all, axis_name="expert", tiled=True)

    def experts(slots: jax.Array) -> jax.Array:
        if ways == 1:
            return of_slots(params, slots)
        own = exchange(slots, split_axis=1, concat_axis=0)
        return exchange(of_slots(params, own), split_axis=0, concat_axis=1)

    return SLOTTED[form](x, weights, chosen, experts)


def gathered(form: str, params: Arrays, x: jax.Array, weights: jax.Array, chosen: jax.Array, ways: int) -> jax.Array:
    """Gathers the tokens of the devices with other experts, computes its own experts, scatters the sums."""
    number = EXPERTS // ways
    first = lax.axis_index("expert") * number if ways > 1 else 0
    if ways > 1:
        x, weights, chosen = (lax.all_gather(each, "expert", tiled=True) for each in (x, weights, chosen))
    if form == "dense":
        out = combined(params, x, weights, chosen, first)
    else:
        own = chosen - first
        tokens = x.reshape(-1, DIM)
        keys = jnp.where((own >= 0) & (own < number), own, number).reshape(-1)
        order = jnp.argsort(keys)[: len(tokens) * min(TOP, number)]
        sizes = jnp.bincount(keys, length=number).astype(jnp.int32)
        rows = matmuls(tokens[order // TOP], sizes, params) * weights.reshape(-1)[order][:, None]
        out = jnp.zeros_like(tokens).at[order // TOP].add(rows).reshape(x.shape)
    return lax.psum_scatter(out, "expert", tiled=True) if ways > 1 else out


def sent(form: str, params: Arrays, x: jax.Array, weights: jax.Array, chosen: jax.Array, ways: int) -> jax.Array:
    """Sends each row to the device of its expert, in a buffer for the worst case, and the results back."""
    number = EXPERTS // ways
    tokens = x.reshape(-1, DIM)
    room = len(tokens) * min(TOP, number)
    flat = chosen.reshape(-1)
    to = flat // number
    place = (jnp.cumsum(jax.nn.one_hot(to, ways, dtype=jnp.int32), 0) - 1)[jnp.arange(len(flat)), to]
    exchange = partial(lax.all_to_all, axis_name="expert", split_axis=0, concat_axis=0, tiled=True)
    slots = jnp.zeros((ways * room, DIM)).at[to * room + place].set(tokens[jnp.arange(len(flat)) // TOP])
    keys = jnp.full(ways * room, number).at[to * room + place].set(flat % number)
    if ways > 1:
        slots, keys = exchange(slots), exchange(keys)
    order = jnp.argsort(keys)
    sizes = jnp.bincount(keys, length=number).astype(jnp.int32)
    rows = jnp.zeros_like(slots).at[order].set(matmuls(slots[order], sizes, params))
    rows = (exchange(rows) if ways > 1 else rows)[to * room + place]
    return (rows.reshape(-1, TOP, DIM) * weights.reshape(-1, TOP, 1)).sum(1).reshape(x.shape)


BY_HAND: dict[str, dict[str, Callable[..., jax.Array]]] = {
    **{form: {"by hand": sent_slots} for form in SLOTTED},
    "dense": {"by hand": gathered},
    "sorted": {"by hand": gathered, "all-to-all": sent},
}
"""The exchanges of each form; the first is what Spanax is compared with."""


def by_hand(exchange: Callable[..., jax.Array], form: str, text: str) -> jax.stages.Lowered:
    mesh = MeshShape.of(text).build()
    tokens = PartitionSpec(mesh.axis_names)
    ways = mesh.shape.get("expert", 1)
    experts = PartitionSpec("expert" if ways > 1 else None)
    specs = {"router": PartitionSpec(), "up": experts, "down": experts}

    @partial(jax.shard_map, mesh=mesh, in_specs=(specs, tokens, tokens, tokens), out_specs=tokens, check_vma=False)
    def layer(*args: Any) -> jax.Array:
        return exchange(form, *args, ways)

    def loss(params: Arrays, x: jax.Array) -> jax.Array:
        return jnp.square(x + layer(params, x, *chosen_of(params["router"], x))).mean()

    def step(params: Arrays, x: jax.Array) -> tuple[Arrays, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda param, grad: param - RATE * grad, params, grads), value

    sharded = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    shapes = {"router": (DIM, EXPERTS), "up": (EXPERTS, DIM, FF), "down": (EXPERTS, FF, DIM)}
    params = {name: jax.ShapeDtypeStruct(shape, "float32", sharding=sharded[name]) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((EXAMPLES, LENGTH, DIM), "float32", sharding=NamedSharding(mesh, tokens))
    return jax.jit(step, out_shardings=(sharded, None), donate_argnums=0).lower(params, x)


def figures(lowered: jax.stages.Lowered, mesh: str) -> dict[str, float]:
    """MFLOP, KiB sent and KiB held of a step on one device."""
    moved = measured(lowered, MeshShape.of(mesh), spanax.cluster("cpu:8"))
    return {"MFLOP": moved["flops"] / 1e6, "sent": moved["sent_bytes"] / 1024, "held": moved["peak_bytes"] / 1024}


def compared(form: str, mesh: str, build: Any = None) -> dict[str, dict[str, float]]:
    """The figures of the step that Spanax derives of the model, or of another one, and of those by hand."""
    steps = {"Spanax": derived(build or partial(Experts, form), mesh)}
    steps |= {name: by_hand(exchange, form, mesh) for name, exchange in BY_HAND[form].items()}
    return {name: figures(lowered, mesh) for name, lowered in steps.items()}


def ratios() -> Iterator[str]:
    """Yields the table of bytes sent over those by hand."""
    yield "| form | " + " | ".join(f"`{mesh}`" for mesh in MESHES[1:]) + " |"
    yield "|---|" + "---|" * len(MESHES[1:])
    for form in BY_HAND:
        cells = []
        for mesh in MESHES[1:]:
            rows = compared(form, mesh)
            ours, other = rows["Spanax"], rows["by hand"]
            assert math.isclose(ours["MFLOP"], other["MFLOP"], rel_tol=0.01), (form, mesh)
            cells.append(f"{ours['sent'] / other['sent']:.2f}")
        yield f"| {form} | {' | '.join(cells)} |"


def steps() -> Iterator[str]:
    """Yields the table of the figures of each step."""
    yield "| form, mesh | step | MFLOP | KiB sent | KiB held |"
    yield "|---|---|---|---|---|"
    for form in BY_HAND:
        for mesh in MESHES:
            for name, row in compared(form, mesh).items():
                sizes = " | ".join(f"{math.ceil(row[key]):,}" for key in ("sent", "held"))
                yield f"| {form}, `{mesh}` | {name} | {row['MFLOP']:.1f} | {sizes} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratios", action="store_true", help="bytes sent over those by hand; equal FLOPs")
    parser.add_argument("--write", type=Path, help="put the table of ratios into this page")
    asked = parser.parse_args()
    rows = []
    for row in ratios() if asked.ratios or asked.write else steps():
        rows.append(row)
        print(row, flush=True)
    if asked.write:
        write_figures(asked.write, "python benchmarks/expert_forms.py --ratios", "\n".join(rows))


if __name__ == "__main__":
    main()
