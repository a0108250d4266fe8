"""Checks the coordinator's port, and the connection to other hosts."""

import errno
import socket
import struct
import time
from contextlib import suppress

from spanax.doctor.machine import Verdict
from spanax.errors import GroupError
from spanax.processes.processes import Hosts
from spanax.units import whole_number

CONNECT_SECONDS = 5.0

FIREWALL = "open the port between the hosts, in the firewall or the security group"

_RANK = struct.Struct("!i")
_WELCOME = b"spanax"


def group(hosts: Hosts, timeout: float) -> Verdict:
    """Checks that the hosts of a group can connect to the address of its coordinator.

    Every host of the group calls it at about the same time, and waits at most `timeout` seconds for the others.

    Raises:
      SpanaxError: the address is invalid.
    """
    if not hosts.coordinator:
        return Verdict("coordinator", "ok", "no group is set: a run has one process, or JAX detects its group")
    host, port = parse_address(hosts.coordinator, "SPANAX_COORDINATOR")
    where = f"SPANAX_COORDINATOR={hosts.coordinator}"
    address = _address_of(host)
    if address is None:
        fix = "use its IP address, or a name that resolves"
        return Verdict("coordinator", "problem", f"'{host}' has no address.", where, fix)
    if hosts.rank:
        return _joined(address, port, hosts.rank, timeout)
    try:
        with socket.create_server((address, port)) as server:
            missing = _absent(server, hosts.num_hosts, timeout)
    except OSError as error:
        message = f"cannot listen on {address}:{port}: {error.strerror}."
        fix = "use a port above 1023"
        if error.errno == errno.EADDRNOTAVAIL:
            message = f"{address} is not an address of this host, which has rank 0."
            fix = "use an address of host 0"
        elif error.errno == errno.EADDRINUSE:
            message = f"port {port} of {address} is in use."
            fix = f"use another port, or find its owner: ss -ltnp 'sport = :{port}'"
        return Verdict("coordinator", "problem", message, where, fix)
    if missing:
        message = f"host {', '.join(map(str, sorted(missing)))} did not connect within {timeout:g} s."
        return Verdict("group", "problem", message, where, f"run spanax doctor there too; {FIREWALL}")
    if hosts.num_hosts == 1:
        return Verdict("coordinator", "ok", f"{address}:{port} is free; no other interface is used", where)
    return Verdict("group", "ok", f"all {hosts.num_hosts} hosts connected to {address}:{port}", where)


def reach(target: str) -> Verdict:
    """Checks that another host answers at `host:port`."""
    host, port = parse_address(target, "--hosts")
    address = _address_of(host)
    if address is None:
        fix = "use its IP address, or a name that resolves on this host"
        return Verdict("hosts", "problem", f"'{host}' has no address.", target, fix)
    try:
        socket.create_connection((address, port), CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        message = f"{host} answers, but nothing listens on its port {port}."
        fix = "expected before a run; during a run, check the logs of that host"
        return Verdict("hosts", "warning", message, address, fix)
    except OSError as error:
        is_timeout = isinstance(error, TimeoutError)
        reason = f"nothing within {CONNECT_SECONDS:g} s" if is_timeout else error.strerror or str(error)
        return Verdict("hosts", "problem", f"{host}:{port} cannot be reached: {reason}.", address, FIREWALL)
    return Verdict("hosts", "ok", f"{host}:{port} answers", address)


def parse_address(text: str, flag: str) -> tuple[str, int]:
    """Returns the host and the port of an address.

    Raises:
      SpanaxError: it is invalid.

    Example:
      >>> parse_address("10.0.0.7:9911", "--hosts")
      ('10.0.0.7', 9911)
    """
    host, _, port = text.strip().rpartition(":")
    number = whole_number(port)
    if not host or number is None or not 0 < number < 65536:
        raise GroupError(f"{flag}: '{text[:200]}' is not an address.", fix="host:port, such as 10.0.0.7:9911")
    return host.strip("[]"), number


def _joined(address: str, port: int, rank: int, timeout: float) -> Verdict:
    """Connects to host 0, which may start later."""
    deadline = time.monotonic() + timeout
    where = f"{address}:{port}"
    while True:
        try:
            with socket.create_connection((address, port), CONNECT_SECONDS) as connection:
                connection.sendall(_RANK.pack(rank))
                if connection.recv(len(_WELCOME), socket.MSG_WAITALL) != _WELCOME:
                    raise OSError(errno.EPROTO, "another service listens there")
        except OSError as error:
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            message = f"host 0 was not reached within {timeout:g} s: {error.strerror or error}."
            return Verdict("group", "problem", message, where, f"run spanax doctor there too; {FIREWALL}")
        return Verdict("group", "ok", "host 0 answers", where)


def _absent(server: socket.socket, num_hosts: int, timeout: float) -> set[int]:
    """Waits for the other hosts of a group, and returns the ranks that did not connect in time."""
    missing = set(range(1, num_hosts))
    deadline = time.monotonic() + timeout
    while missing and (remaining := deadline - time.monotonic()) > 0:
        server.settimeout(remaining)
        with suppress(OSError, struct.error):  # a stranger
            connection, _ = server.accept()
            with connection:
                connection.settimeout(CONNECT_SECONDS)
                rank = _RANK.unpack(connection.recv(_RANK.size, socket.MSG_WAITALL))[0]
                connection.sendall(_WELCOME)
                missing.discard(rank)
    return missing


def _address_of(host: str) -> str | None:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return None
