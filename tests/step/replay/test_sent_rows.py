"""Rows of tokens that are sent to the devices of their experts, and back.

XLA has no ragged all-to-all for CPUs: these tests replace it by what JAX documents of it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from sampling import sampled
from spanax.hardware.mesh import MeshShape
from spanax.step.replay import sent_rows
from spanax.step.replay.sent_rows import add_rows, read_rows
from step.replay.test_sorted_rows import EXACT, planned, reference, trained

WAYS, TOKENS, TOP, DIM = 4, 6, 2, 8
ROWS = WAYS * TOKENS * TOP


def emulated(  # noqa: PLR0913
    operand: Any, output: Any, starts: Any, sizes: Any, ends: Any, received: Any, *, axis_name: Any
) -> Any:
    """Writes the slices that each device sends into the results of the others, and checks that they fit."""
    operands, starts, sent, ends = (lax.all_gather(each, axis_name) for each in (operand, starts, sizes, ends))
    own = lax.axis_index(axis_name)
    places = jnp.arange(len(output))
    for device in range(lax.axis_size(axis_name)):
        place = places - ends[device, own]
        is_sent = (place >= 0) & (place < sent[device, own])
        rows = operands[device].at[starts[device, own] + place].get(mode="fill", fill_value=0)
        output = jnp.where(is_sent.reshape(-1, *[1] * (output.ndim - 1)), rows, output)
        fits = ends[device, own] + sent[device, own] <= len(output)
        output = jnp.where(fits & (received[device] == sent[device, own]), output, jnp.zeros((), output.dtype) - 777)
    return output


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of what is sent."""
    shapes = list[tuple[int, ...]]()

    def exchange(operand: Any, *args: Any, **axis: Any) -> Any:
        shapes.append(operand.shape)
        return emulated(operand, *args, **axis)

    monkeypatch.setattr(lax, "ragged_all_to_all", exchange)
    monkeypatch.setattr(sent_rows, "GATHERING", ())
    return shapes


@pytest.mark.usefixtures("devices", "sent")
@pytest.mark.parametrize("is_skewed", [False, True])
def test_each_device_reads_and_adds_to_rows_of_all_tables(is_skewed: bool) -> None:
    """Also where one device has the experts of all choices: it has room for them."""
    rng = np.random.default_rng(0)
    device = np.zeros(ROWS, int) if is_skewed else rng.integers(0, WAYS, ROWS)
    addresses = np.full((WAYS, ROWS), WAYS * TOKENS, np.int32)
    for index, own in enumerate(addresses):
        choices = rng.permutation(np.flatnonzero(device == index))
        own[: len(choices)] = choices // TOP
    table, rows = (rng.integers(-9, 9, (size, DIM)).astype(np.float32) for size in (WAYS * TOKENS, WAYS * ROWS))

    def part(table: Any, rows: Any, addresses: Any) -> tuple[Any, Any]:
        asked = TOKENS * TOP, ("expert",)
        return read_rows(table, addresses, *asked), add_rows(table, rows, addresses, *asked)

    mesh = MeshShape.of(f"expert={WAYS}").build()
    spec = PartitionSpec("expert")
    mapped = jax.shard_map(part, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
    read, added = jax.jit(mapped)(table, rows, addresses.reshape(-1))
    padded = np.concatenate([table, np.zeros((1, DIM), np.float32)])
    np.testing.assert_array_equal(read, padded[addresses.reshape(-1)])
    expected = padded.copy()
    np.add.at(expected, addresses.reshape(-1), rows)
    np.testing.assert_array_equal(added, expected[:-1])


CASES = [
    ("sorted_moe", "data=2,expert=4", 1),
    ("sorted_taken", "expert=8", 1),
    ("sorted_taken", "fsdp=2,expert=2,model=2", 1),
    ("sorted_taken", "pipe=2,expert=4", 4),
]


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(("name", "mesh", "microbatches"), sampled(CASES, CASES[1:2]))
def test_steps_that_send_rows_equal_those_of_one_device(
    name: str, mesh: str, microbatches: int, sent: list[tuple[int, ...]]
) -> None:
    result = trained(name, planned(name, mesh, microbatches), microbatches)
    assert sent
    for path, expected in reference(name, 1 if name in EXACT else microbatches).items():
        scale = max(np.abs(expected).max(initial=0), 1e-3)
        assert np.abs(result[path] - expected).max(initial=0) <= 1e-5 * scale, path
