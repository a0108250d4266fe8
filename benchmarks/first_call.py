"""CPU-seconds of the first call of a train step on 8 simulated devices: `spanax.jit` beside `jax.jit` by hand.

Each runs in a process of its own, in turn: `nnx` on one device; `hand`, `jax.jit` over the leaves with every array
sharded along the first dim that divides; `fsdp`, `spanax.jit` with that layout; `same`, by hand with the shardings that
it chose; `search`, `spanax.jit` without a layout. Models have unrolled layers. Nothing was compiled before.

Usage: python benchmarks/first_call.py [number of layers] [rounds]
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WAYS = ("nnx", "hand", "fsdp", "same", "search")
WIDTH = 128


def first_call(way: str, num_layers: int, specs: Path) -> float:
    """Returns the CPU-seconds of the first call in this process."""
    import jax
    import numpy as np
    import optax
    from flax import nnx
    from jax.sharding import NamedSharding, PartitionSpec

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
            self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
            self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = x + self.attention(self.norm(x))
            return x + self.down(nnx.gelu(self.up(x)))

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.embed = nnx.Embed(512, WIDTH, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(num_layers)])

        def __call__(self, tokens: Any) -> Any:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.embed.attend(x)

    def step(model: Model, optimizer: nnx.Optimizer, tokens: Any) -> Any:
        def loss_of(model: Model) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(model(tokens), tokens).mean()

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return loss

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    tokens = np.random.default_rng(0).integers(0, 512, (8, 64))
    graphdef, state = nnx.split((model, optimizer))
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    replicated = NamedSharding(mesh, PartitionSpec())

    def by_hand(state: Any, tokens: Any) -> Any:
        model, optimizer = nnx.merge(graphdef, state)
        return nnx.state((model, optimizer)), step(model, optimizer, tokens)

    if way in ("nnx", "fsdp", "search"):
        import spanax

        options = {"layout": "fsdp"} if way == "fsdp" else {}
        function = nnx.jit(step) if way == "nnx" else spanax.jit(step, **options)
        start = time.process_time()
        jax.block_until_ready(function(model, optimizer, tokens))
        seconds = time.process_time() - start
        if way == "fsdp":
            leaves = jax.tree.leaves(nnx.state((model, optimizer)))
            specs.write_text("\n".join(repr(tuple(leaf.sharding.spec)) for leaf in leaves))
        return seconds
    leaves, treedef = jax.tree.flatten(state)
    even = [[dim for dim, size in enumerate(leaf.shape) if size % mesh.size == 0] for leaf in leaves]
    partition = [PartitionSpec(*[None] * dims[0], "fsdp") if dims else PartitionSpec() for dims in even]
    if way == "same":
        partition = [PartitionSpec(*eval(line)) for line in specs.read_text().splitlines()]  # noqa: S307
    shardings = jax.tree.unflatten(treedef, [NamedSharding(mesh, spec) for spec in partition])
    start = time.process_time()
    function = jax.jit(
        by_hand,
        in_shardings=(shardings, NamedSharding(mesh, PartitionSpec("fsdp"))),
        out_shardings=(shardings, replicated),
        donate_argnums=0,
    )
    jax.block_until_ready(function(jax.device_put(state, shardings), tokens))
    return time.process_time() - start


def main() -> None:
    num_layers = int(sys.argv[1]) if len(sys.argv) > 1 else 24
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    variables = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for way in WAYS:
                command = [sys.executable, __file__, "--only", way, str(num_layers), f"{folder}/specs"]
                result = subprocess.run(command, env=os.environ | variables, check=True, capture_output=True, text=True)
                seconds[way].append(float(result.stdout.split()[-1]))
    for way, values in seconds.items():
        print(f"{way:8}{statistics.median(values):8.2f} CPU-s")


if __name__ == "__main__":
    if "--only" in sys.argv:
        print(first_call(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])))
    else:
        main()
