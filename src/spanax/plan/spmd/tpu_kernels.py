"""The matmuls into which a TPU's compiler expands FFTs and triangular solves.

Source: FFTs of 24 lengths from 8 to 65,536 and solves with 8 to 512 rows in programs for v5e, libtpu 0.0.52;
tests/byo/operator.py, lru.py and solver.py for v5e:2x4.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spanax.plan.spmd.tiled_scatter import LANES
from spanax.plan.spmd.tpu_matmuls import REAL_PRODUCTS
from spanax.trace.jaxpr.graph import Graph, Op

DIRECT_LENGTH = 2 * LANES
"""Up to this length, an FFT is one matmul with the matrix of all its coefficients."""

BLOCK_ROWS = LANES
"""The rows of a triangular matrix that a kernel inverts at once; the inverse is multiplied."""


@dataclass(frozen=True)
class KernelMatmul:
    """Matmuls of one shape in the expansion of an operation: global sizes, and how many of them run.

    Attributes:
      rows: independent rows, over all leading dims.
      columns: columns of the result.
      summed: products that are added.
      count: the number of real matmuls.
      is_shared: whether operations of the same shape share it.
    """

    rows: int
    columns: int
    summed: int
    count: int = 1
    is_shared: bool = False

    @property
    def flops(self) -> int:
        """FLOPs of one of the matmuls."""
        return 2 * self.rows * self.columns * self.summed


def kernel_matmuls(graph: Graph, op: Op) -> list[KernelMatmul]:
    """Returns the matmuls of an FFT or a triangular solve; none for other operations."""
    shapes = [graph.shape(value) for value in (*op.inputs[:2], op.outputs[0])]
    if op.name == "fft":
        return fft_matmuls(shapes[0], shapes[-1], op.params["fft_lengths"], op.params["fft_type"].name)
    if op.name == "triangular_solve":
        return solve_matmuls(shapes[0], shapes[1])
    return []


def fft_matmuls(operand: Sequence[int], result: Sequence[int], lengths: Sequence[int], kind: str) -> list[KernelMatmul]:
    """Returns the matmuls of an FFT over the last dims: three for each factor of a length, as of any complex matmul.

    Of a real operand, the product with the imaginary part is one of zeros, which FFTs of the same shape share. The
    real FFT computes all frequencies and is sliced, its inverse reads all of them.

    Args:
      operand: the shape of the operand.
      result: the shape of the result.
      lengths: the lengths of the transformed dims.
      kind: `FFT`, `IFFT`, `RFFT` or `IRFFT`.

    Example:
      >>> [(each.flops, each.count) for each in fft_matmuls((64, 16), (64, 9), (16,), "RFFT")]
      [(32768, 2), (32768, 1)]
      >>> [(each.summed, each.count) for each in fft_matmuls((64, 1024), (64, 1024), (1024,), "FFT")]
      [(128, 3), (8, 3)]
    """
    matmuls = []
    for index, length in enumerate(lengths):
        is_last = index == len(lengths) - 1
        # The last dim of a real array is transformed in full, the others for each of its frequencies.
        shape = {"RFFT": operand if is_last else result, "IRFFT": result if is_last else operand}.get(kind, operand)
        for factor in factors(length):
            rows, is_real = math.prod(shape) // factor, kind == "RFFT" and is_last
            matmuls.append(KernelMatmul(rows, factor, factor, REAL_PRODUCTS - is_real))
            if is_real:
                matmuls.append(KernelMatmul(rows, factor, factor, is_shared=True))
    return matmuls


def factors(length: int) -> tuple[int, ...]:
    """Returns the lengths of the FFTs that one of a length is computed by: two if full lanes divide it.

    Example:
      >>> factors(256), factors(384), factors(1000), factors(1024), factors(65536)
      ((256,), (128, 3), (1000,), (128, 8), (256, 256))
    """
    if length <= DIRECT_LENGTH:
        return (length,)
    multiples = range(LANES, length, LANES)
    first = next((each for each in multiples if each * each >= length and length % each == 0), length)
    return (first, length // first) if first < length else (length,)


def solve_matmuls(matrix: Sequence[int], sides: Sequence[int]) -> list[KernelMatmul]:
    """Returns the matmuls of a triangular solve: inverted blocks, and the rows before them, times the right sides.

    Products with a vector count as none (`tpu_matmuls.num_matmuls`).

    Example:
      >>> sum(each.flops for each in solve_matmuls((4, 160, 160), (4, 160, 8))) == 2 * 4 * 8 * 21504
      True
      >>> solve_matmuls((4, 160, 160), (4, 160, 1))
      []
    """
    size, matmuls = matrix[-1], []
    columns = math.prod(sides) // (math.prod(matrix) // size)
    for start in range(0, size, BLOCK_ROWS):
        rows = min(BLOCK_ROWS, size - start)
        sizes = [summed for summed in (rows, start) if min(rows, columns, summed) > 1]
        matmuls += [KernelMatmul(math.prod(matrix[:-2]) * rows, columns, summed) for summed in sizes]
    return matmuls
