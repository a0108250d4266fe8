"""Which sums a TPU reduce-scatters, next to programs compiled for v5e:2x4 with libtpu 0.0.52."""

import jax
import optax
import pytest
from flax import nnx

import spanax
from spanax.hardware.mesh import MeshShape
from spanax.plan.presets import layout_named
from spanax.plan.sharding.resolve import resolve
from spanax.plan.spmd.count_terms import count_terms
from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.plan.spmd.tiled_scatter import scatter_padding


@pytest.mark.parametrize(
    "local, dim, itemsize, is_padded, padding",
    [
        ((32, 64), 0, 2, True, 1.0),
        ((16, 32), 0, 2, True, 1.0),
        ((64, 16), 1, 2, True, 1.0),
        ((8, 64), 0, 2, True, None),
        ((8, 64), 0, 4, True, None),
        ((128, 64), 0, 2, True, None),
        ((128, 64), 0, 4, True, 1.0),
        ((256, 16), 0, 2, True, 1.0),
        ((384, 64), 0, 2, True, None),
        ((12, 96), 0, 2, True, 16 / 12),
        ((13, 104), 0, 2, True, 16 / 13),
        ((20, 160), 0, 2, True, 24 / 20),
        ((24, 192), 0, 2, True, 1.0),
        ((10, 80), 0, 2, True, None),
        ((9, 72), 0, 2, True, None),
        ((3, 3, 64, 16), 3, 2, False, 1.0),
        ((3, 3, 16, 64), 3, 2, False, None),
        ((3, 3, 24, 12), 3, 2, False, None),
        ((1, 1, 20, 96), 2, 2, False, None),
        ((8, 16, 128), 1, 2, True, 1.0),
        ((8, 4, 16), 0, 2, True, None),
        ((2048,), 0, 2, False, None),
    ],
)
def test_shards_of_tiles_are_scattered(
    local: tuple[int, ...], dim: int, itemsize: int, is_padded: bool, padding: float | None
) -> None:
    assert scatter_padding(local, [dim], itemsize, is_padded=is_padded) == padding


@pytest.mark.parametrize("width, is_scattered", [(64, False), (128, True)])
def test_a_gradient_with_shards_below_two_tiles_is_all_reduced(width: int, is_scattered: bool) -> None:
    program = spanax.trace(
        build=lambda rngs: nnx.Linear(width, width, use_bias=False, rngs=rngs), optimizer=optax.sgd(0.1),
        batch=jax.ShapeDtypeStruct((64, width), "float32"), loss=lambda model, x: (model(x) ** 2).mean(),
    )  # fmt: skip
    mesh = MeshShape.of("fsdp=8")
    sharded = ShardedProgram(resolve(program, layout_named("fsdp", mesh), mesh, {}), program.step)
    before = count_terms(sharded).moved_bytes(mesh)
    after = count_terms(sharded, is_tpu_program=True).moved_bytes(mesh)
    gradient = 4 * width * width
    assert before["reduce-scatter", "fsdp"] == gradient / 8
    assert after.get(("reduce-scatter", "fsdp"), 0) == (gradient / 8 if is_scattered else 0)
    assert after["all-reduce", "fsdp"] - before["all-reduce", "fsdp"] == (0 if is_scattered else gradient)
