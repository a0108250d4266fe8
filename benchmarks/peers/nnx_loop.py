"""The usual NNX loop: nnx.jit over the model and nnx.Optimizer, laid out by constraints as the guides do it."""

import argparse
import os
from typing import Any

import numpy as np

from serve import serve
from shape import shape_of, with_layout
from with_spanax import config_of, numbers_of
from work_done import xla_flops


def main() -> None:
    """Train as the guides teach it."""
    args = with_layout(argparse.ArgumentParser(description=__doc__), "data", "fsdp").parse_args()
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={args.devices}"
    import jax
    from flax import nnx
    from jax.sharding import NamedSharding, PartitionSpec

    from by_hand import optimizer_of
    from spanax.models import gpt

    shape = shape_of(args)
    mesh = jax.make_mesh((args.devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def spec(array: Any) -> PartitionSpec:
        fits = [dim for dim in range(array.ndim) if array.shape[dim] % args.devices == 0]
        dim = max(fits, key=lambda dim: array.shape[dim], default=None)
        return PartitionSpec() if dim is None or args.layout != "fsdp" else PartitionSpec(*[None] * dim, "data")

    def placed(state: Any) -> Any:
        return jax.tree.map(
            lambda array: jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec(array))), state
        )

    model = gpt.GPT(config_of(shape, args.scan), nnx.Rngs(0))
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        variable.set_value(jax.numpy.asarray(numbers_of(shape, ".".join(map(str, path)))))
    optimizer = nnx.Optimizer(model, optimizer_of(shape), wrt=nnx.Param)

    @nnx.jit
    def lay_out(model: Any, optimizer: Any) -> None:
        for module in (model, optimizer):
            nnx.update(module, placed(nnx.state(module)))

    with jax.set_mesh(mesh):
        lay_out(model, optimizer)

    @nnx.jit
    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        loss, gradients = nnx.value_and_grad(gpt.loss)(model, batch)
        optimizer.update(model, gradients)
        return loss

    rows = NamedSharding(mesh, PartitionSpec("data"))

    def batch_of(tokens_BT: np.ndarray) -> Any:
        return jax.device_put({"inputs": tokens_BT[:, :-1], "targets": tokens_BT[:, 1:]}, rows)

    def take(tokens_BT: np.ndarray) -> float:
        return float(train_step(model, optimizer, batch_of(tokens_BT)))

    count = sum(array.size for array in jax.tree.leaves(nnx.state(model, nnx.Param)))

    def work() -> float:
        lowered = train_step.lower(model, optimizer, batch_of(next(shape.batches())))
        return xla_flops(lowered.compile().compiled, args.devices)

    serve(shape, take, work, parameters=count, devices=args.devices, versions={"jax": jax.__version__})


if __name__ == "__main__":
    main()
