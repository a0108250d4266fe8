"""Network: whether this host can talk to itself, the coordinator's port is free, and the other hosts answer."""

import errno
import socket
import statistics
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from spanax.doctor.verdict import Verdict
from spanax.errors import SpanaxError

CONNECT_SECONDS = 5.0
ROUNDS = 5
SLOW_SECONDS = 0.05
SKEW_SECONDS = 1.0

FIREWALL = "open the port between the hosts, in the firewall or the security group"

_HELLO, _TIME = struct.Struct("!i"), struct.Struct("!d")


def loopback() -> Verdict:
    """Whether two processes of this host can talk over 127.0.0.1."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(CONNECT_SECONDS)
            with socket.create_connection(server.getsockname(), CONNECT_SECONDS) as here:
                there, _ = server.accept()
                with there:
                    here.sendall(b"spanax")
                    if there.recv(6) != b"spanax":
                        raise OSError(errno.EIO, "something else answers")
    except OSError as error:
        what = f"this host cannot talk to itself over 127.0.0.1: {error.strerror or error}."
        return Verdict("loopback", "problem", what, fix="ip link set lo up")
    return Verdict("loopback", "ok", "127.0.0.1 answers")


def coordinator(environ: Mapping[str, str]) -> Verdict:
    """Which address the coordinator would be bound to, and whether its port is free."""
    asked = environ.get("SPANAX_COORDINATOR")
    if asked is None:
        address, others = _own_address(), _address_of(socket.gethostname())
        what = f"runs of this host alone use 127.0.0.1; other hosts would reach it at {address or 'no address'}"
        if address is not None and others is not None and others.startswith("127."):
            # Debian's /etc/hosts has it so: harmless, unless the name is handed to other hosts.
            what += f", not by its name, which is {others} here"
        return Verdict("coordinator", "ok", what)
    host, port = parse_address(asked, "SPANAX_COORDINATOR")
    address = _address_of(host)
    where = f"SPANAX_COORDINATOR={asked}"
    if address is None:
        return Verdict("coordinator", "problem", f"'{host}' has no address.", where, "its IP address, or a known name")
    rank, num_hosts = place(environ)
    if rank:
        return Verdict("coordinator", "ok", f"host 0 is to listen on {address}:{port}", where)
    try:
        with socket.create_server((address, port)):
            pass
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            what, fix = f"{address} is no address of this host, which is to lead.", "an address of host 0"
        elif error.errno == errno.EADDRINUSE:
            what, fix = f"port {port} of {address} is taken.", f"another port; who has it: ss -ltnp 'sport = :{port}'"
        else:
            what, fix = f"cannot listen on {address}:{port}: {error.strerror}.", "another port, over 1023"
        return Verdict("coordinator", "problem", what, where, fix)
    note = "; only processes of this host can reach it" if num_hosts > 1 and address.startswith("127.") else ""
    return Verdict("coordinator", "ok", f"{address}:{port} is free, and no other interface is listened on{note}", where)


def reach(asked: str) -> Verdict:
    """Whether another host answers at `host:port`, and how fast."""
    host, port = parse_address(asked, "--hosts")
    address = _address_of(host)
    if address is None:
        what = f"'{host}' has no address."
        return Verdict("hosts", "problem", what, asked, "its IP address, or a name that this host knows")
    took = []
    for _ in range(ROUNDS):
        began = time.monotonic()
        try:
            socket.create_connection((address, port), CONNECT_SECONDS).close()
        except ConnectionRefusedError:
            what = f"{host} answers, and nothing listens on its port {port}."
            return Verdict("hosts", "warning", what, address, "right before a run; during one: look there for why")
        except OSError as error:
            silent = isinstance(error, TimeoutError)
            reason = f"nothing within {CONNECT_SECONDS:g} s" if silent else error.strerror or str(error)
            return Verdict("hosts", "problem", f"{host}:{port} cannot be reached: {reason}.", address, FIREWALL)
        took.append(time.monotonic() - began)
    median = statistics.median(took)
    told = f"{host}:{port} answers in {1e3 * median:.2g} ms"
    if median > SLOW_SECONDS:
        return Verdict("hosts", "warning", f"{told}: every step waits for that.", address, "hosts that are closer")
    return Verdict("hosts", "ok", told, address)


def group(environ: Mapping[str, str], timeout: float, clock: Callable[[], float] = time.time) -> Verdict | None:
    """Whether the hosts of a group meet at the coordinator's address, and whether their clocks agree.

    Every host of the group calls this at about the same time; None where there is no group.
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
            skew, trip = _compared(address, port, rank, clock)
        except OSError as error:
            if time.monotonic() < deadline:
                time.sleep(0.1)  # host 0 may come later
                continue
            what = f"host 0 was not met within {timeout:g} s: {error.strerror or error}."
            return Verdict("group", "problem", what, f"{address}:{port}", f"spanax doctor there too; {FIREWALL}")
        told = f"host 0 answers in {1e3 * trip:.2g} ms, its clock is {skew:+.3f} s from ours"
        if abs(skew) - trip > SKEW_SECONDS:
            fix = "timedatectl set-ntp true on both, or start chronyd"
            return Verdict("group", "warning", f"{told}: reports mix up what came first.", f"{address}:{port}", fix)
        return Verdict("group", "ok", told, f"{address}:{port}")


def place(environ: Mapping[str, str]) -> tuple[int, int]:
    """Which host of a group this is, and how many there are.

    Raises:
      SpanaxError: the environment holds something else than numbers.

    Example:
      >>> place({"SPANAX_HOST": "1", "SPANAX_NUM_HOSTS": "4"}), place({})
      ((1, 4), (0, 1))
    """
    rank, num_hosts = environ.get("SPANAX_HOST", environ.get("SLURM_PROCID", "0")), environ.get("SPANAX_NUM_HOSTS", "1")
    if not all(text.isascii() and text.isdigit() for text in (rank, num_hosts)):
        where = f"SPANAX_HOST={rank[:80]}, SPANAX_NUM_HOSTS={num_hosts[:80]}"
        raise SpanaxError("which host this is cannot be read from the environment.", where=where, fix="whole numbers")
    return int(rank[:9]), int(num_hosts[:9])


def parse_address(text: str, flag: str) -> tuple[str, int]:
    """The host and the port of an address.

    Raises:
      SpanaxError: it is none.

    Example:
      >>> parse_address("10.0.0.7:9911", "--hosts")
      ('10.0.0.7', 9911)
    """
    host, _, port = text.strip().rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536):
        raise SpanaxError(f"{flag}: '{text[:200]}' is no address.", fix="host:port, such as 10.0.0.7:9911")
    return host.strip("[]"), int(port)


def _waited_for(address: str, port: int, num_hosts: int, timeout: float, clock: Callable[[], float]) -> Verdict:
    """What host 0 sees: who came; each is told the time as often as it asks."""
    missing, deadline = set(range(1, num_hosts)), time.monotonic() + timeout
    try:
        with socket.create_server((address, port)) as server:
            while missing and (left := deadline - time.monotonic()) > 0:
                server.settimeout(left)
                with suppress(OSError, struct.error):
                    other, _ = server.accept()
                    with other:
                        other.settimeout(CONNECT_SECONDS)
                        rank = _HELLO.unpack(other.recv(_HELLO.size))[0]
                        while other.recv(1):
                            other.sendall(_TIME.pack(clock()))
                        missing.discard(rank)
    except OSError as error:
        what = f"cannot listen on {address}:{port}: {error.strerror}."
        return Verdict("group", "problem", what, fix="a port and an address of this host that are free")
    if missing:
        what = f"host {', '.join(map(str, sorted(missing)))} did not come within {timeout:g} s."
        return Verdict("group", "problem", what, f"{address}:{port}", f"spanax doctor there too; {FIREWALL}")
    return Verdict("group", "ok", f"all {num_hosts} hosts came", f"{address}:{port}")


def _compared(address: str, port: int, rank: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds that host 0's clock is ahead of ours, and a round trip to it: of the fastest of some rounds."""
    rounds = []
    with socket.create_connection((address, port), CONNECT_SECONDS) as there:
        there.sendall(_HELLO.pack(rank))
        for _ in range(ROUNDS):
            began, asked = time.monotonic(), clock()
            there.sendall(b"?")
            answer = there.recv(_TIME.size, socket.MSG_WAITALL)
            if len(answer) != _TIME.size:
                raise OSError(errno.EPROTO, "what listens there is no spanax doctor")
            trip = time.monotonic() - began
            rounds.append((trip, _TIME.unpack(answer)[0] - asked - trip / 2))
    trip, skew = min(rounds)
    return skew, trip


def _address_of(host: str) -> str | None:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return None


def _own_address() -> str | None:
    """This host's address on the way out; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        try:
            out.connect(("192.0.2.1", 9))  # reserved for documentation (RFC 5737)
        except OSError:
            return None
        return str(out.getsockname()[0])
