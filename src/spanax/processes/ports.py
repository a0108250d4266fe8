"""Lists the addresses on which this process accepts connections, as the kernel reports them."""

import ipaddress
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

LISTEN = "0A"
"""State of a socket that accepts connections. Source: Linux, include/net/tcp_states.h."""

EVERY_INTERFACE = ("0.0.0.0", "::")


def open_ports() -> list[str]:
    """Returns the addresses as `host:port`, sorted; empty on systems without /proc.

    Example:
      >>> import socket
      >>> with socket.create_server(("127.0.0.1", 0)) as server:
      ...     f"127.0.0.1:{server.getsockname()[1]}" in open_ports()
      True
    """
    sockets = set(_sockets())
    addresses = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):  # a system without /proc, or without IPv6
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN and fields[9] in sockets:
                    addresses.add(_address(fields[1]))
    return sorted(addresses)


def is_public(address: str) -> bool:
    """Returns whether an address of `open_ports` covers every interface.

    Example:
      >>> is_public("[::]:9911"), is_public("127.0.0.1:9911")
      (True, False)
    """
    return address.rpartition(":")[0].strip("[]") in EVERY_INTERFACE


def _sockets() -> Iterator[str]:
    """Yields the inode numbers of this process's sockets."""
    with suppress(OSError):
        for descriptor in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # it may have been closed
                target = os.readlink(f"/proc/self/fd/{descriptor}")
                if target.startswith("socket:["):
                    yield target[len("socket:[") : -1]


def _address(text: str) -> str:
    """Converts `0100007F:1F90` to `127.0.0.1:8080`: words of four bytes in native byte order."""
    packed, _, port = text.partition(":")
    words = [int(packed[start : start + 8], 16) for start in range(0, len(packed), 8)]
    host = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    mapped = getattr(host, "ipv4_mapped", None)
    return f"[{host}]:{int(port, 16)}" if host.version == 6 and mapped is None else f"{mapped or host}:{int(port, 16)}"
