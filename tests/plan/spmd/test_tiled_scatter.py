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
        ((24, 96), 0, 2, True, 32 / 24),
        ((20, 128), 0, 2, True, None),
        ((96, 20), 1, 4, True, None),
        ((18, 144), 0, 2, True, 24 / 18),
        ((22, 64), 0, 2, True, 32 / 22),
        ((40, 64), 0, 2, True, 48 / 40),
        ((10, 80), 0, 2, True, None),
        ((9, 72), 0, 2, True, None),
        ((3, 3, 64, 16), 3, 2, False, 1.0),
        ((3, 3, 16, 64), 3, 2, False, None),
        ((3, 3, 24, 12), 3, 2, False, None),
        ((1, 1, 20, 96), 2, 2, False, None),
        ((8, 16, 128), 1, 2, True, 1.0),
        ((8, 4, 16), 0, 2, True, None),
        ((8, 4, 16), 0, 4, True, 1.0),
        ((4, 8, 16), 0, 4, True, None),
        ((2048,), 0, 2, False, None),
    ],
)
def test_shards_of_tiles_are_scattered(
    local: tuple[int, ...], dim: int, itemsize: int, is_padded: bool, padding: float | None
) -> None:
    assert scatter_padding(local, [dim], itemsize, is_padded=is_padded) == padding


def moved(rows: int, columns: int, batch: int, sizes: str = "fsdp=8", *, is_tpu_program: bool) -> dict[str, float]:
    """Returns the bytes by kind that a linear layer moves along `fsdp`."""
    program = spanax.trace(
        build=lambda rngs: nnx.Linear(rows, columns, use_bias=False, rngs=rngs), optimizer=optax.sgd(0.1),
        batch=jax.ShapeDtypeStruct((batch, rows), "float32"), loss=lambda model, x: (model(x) ** 2).mean(),
    )  # fmt: skip
    mesh = MeshShape.of(sizes)
    sharded = ShardedProgram(resolve(program, layout_named("fsdp", MeshShape.of("fsdp=2")), mesh, {}), program.step)
    terms = count_terms(sharded, is_tpu_program=is_tpu_program).moved_bytes(mesh)
    return {kind: num_bytes for (kind, axes), num_bytes in terms.items() if axes == "fsdp"}


@pytest.mark.parametrize("width, is_scattered", [(64, False), (128, True)])
def test_a_gradient_with_shards_below_two_tiles_is_all_reduced(width: int, is_scattered: bool) -> None:
    before, after = (moved(width, width, 64, is_tpu_program=is_tpu) for is_tpu in (False, True))
    gradient = 4 * width * width
    assert before["reduce-scatter"] == gradient / 8
    assert after.get("reduce-scatter", 0) == (gradient / 8 if is_scattered else 0)
    assert after["all-reduce"] - before["all-reduce"] == (0 if is_scattered else gradient)


@pytest.mark.parametrize(
    "rows, columns, batch, is_scattered",
    [(8, 8, 64, True), (24, 8, 64, True), (16, 16, 64, False), (24, 16, 64, False), (64, 64, 4096, False),
     (64, 64, 8408, False), (64, 64, 8472, True)],
)  # fmt: skip
def test_small_sums_and_long_ones_are_scattered_by_permutes(
    rows: int, columns: int, batch: int, is_scattered: bool
) -> None:
    assert ("reduce-scatter" in moved(rows, columns, batch, is_tpu_program=True)) == is_scattered


@pytest.mark.parametrize("sizes, is_scattered", [("fsdp=8", True), ("fsdp=4,model=2", False)])
def test_a_small_sum_that_devices_repeat_is_all_reduced(sizes: str, is_scattered: bool) -> None:
    assert ("reduce-scatter" in moved(8, 8, 64, sizes, is_tpu_program=True)) == is_scattered


def test_padded_shards_are_permuted_to_their_devices() -> None:
    # 96 rows over 8 devices, 12 padded to 16: the rows of the last device are 28 away.
    assert moved(96, 32, 64, is_tpu_program=True)["collective-permute"] == pytest.approx(28 * 32 * 4)
    assert "collective-permute" not in moved(128, 32, 64, is_tpu_program=True)
