"""How a process joins those of its run, and what it says when it cannot."""

import os
import socket
import subprocess
import sys

import pytest

from spanax.errors import HostsError, SpanaxError
from spanax.run.hosts import Hosts, _bound_to, _check_free, _is_in_group

GROUP = {"SPANAX_COORDINATOR": "127.0.0.1:9911", "SPANAX_NUM_HOSTS": "4"}


def test_the_environment_says_who_it_is() -> None:
    assert Hosts.of({}) == Hosts()
    assert Hosts.of(GROUP | {"SPANAX_HOST": "3", "SPANAX_ATTEMPT": "2"}) == Hosts(4, 3, 2, "127.0.0.1:9911")
    assert Hosts.of(GROUP | {"SLURM_PROCID": "1"}).rank == 1
    assert Hosts.of(GROUP | {"SLURM_PROCID": "1", "SPANAX_HOST": "2"}).rank == 2
    assert Hosts.of({"SPANAX_HOST_DEVICES": "2"}).devices_per_host == 2


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        (GROUP, "SPANAX_HOST"),
        (GROUP | {"SPANAX_HOST": "4"}, "host 4"),
        (GROUP | {"SPANAX_HOST": "one"}, "'one'"),
        ({"SPANAX_COORDINATOR": "a:1", "SPANAX_HOST": "0"}, "SPANAX_NUM_HOSTS"),
        ({"SPANAX_ATTEMPT": "-1"}, "SPANAX_ATTEMPT"),
    ],
)
def test_an_environment_that_makes_no_sense(environ: dict[str, str], names: str) -> None:
    with pytest.raises(SpanaxError, match=names):
        Hosts.of(environ)


def test_the_coordinator_is_bound_to_one_interface() -> None:
    assert _bound_to("localhost:9911") == "127.0.0.1:9911"
    for wrong in ("9911", "nowhere.invalid:9911", "127.0.0.1:port"):
        with pytest.raises(SpanaxError, match="is not one"):
            _bound_to(wrong)


def test_a_port_that_is_taken_is_told_of() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(HostsError, match="cannot listen on"):
            _check_free(address)
        environ = {
            "SPANAX_COORDINATOR": address,
            "SPANAX_NUM_HOSTS": "2",
            "SPANAX_HOST": "0",
            "SPANAX_HOST_DEVICES": "1",
        }
        argv = [sys.executable, "-m", "spanax", "train", "gpt-nano", "--out", "never"]
        done = subprocess.run(argv, env=os.environ | environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == 70 and done.stderr.startswith("spanax: the coordinator cannot listen"), done.stderr
    _check_free(address)


def test_signs_of_a_group_that_jax_finds_by_itself() -> None:
    assert _is_in_group({"SLURM_STEP_NUM_TASKS": "2"}) and _is_in_group({"OMPI_COMM_WORLD_SIZE": "4"})
    assert _is_in_group({"TPU_WORKER_HOSTNAMES": "a,b"})
    assert not _is_in_group({"SLURM_STEP_NUM_TASKS": "1", "OMPI_COMM_WORLD_SIZE": "x", "TPU_WORKER_HOSTNAMES": "a"})
