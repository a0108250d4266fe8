"""The variables of torchrun, and which variables come first."""

from dataclasses import replace
from typing import Any

import jax
import pytest

from spanax.errors import SpanaxError
from spanax.processes.processes import Hosts

TORCH = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234", "RANK": "5", "WORLD_SIZE": "8"}


def test_torchrun_describes_a_group() -> None:
    group = Hosts(8, 5, coordinator="127.0.0.1:1234", detects_cluster=False)
    assert Hosts.of({}) == Hosts.of({"LOCAL_RANK": "1"}) == Hosts()
    assert Hosts.of(TORCH) == group
    shared = TORCH | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert Hosts.of(shared) == replace(group, local_device=1)
    # One process on each machine has all of its devices.
    assert Hosts.of(TORCH | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}) == group
    # The store of torchrun's agent listens on MASTER_PORT.
    agent = Hosts.of(TORCH | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert agent.coordinator == "127.0.0.1:1235"
    # Scripts for Slurm export an address for PyTorch, and take the rank from Slurm.
    assert Hosts.of({"MASTER_ADDR": "n0", "MASTER_PORT": "1234", "SLURM_PROCID": "1"}) == Hosts()


@pytest.mark.parametrize("missing", TORCH)
def test_an_incomplete_group_raises(missing: str) -> None:
    environ = {name: value for name, value in TORCH.items() if name != missing}
    with pytest.raises(SpanaxError, match=f"but {missing} not"):
        Hosts.of(environ)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": "8"}, "RANK=8, WORLD_SIZE=8"),
        ({"LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "4"}, "LOCAL_RANK=4, LOCAL_WORLD_SIZE=4"),
        ({"RANK": "first"}, "RANK is 'first'"),
        ({"RANK": "²"}, "RANK is '²'"),
        ({"RANK": "9" * 5000}, "RANK is '9{80}'"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is ''"),
    ],
)
def test_contradictions_raise(changed: dict[str, str], message: str) -> None:
    with pytest.raises(SpanaxError, match=message):
        Hosts.of(TORCH | changed)


def test_our_variables_come_first() -> None:
    ours = {"SPANAX_COORDINATOR": "127.0.0.1:9911", "SPANAX_NUM_HOSTS": "2", "SPANAX_HOST": "1"}
    assert Hosts.of(TORCH | ours) == Hosts.of(ours)
    assert Hosts.of(TORCH | {"SPANAX_NUM_HOSTS": "1"}) == Hosts(detects_cluster=False)
    # `launch local --processes 1` sets the rank only.
    assert Hosts.of(TORCH | {"SPANAX_HOST": "0"}).rank == 5


def test_a_process_of_torchrun_joins_with_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **options: calls.append(options))
    monkeypatch.setattr("spanax.processes.processes.has_backend", lambda: False)
    monkeypatch.setattr("spanax.processes.processes.exit_on_error", lambda: None)
    Hosts.of(TORCH | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}).join()
    (options,) = calls
    assert (options["coordinator_address"], options["num_processes"], options["process_id"]) == ("127.0.0.1:1234", 8, 5)
    # Otherwise JAX's detection of Slurm or Open MPI would choose the device.
    assert (options["local_device_ids"], options["cluster_detection_method"]) == ([1], "deactivate")
    Hosts.of(TORCH | {"WORLD_SIZE": "1", "RANK": "0"}).join()
    assert len(calls) == 1
