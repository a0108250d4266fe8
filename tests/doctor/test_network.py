"""Networks that the doctor must object to: ports that are taken, hosts that are silent, clocks that differ."""

import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace

import pytest

from spanax.doctor import network
from spanax.doctor.verdict import Verdict
from spanax.errors import SpanaxError

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


def test_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    assert network.loopback().state == "ok"

    def refuse(*args: object) -> None:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", refuse)
    verdict = network.loopback()
    assert verdict.state == "problem" and "Network is unreachable" in verdict.what and "ip link" in verdict.fix


def test_the_coordinators_port() -> None:
    with listening() as port:
        taken = {"SPANAX_COORDINATOR": f"127.0.0.1:{port}"}
        verdict = network.coordinator(taken)
        assert (
            verdict.state == "problem"
            and f"port {port} of 127.0.0.1 is in use" in verdict.what
            and "ss -ltnp" in verdict.fix
        )
        assert network.coordinator(taken | {"SPANAX_HOST": "1"}).state == "ok"
    assert network.coordinator(taken).what == f"127.0.0.1:{port} is free; no other interface is used"
    verdict = network.coordinator(taken | {"SPANAX_NUM_HOSTS": "2"})
    assert verdict.state == "ok" and "only processes of this host can reach it" in verdict.what


def test_the_coordinators_address(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"SPANAX_COORDINATOR": f"{ELSEWHERE}:9911"}
    verdict = network.coordinator(there)
    assert verdict.state == "problem" and "is not an address of this host" in verdict.what
    assert network.coordinator(there | {"SPANAX_HOST": "3"}).state == "ok"
    monkeypatch.setattr(network, "_address_of", lambda host: None)
    verdict = network.coordinator(there)
    assert verdict.state == "problem" and "has no address" in verdict.what
    monkeypatch.setattr(network, "_address_of", lambda host: "127.0.1.1")
    monkeypatch.setattr(network, "_own_address", lambda: "10.0.0.7")
    assert "reach this one at 10.0.0.7, not by its name, which is 127.0.1.1 here" in network.coordinator({}).what


@pytest.mark.parametrize("address", ["10.0.0.7", ":80", "host:", "host:0", "host:65536", "host:http", "host:9²"])
def test_invalid_addresses_raise(address: str) -> None:
    with pytest.raises(SpanaxError, match="is not an address"):
        network.parse_address(address, "--hosts")


def test_a_reachable_host_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as port:
        verdict = network.reach(f"127.0.0.1:{port}")
        assert verdict.state == "ok" and f"127.0.0.1:{port} answers in" in verdict.what
        monkeypatch.setattr(network, "SLOW_SECONDS", 0.0)
        verdict = network.reach(f"127.0.0.1:{port}")
        assert verdict.state == "warning" and "every step waits" in verdict.what


def test_an_unreachable_host_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = network.reach(f"127.0.0.1:{free_port()}")
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


def join(address: str, num_hosts: int, rank: int, ahead: float = 0.0) -> Verdict:
    """The verdict of one host of a group, whose clock stands still, `ahead` of the others."""
    environ = {"SPANAX_COORDINATOR": address, "SPANAX_NUM_HOSTS": str(num_hosts), "SPANAX_HOST": str(rank)}
    verdict = network.group(environ, HANG_SECONDS, lambda: 1e9 + ahead)
    assert verdict is not None
    return verdict


def test_a_group_that_connects_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    # Round trips take no time, however busy the machine is.
    monkeypatch.setattr(network, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=time.sleep))
    address = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor() as pool:
        result = list(pool.map(partial(join, address, 4), range(4), (0.0, 0.0, -7.0, 7.0)))
    assert result[0].state == "ok" and "all 4 hosts connected" in result[0].what
    assert result[1].state == "ok" and re.search(r"its clock differs by [+-]0\.000 s", result[1].what)
    assert result[2].state == "warning" and "+7.0" in result[2].what and "timedatectl" in result[2].fix
    assert result[3].state == "warning" and "-7.0" in result[3].what


def test_a_missing_host_of_a_group_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(network, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    address = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor() as pool:
        leader = pool.submit(join, address, 3, 0)
        assert join(address, 3, 2).state == "ok"
        now[0] += 2 * HANG_SECONDS
        with suppress(ConnectionRefusedError):  # The leader waits for a connection, or has ended.
            socket.create_connection(("127.0.0.1", int(address.partition(":")[2]))).close()
        verdict = leader.result()
    assert verdict.state == "problem" and f"host 1 did not connect within {HANG_SECONDS} s" in verdict.what


def test_a_missing_coordinator_is_reported() -> None:
    environ = {"SPANAX_COORDINATOR": f"127.0.0.1:{free_port()}", "SPANAX_NUM_HOSTS": "2", "SPANAX_HOST": "1"}
    verdict = network.group(environ, 0.3)
    assert verdict is not None and verdict.state == "problem"
    assert "host 0 was not reached" in verdict.what and "firewall" in verdict.fix


def test_another_service_on_the_port_of_the_coordinator() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        stop = threading.Event()

        def talk() -> None:
            server.settimeout(0.05)
            while not stop.is_set():
                try:
                    other, _ = server.accept()
                except TimeoutError:
                    continue
                other.sendall(b"SSH")
                other.close()

        thread = threading.Thread(target=talk)
        thread.start()
        environ = {"SPANAX_COORDINATOR": f"127.0.0.1:{server.getsockname()[1]}", "SPANAX_NUM_HOSTS": "2"}
        verdict = network.group(environ | {"SPANAX_HOST": "1"}, 0.3)
        leader = network.group(environ | {"SPANAX_HOST": "0"}, 0.3)
        stop.set()
        thread.join()
    assert verdict is not None and verdict.state == "problem"
    assert leader is not None and leader.state == "problem" and "cannot listen" in leader.what


def test_a_stranger_does_not_stop_the_group() -> None:
    """Whoever connects and says nonsense, or nothing, is no host."""
    environ = {"SPANAX_COORDINATOR": f"127.0.0.1:{free_port()}", "SPANAX_NUM_HOSTS": "2"}
    port, result = int(environ["SPANAX_COORDINATOR"].split(":")[1]), []
    leader = threading.Thread(target=lambda: result.append(network.group(environ, 240.0)))
    leader.start()
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(b"GE")
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    assert network.group(environ | {"SPANAX_HOST": "1"}, 240.0).state == "ok"  # type: ignore[union-attr]
    leader.join(300)
    assert result[0].state == "ok"


def test_an_invalid_environment_raises() -> None:
    with pytest.raises(SpanaxError, match="does not define the rank of this host"):
        network.place({"SPANAX_HOST": "one"})
    assert network.place({"SLURM_PROCID": "3", "SPANAX_NUM_HOSTS": "4"}) == (3, 4)


def test_no_group() -> None:
    assert network.group({}, 1.0) is None
    assert network.group({"SPANAX_COORDINATOR": "127.0.0.1:1", "SPANAX_NUM_HOSTS": "1"}, 1.0) is None
