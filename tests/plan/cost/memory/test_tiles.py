"""Tiles: bytes of arrays in the buffer assignments of libtpu 0.0.52 (jax 0.10.2) for v5e:2x4.

`benchmarks/memory_cells.py --compile FOLDER` dumps them.
"""

from typing import Any

import numpy as np
import pytest

from spanax.plan.cost.memory.tiles import Tiled, padded, padded_bytes

ARGUMENTS = [
    # shape, bytes of an element, bytes as compiled
    ((16, 64, 64, 3), 4, 1_572_864),
    ((3, 3, 64, 64), 4, 294_912),
    ((100_000, 32), 4, 12_812_288),
]

TEMPORARIES = [
    # shape, bytes of an element, dims of layers, indexed dims, bytes as compiled
    ((100_000, 32), 4, (), (0,), 51_200_000),
    ((16, 64, 64, 32), 2, (), (), 8_388_608),
    ((16, 64, 64, 96), 2, (), (), 16_777_216),
    ((64, 64, 64, 64), 4, (), (), 134_217_728),
    ((8, 1024, 50257), 2, (), (), 823_525_376),
    ((8, 1024, 50257), 4, (), (), 1_647_050_752),
    ((12, 1, 32, 12, 197, 197), 4, (0,), (), 943_718_400),
    ((12, 32, 197, 3072), 2, (0,), (), 471_859_200),
]


@pytest.mark.parametrize(("shape", "itemsize", "num_bytes"), ARGUMENTS)
def test_bytes_of_arguments_are_those_of_compiled_buffers(shape: Any, itemsize: int, num_bytes: int) -> None:
    assert padded_bytes(shape, itemsize, "tpu") == num_bytes


@pytest.mark.parametrize(("shape", "itemsize", "layers", "indexed", "num_bytes"), TEMPORARIES)
def test_bytes_of_temporaries_are_close_to_compiled_buffers(
    shape: Any, itemsize: int, layers: Any, indexed: Any, num_bytes: int
) -> None:
    """The compiler also weighs the layouts of consumers, so that a temporary may be padded more than necessary."""
    (best,) = padded(np.asarray(shape, float)[:, None], itemsize, layers, indexed)
    assert best <= num_bytes <= 1.02 * best


def test_one_call_pads_the_local_shapes_of_all_candidates() -> None:
    tiled = Tiled((1024, 4096), (1, 2), (True, False), (False, False), 2)
    num_shards = np.asarray([[1, 1], [2, 8], [4, 2], [8, 16]])
    result, unpadded = tiled.padded(num_shards, np.asarray([1.0, 0.5]), np.ones(2))
    assert result.tolist() == [padded_bytes((512, 1024), 2, "tpu"), padded_bytes((64, 2048), 2, "tpu")]
    assert unpadded.tolist() == [512 * 1024 * 2, 64 * 2048 * 2]


@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_padding_grows_with_every_dim(itemsize: int) -> None:
    sizes = np.arange(1.0, 300.0)
    for dims in ([sizes, np.full_like(sizes, 7)], [np.full_like(sizes, 40), sizes, np.full_like(sizes, 3)]):
        result = padded(np.stack(dims), itemsize)
        assert (np.diff(result) >= 0).all() and (result >= np.prod(dims, axis=0) * itemsize).all()
