"""Devices that are not here, as JAX would show them."""

from dataclasses import dataclass


@dataclass
class Device:
    """What Spanax asks of a JAX device without running anything on it."""

    device_kind: str
    process_index: int = 0
    slice_index: int | None = None
    coords: tuple[int, ...] = ()
    limit: int | None = 2**30

    def memory_stats(self) -> dict[str, int] | None:
        return None if self.limit is None else {"bytes_limit": self.limit}
