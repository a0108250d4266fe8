"""Reads and adds to rows of tables on other devices: those of tokens by the devices that have their experts.

Each device has an address for each of its rows: the place of a row in the tables of all devices along some mesh axes,
one after another, or a larger number for none. It sends the addresses to the owners of the rows. As each choice has one
expert, every owner is asked for equally many rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

Axes = tuple[str, ...]

GATHERING = ("cpu",)
"""The platforms whose compilers have no ragged all-to-all: tables are gathered there, and sums of rows scattered."""


def read_rows(table: Any, addresses: Any, num_asked: int, axes: Axes) -> Any:
    """Returns the rows of the tables of all devices at some addresses; zeros where there is none."""

    def sent(table: Any, addresses: Any) -> Any:
        asked = _ask(addresses, len(table), num_asked, axes)
        rows = _exchanged(table[asked.rows], len(addresses), asked.to_devices, axes)
        return rows[jnp.argsort(asked.order)]

    def gathered(table: Any, addresses: Any) -> Any:
        return lax.all_gather(table, axes, tiled=True).at[addresses].get(mode="fill", fill_value=0)

    return _by_platform(sent, gathered)(table, addresses)


def add_rows(table: Any, rows: Any, addresses: Any, num_asked: int, axes: Axes) -> Any:
    """Returns the table of this device, with the rows of all devices added that have addresses in it."""

    def sent(table: Any, rows: Any, addresses: Any) -> Any:
        asked = _ask(addresses, len(table), num_asked, axes)
        return table.at[asked.rows].add(_exchanged(rows[asked.order], num_asked, asked.to_owners, axes))

    def gathered(table: Any, rows: Any, addresses: Any) -> Any:
        whole = jnp.zeros((len(table) * lax.axis_size(axes), *table.shape[1:]), table.dtype)
        return table + lax.psum_scatter(whole.at[addresses].add(rows, mode="drop"), axes, tiled=True)

    return _by_platform(sent, gathered)(table, rows, addresses)


def _by_platform(sent: Callable[..., Any], gathered: Callable[..., Any]) -> Callable[..., Any]:
    def function(*args: Any) -> Any:
        return lax.platform_dependent(*args, default=sent, **dict.fromkeys(GATHERING, gathered))

    return function


class _Asked(NamedTuple):
    """What devices ask of each other.

    Attributes:
      order: the rows of this device, by owner.
      rows: the rows of its own table that it is asked for, by device.
      to_owners, to_devices: the offsets and sizes of what moves to the owners of rows, and from them.
    """

    order: Any
    rows: Any
    to_owners: tuple[Any, ...]
    to_devices: tuple[Any, ...]


def _ask(addresses: Any, size: int, num_asked: int, axes: Axes) -> _Asked:
    ways = lax.axis_size(axes)
    owners = addresses // size
    order = jnp.argsort(owners)
    own = lax.axis_index(axes)
    asked = jnp.zeros(ways, jnp.int32).at[owners].add(1, mode="drop")
    counts = lax.all_gather(asked, axes)  # of each device, by owner
    on_device = jnp.cumsum(counts, 1) - counts
    at_owner = jnp.cumsum(counts, 0) - counts
    # As many for every owner: TPUs pad a number that is sent alone to a whole row of lanes.
    places = jnp.arange(num_asked)
    sent = (addresses % size)[order].at[on_device[own][:, None] + places].get(mode="clip")
    received = lax.all_to_all(sent, axes, 0, 0)
    device = jnp.searchsorted(at_owner[:, own], places, side="right") - 1
    rows = received[device, places - at_owner[device, own]]
    to_owners = on_device[own], counts[own], at_owner[own], counts[:, own]
    to_devices = at_owner[:, own], counts[:, own], on_device[:, own], counts[own]
    return _Asked(order, rows, to_owners, to_devices)


def _exchanged(rows: Any, number: int, sizes: tuple[Any, ...], axes: Axes) -> Any:
    return lax.ragged_all_to_all(rows, jnp.zeros((number, *rows.shape[1:]), rows.dtype), *sizes, axis_name=axes)
