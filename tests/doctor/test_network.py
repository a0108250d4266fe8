"""Networks that the doctor must object to: ports that are taken, hosts that are silent."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest

from spanax.doctor import network
from spanax.doctor.machine import Verdict
from spanax.errors import SpanaxError
from spanax.processes.processes import Hosts

ELSEWHERE = "198.51.100.7"
"""An address for documentation: no host has it."""

HANG_SECONDS = 240


@contextmanager
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def free_port() -> int:
    with listening() as port:
        return port


def joined(address: str, num_hosts: int = 2, rank: int = 0, timeout: float = HANG_SECONDS) -> Verdict:
    """The verdict of one host of a group."""
    return network.group(Hosts(num_hosts, rank, coordinator=address), timeout)


def test_the_coordinators_port() -> None:
    with listening() as port:
        verdict = joined(f"127.0.0.1:{port}")
        assert verdict.state == "problem" and "ss -ltnp" in verdict.fix
        assert f"port {port} of 127.0.0.1 is in use" in verdict.what
    verdict = joined(f"127.0.0.1:{port}", num_hosts=1)
    assert verdict.state == "ok" and verdict.what == f"127.0.0.1:{port} is free; no other interface is used"


def test_the_coordinators_address(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = joined(f"{ELSEWHERE}:9911")
    assert verdict.state == "problem" and "is not an address of this host" in verdict.what
    monkeypatch.setattr(network, "_address_of", lambda host: None)
    verdict = joined("nowhere:9911", rank=1)
    assert verdict.state == "problem" and "has no address" in verdict.what


@pytest.mark.parametrize("address", ["10.0.0.7", ":80", "host:", "host:0", "host:65536", "host:http", "host:9²"])
def test_invalid_addresses_raise(address: str) -> None:
    with pytest.raises(SpanaxError, match="is not an address"):
        network.parse_address(address, "--hosts")


def test_other_hosts_are_reached_or_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as port:
        verdict = network.reach(f"127.0.0.1:{port}")
        assert verdict.state == "ok" and verdict.what == f"127.0.0.1:{port} answers"
    verdict = network.reach(f"127.0.0.1:{port}")
    assert verdict.state == "warning" and "nothing listens on its port" in verdict.what
    monkeypatch.setattr(network, "CONNECT_SECONDS", 0.2)
    with socket.socket() as server:
        # A server that accepts no connection does not answer when its queue is full, like a firewall.
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        port = server.getsockname()[1]
        waiting = [socket.socket() for _ in range(4)]
        for thread in waiting:
            thread.setblocking(False)
            thread.connect_ex(("127.0.0.1", port))
        verdict = network.reach(f"127.0.0.1:{port}")
        for thread in waiting:
            thread.close()
    assert verdict.state == "problem" and "nothing within 0.2 s" in verdict.what and "firewall" in verdict.fix
    monkeypatch.setattr(network, "_address_of", lambda host: None)
    assert "'nowhere' has no address" in network.reach("nowhere:80").what


def test_a_group_that_connects_passes() -> None:
    address = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor() as pool:
        first, *others = pool.map(lambda rank: joined(address, 4, rank), range(4))
    assert first.state == "ok" and f"all 4 hosts connected to {address}" in first.what
    assert [(other.state, other.what) for other in others] == [("ok", "host 0 answers")] * 3


def test_a_missing_host_of_a_group_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(network, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    address = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor() as pool:
        first = pool.submit(joined, address, 3, 0)
        assert joined(address, 3, 2).state == "ok"
        now[0] += 2 * HANG_SECONDS
        with suppress(ConnectionRefusedError):  # The first host waits for a connection, or has ended.
            socket.create_connection(("127.0.0.1", int(address.partition(":")[2]))).close()
        verdict = first.result()
    assert verdict.state == "problem" and f"host 1 did not connect within {HANG_SECONDS} s" in verdict.what


def test_a_missing_coordinator_is_reported() -> None:
    verdict = joined(f"127.0.0.1:{free_port()}", rank=1, timeout=0.3)
    assert verdict.state == "problem" and "host 0 was not reached" in verdict.what and "firewall" in verdict.fix


def test_another_service_on_the_port_of_the_coordinator() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        stop = threading.Event()

        def talk() -> None:
            server.settimeout(0.05)
            while not stop.is_set():
                with suppress(TimeoutError):
                    other, _ = server.accept()
                    with other:
                        other.sendall(b"SSH")

        thread = threading.Thread(target=talk)
        thread.start()
        verdict = joined(f"127.0.0.1:{server.getsockname()[1]}", rank=1, timeout=0.3)
        stop.set()
        thread.join()
    assert verdict.state == "problem" and "host 0 was not reached" in verdict.what


def test_a_stranger_does_not_stop_the_group() -> None:
    """Whoever connects and says nonsense, or nothing, is no host."""
    port = free_port()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(joined, f"127.0.0.1:{port}")
        deadline = time.monotonic() + HANG_SECONDS
        while time.monotonic() < deadline:
            try:
                with socket.create_connection(("127.0.0.1", port)) as stranger:
                    stranger.sendall(b"GE")
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
        assert joined(f"127.0.0.1:{port}", rank=1).state == "ok"
        assert first.result().state == "ok"


def test_no_group() -> None:
    assert network.group(Hosts(), 1.0).state == "ok"
