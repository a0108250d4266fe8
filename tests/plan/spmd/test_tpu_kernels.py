"""FFTs and triangular solves as the matmuls of programs compiled for v5e with libtpu 0.0.52."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.lax.linalg import triangular_solve

import spanax
from spanax.hardware.mesh import MeshShape
from spanax.plan.presets import layout_named
from spanax.plan.sharding.resolve import resolve
from spanax.plan.spmd.count_terms import count_terms
from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.plan.spmd.tpu_kernels import fft_matmuls, solve_matmuls

BATCH, LENGTH, ROWS = 64, 16, 8


@pytest.mark.parametrize(
    "length, products",
    [(8, 24), (100, 300), (256, 768), (300, 900), (384, 393), (1000, 3000), (1024, 408), (4096, 480), (16384, 768),
     (32768, 1152), (65536, 1536)],
)  # fmt: skip
def test_the_products_of_an_fft_are_those_of_compiled_programs(length: int, products: int) -> None:
    matmuls = fft_matmuls((ROWS, length), (ROWS, length), (length,), "FFT")
    assert sum(each.flops * each.count for each in matmuls) == 2 * ROWS * length * products


def test_a_real_fft_over_two_dims_computes_the_last_in_full_and_the_other_for_its_frequencies() -> None:
    matmuls = fft_matmuls((ROWS, 8, 8), (ROWS, 8, 5), (8, 8), "RFFT")
    assert sum(each.flops * each.count for each in matmuls) == 4.875 * 2 * ROWS * 8 * 8 * 8


@pytest.mark.parametrize(
    "rows, columns, products", [(8, 8, 64), (8, 1, 0), (128, 8, 16384), (129, 8, 16384), (160, 8, 21504),
                                (300, 8, 62352), (512, 16, 163840)],
)  # fmt: skip
@pytest.mark.parametrize("is_left", [True, False])
def test_the_products_of_a_triangular_solve_are_those_of_compiled_programs(
    rows: int, columns: int, products: int, is_left: bool
) -> None:
    sides = (ROWS, rows, columns) if is_left else (ROWS, columns, rows)
    matmuls = solve_matmuls((ROWS, rows, rows), sides)
    assert sum(each.flops * each.count for each in matmuls) == 2 * ROWS * columns * products


class Filter(nnx.Module):
    """Two filters in the frequency domain, of the same shape."""

    def __init__(self, rngs: nnx.Rngs):
        self.gains = nnx.List([nnx.Param(jnp.ones(LENGTH // 2 + 1)) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for gain in self.gains:
            x = jnp.tanh(jnp.fft.irfft(jnp.fft.rfft(x) * gain[...], LENGTH))
        return x


class Solve(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.matrix = nnx.Param(jnp.eye(LENGTH))

    def __call__(self, x: jax.Array) -> jax.Array:
        sides = jnp.broadcast_to(x[:, :, None], (BATCH, LENGTH, ROWS))
        return triangular_solve(jnp.broadcast_to(self.matrix[...], (BATCH, LENGTH, LENGTH)), sides, left_side=True)


def flops(module: type[nnx.Module], *, is_tpu_program: bool) -> float:
    program = spanax.trace(
        build=module, optimizer=optax.sgd(0.1), batch=jax.ShapeDtypeStruct((BATCH, LENGTH), "float32"),
        loss=lambda model, x: (model(x) ** 2).mean(),
    )  # fmt: skip
    mesh = MeshShape.of("data=4")
    sharded = ShardedProgram(resolve(program, layout_named("data", mesh), mesh, {}), program.step)
    matmuls = count_terms(sharded, is_tpu_program=is_tpu_program).matmuls
    assert set((matmuls.work * (matmuls.flops > 0)).tolist()) <= {0, 1}  # each is divided by the data axis
    return float((matmuls.flops * matmuls.runs).sum())


def test_ffts_of_one_shape_share_the_product_with_zeros() -> None:
    product = 2 * BATCH * LENGTH * LENGTH
    # Forward: two real FFTs and two inverse ones; backward: the same of the gradients, without that of the inputs.
    real, inverse = 2 + 2, 2 + 1
    assert flops(Filter, is_tpu_program=False) == 0
    assert flops(Filter, is_tpu_program=True) == product * (2 * real + 1 + 3 * inverse)


def test_triangular_solves_are_counted_for_tpus_only() -> None:
    assert flops(Solve, is_tpu_program=True) - flops(Solve, is_tpu_program=False) == 2 * 2 * BATCH * LENGTH**2 * ROWS
