"""Ray for real: a cluster of two nodes on this machine (`pip install 'spanax[ray]'`)."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.ranks import attempts, interpreter
from launch.slurm_cluster import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster of two nodes, one core each."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'spanax[ray]'")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        node = {"num_cpus": 1, "object_store_memory": 100 << 20}
        nodes = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        nodes.add_node(**node)
        yield nodes.address
        nodes.shutdown()


def launched(address: str, folder: Path, mode: str, *flags: str) -> subprocess.Popen[str]:
    flags = ("--address", address, "--hosts", "2", "--device", "cpu", "--devices-per-host", "2", *flags)
    python = interpreter(folder.parent, mode)
    words = [sys.executable, "-m", "spanax", "launch", "ray", *flags, "--python", python, "--", "train"]
    return subprocess.Popen(
        [*words, "--output-dir", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process: subprocess.Popen[str], timeout_seconds: float = 240) -> tuple[int, str]:
    try:
        _, errors = process.communicate(timeout=timeout_seconds)
    finally:
        process.kill()
    return process.returncode, errors


def test_jax_finds_its_group_and_listens_on_one_address(cluster: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, errors = ended(launched(cluster, folder, "group"))
    assert code == 0, errors + "".join(file.read_text() for file in (folder / "log").iterdir())
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1))
    for result in (first, second):
        assert (result["processes"], result["devices"], result["local_devices"]) == (2, 4, 2)
    assert (first["process"], second["process"]) == (0, 1)
    assert first["listening"] and not [item for item in first["listening"] if set(item.partition(":")[0]) == {"0"}]
    assert attempts(folder) == ["0 0 False", "0 1 False"]


def test_a_lost_rank_restarts_all_ranks(cluster: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, errors = ended(launched(cluster, folder, "killed"))
    assert code == 0, errors
    assert attempts(folder) == ["0 0 False", "0 1 False", "1 0 True", "1 1 True"]


def test_stuck_ranks_log_their_stacks_and_all_restart(cluster: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, errors = ended(launched(cluster, folder, "stuck", "--stuck-seconds", "2"))
    assert code == 0, errors
    assert attempts(folder) == ["0 0 False", "0 1 False", "1 0 True", "1 1 True"]
    for rank in (0, 1):
        assert "most recent call first" in (folder / "log" / f"rank{rank}.log").read_text()


def test_a_signal_to_the_driver_reaches_every_rank(cluster: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    driver = launched(cluster, folder, "preempted")
    wait_for(lambda: len(attempts(folder)) == 2, 240)
    time.sleep(0.5)
    driver.send_signal(signal.SIGTERM)
    assert ended(driver)[0] == 75
    assert attempts(folder) == ["0 0 False", "0 1 False"]


def test_a_killed_driver_stops_its_ranks(cluster: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    driver = launched(cluster, folder, "preempted")
    wait_for(lambda: len(attempts(folder)) == 2, 240)
    assert running(folder) == 2
    driver.kill()
    ended(driver)
    wait_for(lambda: running(folder) == 0, 240)


def test_two_ranks_train_gpt_nano(cluster: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = ("--address", cluster, "--hosts", "2", "--device", "cpu", "--devices-per-host", "2")
    train = ("train", "gpt-nano", "--steps", "3", "--output-dir", str(folder))
    done = subprocess.run([sys.executable, "-m", "spanax", "launch", "ray", *flags, "--", *train], timeout=240)
    reported = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [event["step"] for event in reported if event["event"] == "step"] == [1, 2, 3]
    assert done.returncode == 0 and reported[0]["devices"] == 4


def test_a_cluster_without_free_nodes_raises(cluster: str, tmp_path: Path) -> None:
    code, errors = ended(launched(cluster, tmp_path / "run", "bad", "--hosts", "3", "--wait-seconds", "2"))
    assert code == 2 and "has no room for 3" in errors and "Traceback" not in errors, errors


def test_a_missing_interpreter_on_the_nodes_is_reported(cluster: str, tmp_path: Path) -> None:
    flags = ("--address", cluster, "--device", "cpu", "--python", "/nowhere/python")
    words = [
        sys.executable,
        "-m",
        "spanax",
        "launch",
        "ray",
        *flags,
        "--",
        "train",
        "--output-dir",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2 and "/nowhere/python" in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_missing_cluster_raises(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'spanax[ray]'")
    code, errors = ended(launched("127.0.0.1:1", tmp_path / "run", "bad"))
    assert code == 2 and "there is no Ray cluster at '127.0.0.1:1'" in errors and "Traceback" not in errors, errors


def running(folder: Path) -> int:
    """How many processes are ranks of this run."""
    result = 0
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes()
        except OSError:
            continue
        result += b"rank.py" in words and bytes(folder) in words
    return result
