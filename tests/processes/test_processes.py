"""How a process joins those of its run, and what it says when it cannot."""

import json
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest

from spanax.errors import HostsError, SpanaxError
from spanax.processes.processes import Hosts, _bound_to, _check_free, bind_data_sockets, detected_processes
from spanax.train import trainer
from spanax.train.record.telemetry import open_telemetry

GROUP = {"SPANAX_COORDINATOR": "127.0.0.1:9911", "SPANAX_NUM_HOSTS": "4"}


def test_the_environment_defines_rank_and_group() -> None:
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
def test_a_contradictory_environment_raises(environ: dict[str, str], names: str) -> None:
    with pytest.raises(SpanaxError, match=names):
        Hosts.of(environ)


def test_the_coordinator_is_bound_to_one_interface() -> None:
    assert _bound_to("localhost:9911") == "127.0.0.1:9911"
    for wrong in ("9911", "nowhere.invalid:9911", "127.0.0.1:port"):
        with pytest.raises(SpanaxError, match="is invalid"):
            _bound_to(wrong)


def test_a_port_in_use_raises() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(HostsError, match="cannot listen on"):
            _check_free(address)
        environ = GROUP | {"SPANAX_COORDINATOR": address, "SPANAX_HOST": "0", "SPANAX_HOST_DEVICES": "1"}
        argv = [sys.executable, "-m", "spanax", "train", "gpt-nano", "--output-dir", "never"]
        done = subprocess.run(argv, env=os.environ | environ, capture_output=True, text=True, timeout=240)
        assert done.returncode == 70 and done.stderr.startswith("spanax: the coordinator cannot listen"), done.stderr
    _check_free(address)


SLURM = {
    "SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "2", "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911", "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}  # fmt: skip
GKE = {"TPU_WORKER_HOSTNAMES": "a,b,c", "TPU_WORKER_ID": "0", "MEGASCALE_NUM_SLICES": "2"}


def detected(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> int:
    """The processes that JAX detects in an environment."""
    for name in {*SLURM, *OPEN_MPI, *GKE, "SLURM_STEP_NUM_TASKS", "KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"}:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return detected_processes.__wrapped__()


def test_jax_detects_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    assert detected(monkeypatch, {}) == 1
    assert detected(monkeypatch, SLURM) == 2
    assert detected(monkeypatch, OPEN_MPI) == 4
    # A shell in an allocation of two tasks is a step of one.
    assert detected(monkeypatch, SLURM | {"SLURM_STEP_NUM_TASKS": "1"}) == 1
    # A pod that is not of an Indexed Job, which JAX cannot join.
    assert detected(monkeypatch, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == 1
    # Names of TPU workers count on a TPU VM only.
    assert detected(monkeypatch, GKE) == 1


def test_jax_detects_tpu_pods(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    from jax._src.clusters import cloud_tpu_cluster

    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    # With "cpu" devices are simulated on one worker.
    request.addfinalizer(partial(jax.config.update, "jax_platforms", jax.config.jax_platforms))
    jax.config.update("jax_platforms", "cpu")
    assert detected(monkeypatch, GKE) == 1
    jax.config.update("jax_platforms", "tpu,cpu")
    assert detected(monkeypatch, GKE) == 6
    assert detected(monkeypatch, GKE | {"TPU_WORKER_HOSTNAMES": "localhost", "MEGASCALE_NUM_SLICES": "1"}) == 1
    metadata = {"agent-worker-number": "1", "worker-network-endpoints": "0:0:10.0.0.1,1:1:10.0.0.2"}
    monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", lambda key: (metadata[key], 200))
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    assert detected(monkeypatch, {"MEGASCALE_NUM_SLICES": "1"}) == 2


@pytest.mark.parametrize(("ours", "method"), [("SPANAX_HOST", "deactivate"), ("SLURM_PROCID", None)])
def test_a_group_inside_a_cluster_uses_its_devices(
    monkeypatch: pytest.MonkeyPatch, ours: str, method: str | None
) -> None:
    """JAX's detection gives a Slurm task one GPU, also where each task is a launcher of several processes."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **options: calls.append(options))
    monkeypatch.setattr("spanax.processes.processes.has_backend", lambda: False)
    for name in ("SPANAX_HOST", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(ours, "1")
    environ = {"SPANAX_COORDINATOR": "127.0.0.1:9911", "SPANAX_NUM_HOSTS": "2", ours: "1"}
    Hosts.of(environ).join()
    assert [call.get("cluster_detection_method") for call in calls] == [method]


def test_a_cluster_of_unknown_size_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HostsError, match="cannot read its size"):
        detected(monkeypatch, SLURM | {"SLURM_NTASKS": "many"})
    # Open MPI 5: JAX 0.10.2 does not detect it, later ones ask mpi4py, which is not installed.
    with pytest.raises(HostsError, match="mpirun started 4 processes|cannot read its size"):
        detected(monkeypatch, {name: value for name, value in OPEN_MPI.items() if "orte" not in name})


def test_processes_of_a_cluster_may_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Hosts.of({"SPANAX_NUM_HOSTS": "1"})
    monkeypatch.setattr("spanax.processes.processes.detected_processes", lambda: 2)
    alone.join()
    with pytest.raises(HostsError, match="group of 2"):
        jax.devices() and Hosts.of({}).join()


SCRIPT = """
import json, sys
import jax, numpy as np, optax
from flax import nnx
import spanax
from spanax.processes.ports import open_ports

first = sys.argv[1]
rows = [np.full(16, i, "float32") for i in range(16)]
program = spanax.trace(
    build=lambda rngs: nnx.Linear(16, 32, rngs=rngs),
    optimizer=optax.sgd(0.001),
    batch={"x": jax.ShapeDtypeStruct((8, 16), "float32")},
    loss=lambda model, batch: (model(batch["x"]) ** 2).mean(),
)
if first == "array":
    jax.numpy.ones(1)
cluster = spanax.local() if first == "local" else spanax.cluster("cpu:4")
run = spanax.start(program, spanax.plan(program, cluster, layout="fsdp"))
losses = [float(run.step(batch)["loss"]) for batch in spanax.batches([{"x": row} for row in rows], run.plan)]
print(json.dumps({"processes": jax.process_count(), "devices": cluster.num_devices, "losses": losses}))
print(json.dumps(open_ports()))
"""

NAMED = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"')
"""Runs a command on a machine of another name."""


def started(environ: dict[str, str], first: str, *within: str) -> "subprocess.Popen[str]":
    """A library program whose first call that needs devices is `first`."""
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "SPANAX_HOST_DEVICES": "2"} | environ
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*within, sys.executable, "-c", SCRIPT, first], env=environ, **pipes)


def test_a_library_program_joins_its_group() -> None:
    """Also where the machine's name resolves to no address; nothing listens but on the coordinator's interface."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"SPANAX_COORDINATOR": f"127.0.0.1:{free.getsockname()[1]}", "SPANAX_NUM_HOSTS": "2"}
    within = (*NAMED, "nowhere.invalid")
    if subprocess.run([*within, "true"], capture_output=True).returncode:
        within = ()  # only root can rename a machine
    pairs = enumerate(("local", "start"))
    processes = [started(group | {"SPANAX_HOST": str(rank)}, first, *within) for rank, first in pairs]
    texts = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], texts
    results = [json.loads(out.splitlines()[-2]) for out, _ in texts]
    assert results[0] == results[1] and len(results[0]["losses"]) == 2, results
    assert (results[0]["processes"], results[0]["devices"]) == (2, 4), results
    listens = [json.loads(out.splitlines()[-1]) for out, _ in texts]
    # The first one also has the coordinator.
    assert len(listens[0]) > len(listens[1]) >= 1, listens
    assert {item.rpartition(":")[0] for both in listens for item in both} == {"127.0.0.1"}, listens


SLOW = """
import time
import jax
delays = [40]
def delay(event, seconds, **given):
    if "backend_compile" in event and delays:
        time.sleep(delays.pop())
jax.monitoring.register_event_duration_secs_listener(delay)
"""


@pytest.mark.slow
def test_processes_wait_for_one_that_compiles_longer_than_gloo_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"SPANAX_COORDINATOR": f"127.0.0.1:{free.getsockname()[1]}", "SPANAX_NUM_HOSTS": "2"}
    processes = [started(group | {"SPANAX_HOST": "0"}, "local")]
    monkeypatch.setattr(sys.modules[__name__], "SCRIPT", SLOW + SCRIPT)
    processes.append(started(group | {"SPANAX_HOST": "1"}, "local"))
    texts = [process.communicate(timeout=400) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], texts


def test_a_network_interface_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src import distributed, xla_bridge

    built: dict[str, Any] = {}
    monkeypatch.setattr(distributed.global_state, "client", object())
    monkeypatch.setattr(distributed.global_state, "coordinator_address", "127.0.0.1:9911")
    monkeypatch.setattr("spanax.processes.processes.has_backend", lambda: False)
    monkeypatch.setattr(
        "jax.extend.backend.register_backend_factory", lambda name, factory, **_: built.update({name: factory})
    )
    monkeypatch.setattr(xla_bridge, "make_cpu_client", lambda collectives: collectives)
    monkeypatch.setattr("jaxlib._jax.make_gloo_tcp_collectives", lambda distributed_client, **place: place)
    bind_data_sockets({})
    assert built["cpu"]() == {"hostname": "127.0.0.1"}
    bind_data_sockets({"SPANAX_INTERFACE": "lo"})
    assert built["cpu"]() == {"interface": "lo"}
    with pytest.raises(SpanaxError, match="unknown network interface 'l0'"):
        bind_data_sockets({"SPANAX_INTERFACE": "l0"})
    monkeypatch.setattr(distributed.global_state, "coordinator_address", "nowhere.invalid:9911")
    with pytest.raises(HostsError, match="cannot listen on its address towards the coordinator"):
        bind_data_sockets({})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (GROUP | {"SPANAX_HOST": "1"}, "JAX started before this process joined its group of 4"),
        ({"SPANAX_NUM_HOSTS": "2"}, "SPANAX_NUM_HOSTS is 2, but SPANAX_COORDINATOR is not set"),
        (SLURM, "JAX started before this process joined its group of 2"),
    ],
    ids=["joined too late", "no coordinator", "detected too late"],
)
def test_a_library_program_never_trains_alone_in_a_group(environ: dict[str, str], message: str) -> None:
    process = started(environ, "array")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 1 and message in err, (out, err)


def test_a_port_on_all_interfaces_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    events: list[dict[str, Any]] = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(trainer, "is_first", lambda: False)
    with (
        socket.create_server(("0.0.0.0", 0)) as server,
        open_telemetry(tmp_path, rank=0, attempt=0, emit=events.append) as telemetry,
    ):
        trainer._warn_of_public_ports(telemetry)
        address = f"0.0.0.0:{server.getsockname()[1]}"
    assert [event["event"] for event in events] == ["warning"] and address in events[0]["message"]
    assert address in capsys.readouterr().err
