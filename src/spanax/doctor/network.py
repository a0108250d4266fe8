"""Checks the loopback interface, the coordinator's port, and the connection to other hosts."""

import errno
import socket
import statistics
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from spanax.doctor.verdict import Verdict
from spanax.errors import GroupError
from spanax.units import whole_number

CONNECT_SECONDS = 5.0
ROUNDS = 5
SLOW_SECONDS = 0.05
SKEW_SECONDS = 1.0

FIREWALL = "open the port between the hosts, in the firewall or the security group"

_HELLO, _TIME = struct.Struct("!i"), struct.Struct("!d")


def loopback() -> Verdict:
    """Checks that two processes of this host can communicate over 127.0.0.1."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(CONNECT_SECONDS)
            with socket.create_connection(server.getsockname(), CONNECT_SECONDS) as client:
                connection, _ = server.accept()
                with connection:
                    client.sendall(b"spanax")
                    if connection.recv(6) != b"spanax":
                        raise OSError(errno.EIO, "another service answers")
    except OSError as error:
        message = f"this host cannot connect to itself over 127.0.0.1: {error.strerror or error}."
        return Verdict("loopback", "problem", message, fix="ip link set lo up")
    return Verdict("loopback", "ok", "127.0.0.1 answers")


def coordinator(environ: Mapping[str, str]) -> Verdict:
    """Checks the address that the coordinator would bind to, and that its port is free."""
    setting = environ.get("SPANAX_COORDINATOR")
    if setting is None:
        address, address_of_name = _own_address(), _address_of(socket.gethostname())
        message = f"single-host runs use 127.0.0.1; other hosts would reach this one at {address or 'no address'}"
        if address is not None and address_of_name is not None and address_of_name.startswith("127."):
            # The default of Debian's /etc/hosts: harmless, unless other hosts use the name.
            message += f", not by its name, which is {address_of_name} here"
        return Verdict("coordinator", "ok", message)
    host, port = parse_address(setting, "SPANAX_COORDINATOR")
    address = _address_of(host)
    where = f"SPANAX_COORDINATOR={setting}"
    if address is None:
        return Verdict(
            "coordinator", "problem", f"'{host}' has no address.", where, "use its IP address, or a name that resolves"
        )
    rank, num_hosts = place(environ)
    if rank:
        return Verdict("coordinator", "ok", f"host 0 would listen on {address}:{port}", where)
    try:
        with socket.create_server((address, port)):
            pass
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            message, fix = f"{address} is not an address of this host, which has rank 0.", "use an address of host 0"
        elif error.errno == errno.EADDRINUSE:
            message, fix = (
                f"port {port} of {address} is in use.",
                f"use another port, or find its owner: ss -ltnp 'sport = :{port}'",
            )
        else:
            message, fix = f"cannot listen on {address}:{port}: {error.strerror}.", "use a port above 1023"
        return Verdict("coordinator", "problem", message, where, fix)
    note = "; only processes of this host can reach it" if num_hosts > 1 and address.startswith("127.") else ""
    return Verdict("coordinator", "ok", f"{address}:{port} is free; no other interface is used{note}", where)


def reach(target: str) -> Verdict:
    """Checks that another host answers at `host:port`, and measures its latency."""
    host, port = parse_address(target, "--hosts")
    address = _address_of(host)
    if address is None:
        message = f"'{host}' has no address."
        return Verdict("hosts", "problem", message, target, "use its IP address, or a name that resolves on this host")
    latencies = []
    for _ in range(ROUNDS):
        began = time.monotonic()
        try:
            socket.create_connection((address, port), CONNECT_SECONDS).close()
        except ConnectionRefusedError:
            message = f"{host} answers, but nothing listens on its port {port}."
            return Verdict(
                "hosts", "warning", message, address, "expected before a run; during a run, check the logs of that host"
            )
        except OSError as error:
            is_timeout = isinstance(error, TimeoutError)
            reason = f"nothing within {CONNECT_SECONDS:g} s" if is_timeout else error.strerror or str(error)
            return Verdict("hosts", "problem", f"{host}:{port} cannot be reached: {reason}.", address, FIREWALL)
        latencies.append(time.monotonic() - began)
    median = statistics.median(latencies)
    summary = f"{host}:{port} answers in {1e3 * median:.2g} ms"
    if median > SLOW_SECONDS:
        return Verdict("hosts", "warning", f"{summary}: every step waits for it.", address, "use hosts that are closer")
    return Verdict("hosts", "ok", summary, address)


def group(environ: Mapping[str, str], timeout: float, clock: Callable[[], float] = time.time) -> Verdict | None:
    """Checks that the hosts of a group can connect to the coordinator's address, and that their clocks agree.

    Every host of the group calls it at about the same time; returns None if there is no group.
    """
    rank, num_hosts = place(environ)
    if "SPANAX_COORDINATOR" not in environ or num_hosts == 1:
        return None
    host, port = parse_address(environ["SPANAX_COORDINATOR"], "SPANAX_COORDINATOR")
    address = _address_of(host) or host
    if rank == 0:
        return _waited_for(address, port, num_hosts, timeout, clock)
    deadline = time.monotonic() + timeout
    while True:
        try:
            skew, round_trip = _compared(address, port, rank, clock)
        except OSError as error:
            if time.monotonic() < deadline:
                time.sleep(0.1)  # host 0 may start later
                continue
            message = f"host 0 was not reached within {timeout:g} s: {error.strerror or error}."
            return Verdict("group", "problem", message, f"{address}:{port}", f"run spanax doctor there too; {FIREWALL}")
        summary = f"host 0 answers in {1e3 * round_trip:.2g} ms, its clock differs by {skew:+.3f} s"
        if abs(skew) - round_trip > SKEW_SECONDS:
            fix = "timedatectl set-ntp true on both, or start chronyd"
            return Verdict(
                "group", "warning", f"{summary}: events in reports may be out of order.", f"{address}:{port}", fix
            )
        return Verdict("group", "ok", summary, f"{address}:{port}")


def place(environ: Mapping[str, str]) -> tuple[int, int]:
    """Returns the rank of this host in its group, and the number of hosts.

    Raises:
      SpanaxError: a variable is not a number.

    Example:
      >>> place({"SPANAX_HOST": "1", "SPANAX_NUM_HOSTS": "4"}), place({})
      ((1, 4), (0, 1))
    """
    rank, num_hosts = environ.get("SPANAX_HOST", environ.get("SLURM_PROCID", "0")), environ.get("SPANAX_NUM_HOSTS", "1")
    numbers = whole_number(rank), whole_number(num_hosts)
    if numbers[0] is None or numbers[1] is None:
        where = f"SPANAX_HOST={rank[:80]}, SPANAX_NUM_HOSTS={num_hosts[:80]}"
        raise GroupError("the environment does not define the rank of this host.", where=where, fix="use integers")
    return numbers[0], numbers[1]


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


def _waited_for(address: str, port: int, num_hosts: int, timeout: float, clock: Callable[[], float]) -> Verdict:
    """Runs the check on host 0: waits for all other hosts, and answers their requests for the time."""
    missing, deadline = set(range(1, num_hosts)), time.monotonic() + timeout
    try:
        with socket.create_server((address, port)) as server:
            while missing and (remaining := deadline - time.monotonic()) > 0:
                server.settimeout(remaining)
                with suppress(OSError, struct.error):
                    connection, _ = server.accept()
                    with connection:
                        connection.settimeout(CONNECT_SECONDS)
                        rank = _HELLO.unpack(connection.recv(_HELLO.size))[0]
                        while connection.recv(1):
                            connection.sendall(_TIME.pack(clock()))
                        missing.discard(rank)
    except OSError as error:
        message = f"cannot listen on {address}:{port}: {error.strerror}."
        return Verdict("group", "problem", message, fix="use an address of this host and a free port")
    if missing:
        message = f"host {', '.join(map(str, sorted(missing)))} did not connect within {timeout:g} s."
        return Verdict("group", "problem", message, f"{address}:{port}", f"run spanax doctor there too; {FIREWALL}")
    return Verdict("group", "ok", f"all {num_hosts} hosts connected", f"{address}:{port}")


def _compared(address: str, port: int, rank: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Returns the offset of host 0's clock and a round-trip time, in seconds, of the fastest of several rounds."""
    rounds = []
    with socket.create_connection((address, port), CONNECT_SECONDS) as connection:
        connection.sendall(_HELLO.pack(rank))
        for _ in range(ROUNDS):
            began, sent_at = time.monotonic(), clock()
            connection.sendall(b"?")
            answer = connection.recv(_TIME.size, socket.MSG_WAITALL)
            if len(answer) != _TIME.size:
                raise OSError(errno.EPROTO, "another service listens there")
            round_trip = time.monotonic() - began
            rounds.append((round_trip, _TIME.unpack(answer)[0] - sent_at - round_trip / 2))
    round_trip, skew = min(rounds)
    return skew, round_trip


def _address_of(host: str) -> str | None:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return None


def _own_address() -> str | None:
    """Returns this host's address on the default route; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation (RFC 5737)
        except OSError:
            return None
        return str(probe.getsockname()[0])
