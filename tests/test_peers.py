"""Peers of a benchmark that did other work are not compared."""

import argparse
import importlib
import io
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import gpu
import gpu_programs
import start
from peers import __main__ as peers_main
from peers.__main__ import Peer
from peers.alike import differences

DONE = {"parameters": 1000, "tokens": 64, "flops": 1e9, "losses": [3.0, 2.5]}


def test_the_same_work_in_another_order_of_sums_is_the_same() -> None:
    assert differences({"a": DONE, "b": DONE | {"flops": 1.005e9, "losses": [3.0, 2.5001]}}) == {}


@pytest.mark.parametrize(
    ("other", "reported"),
    [
        ({"parameters": 1001}, "1,001 parameters, not 1,000"),
        ({"tokens": 32}, "32 tokens, not 64"),
        ({"flops": 1.1e9}, "1.1e+09 FLOPs a step, not 1e+09"),
        ({"losses": [3.0, 2.6]}, "loss 2.60000 in step 2, not 2.50000"),
        ({"losses": [3.0, math.nan]}, "loss nan in step 2, not 2.50000"),
    ],
)
def test_other_work_is_reported(other: dict[str, object], reported: str) -> None:
    assert differences({"a": DONE, "b": DONE | other}) == {"b": reported}


def test_the_benchmark_requires_a_gpu_without_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "accelerator", lambda: None)
    monkeypatch.setattr("sys.argv", ["gpu.py"])
    with pytest.raises(SystemExit, match="no GPU is here"):
        gpu.main()


def test_mfu_is_that_of_the_convention_and_the_catalogues_peak() -> None:
    shape = gpu.SIZES["gpt2"]
    peer = Peer(
        "a", cast(Any, None), io.StringIO(), {"versions": {}, "to_first_step_seconds": 1.0}, [0.1, 0.2, 0.3], [3.0]
    )
    (row,) = gpu.rows_of("gpt2", shape, [peer], gpu.peak_of("NVIDIA H200"))
    # 123.6M weights that multiply, and 12 x 12 x 768 x 1024 of attention, for each of 32 x 1024 tokens.
    assert row["mfu"] == pytest.approx(32 * 1024 * (6 * 123_568_128 + 113_246_208) / 0.2 / 989e12)


@pytest.mark.parametrize("other", [{"tokens": 32}, {"parameters": 7}, {"flops": 2e9}, {"losses": [3.0, 2.6]}])
def test_other_work_on_a_gpu_is_reported_but_not_rounding(other: dict[str, object]) -> None:
    assert gpu.other_work({"a": DONE, "b": DONE | {"losses": [3.0, 2.51]}}) == {}
    assert len(gpu.other_work({"a": DONE, "b": DONE | other})) == 1


@pytest.mark.slow
def test_the_tiny_gpu_benchmark_runs_on_a_cpu() -> None:
    command = [sys.executable, str(gpu.HERE / "gpu.py"), "--tiny", "--rounds", "2", "--only", "spanax"]
    reported = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert reported.returncode == 0 and "| tiny | spanax, scanned |" in reported.stdout, reported.stderr


def measured_peers(*names: str) -> list[Peer]:
    """Peers that were measured; the last of them has other parameters."""
    local = {"to_first_step_seconds": 1.0, "first_step_seconds": 1.0, "peak_bytes": 1, "devices": 1, "versions": {}}
    peers = [Peer(name, cast(Any, None), io.StringIO(), {**DONE, **local}, [0.1, 0.2], [3.0, 2.5]) for name in names]
    peers[-1].facts["parameters"] = 7
    return peers


def test_a_peer_with_other_work_has_no_ratio_and_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peers = measured_peers(peers_main.REFERENCE, "alike", "another")
    monkeypatch.setattr(Peer, "end", lambda _: None)
    monkeypatch.setattr(peers_main, "measure", lambda *_: (peers, {}))
    monkeypatch.setattr("sys.argv", ["peers"])
    with pytest.raises(SystemExit, match="not the same work as hand-written JAX, 1 device: another"):
        peers_main.main()
    reported = capsys.readouterr().out
    assert "| alike | 1.000" in reported and "| another | other work: 7 parameters, not 1,000 |" in reported


def test_a_gpu_peer_with_other_work_has_no_ratio(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(Peer, "end", lambda _: None)
    monkeypatch.setattr(gpu, "accelerator", lambda: "NVIDIA H200")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    first = measured_peers(gpu.HAND, gpu.OURS, gpu.TORCH)
    scanned = measured_peers("hand-written JAX, scanned", "another")[::-1]  # another reference: no ratio
    scanned[0].name, scanned[1].name = "hand-written JAX, scanned", "spanax, scanned"
    left = [first, scanned]
    monkeypatch.setattr(gpu, "measure", lambda *_: (left.pop(0), {}))
    monkeypatch.setattr("sys.argv", ["gpu.py", "--sizes", "gpt2", "--json", str(tmp_path / "rows.json")])
    with pytest.raises(SystemExit, match="hand-written JAX: gpt2, PyTorch compiled; gpt2, hand-written JAX, scanned"):
        gpu.main()
    reported = capsys.readouterr().out
    assert "| gpt2 | spanax | 1.000" in reported and "gpt2, PyTorch compiled | other work: 7 parameters" in reported
    assert "gpt2, spanax, scanned | nothing to hold it beside" in reported
    assert [row["peer"] for row in json.loads((tmp_path / "rows.json").read_text())["rows"]] == [gpu.HAND, gpu.OURS]


def test_requested_peers_are_measured_with_their_reference() -> None:
    first, scanned = gpu.GROUPS
    assert [*gpu.chosen(first, [])] == [*first] and [*gpu.chosen(first, ["Torch"])] == [gpu.HAND, gpu.TORCH]
    assert gpu.chosen(scanned, ["Torch"]) == {} and [*gpu.chosen(scanned, ["spanax"])] == [*scanned]


def test_one_round_is_the_median_and_no_round_raises() -> None:
    (item,) = measured_peers("a")
    item.seconds = [0.3]
    assert peers_main.quartiles(item, replace(item, seconds=[0.1])) == pytest.approx([3.0] * 3)
    assert peers_main.rounds("1") == 1
    with pytest.raises(argparse.ArgumentTypeError, match="0 rounds measure nothing"):
        peers_main.rounds("0")


def test_a_start_is_compared_with_starts_of_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    took = {"seconds": 1.5, "parameters": 7, "tokens": 64}
    monkeypatch.setattr(start, "PEERS", {start.REFERENCE: lambda caches: took, "b": lambda caches: took})
    assert start.measure(2)["b"] == {"cold": [1.5, 1.5], "warm": [1.5, 1.5]}
    monkeypatch.setitem(start.PEERS, "b", lambda caches: took | {"tokens": 32})
    with pytest.raises(SystemExit, match="not the same work"):
        start.measure(1)


def test_gpu_programs_with_other_matmuls_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    target = importlib.import_module("spanax.check.compilers.target")
    monkeypatch.setattr(target, "install_command", lambda platform: "")
    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", lambda *_, **__: SimpleNamespace(devices=[1]))
    monkeypatch.setattr("jax.sharding.Mesh", lambda *_, **__: None)
    monkeypatch.setattr(gpu_programs, "lowered_by_hand", lambda *_: 1.0)
    monkeypatch.setattr(gpu_programs, "lowered_by_spanax", lambda *_: 2.0)
    monkeypatch.setattr(gpu_programs, "facts", lambda flops: {"flops": flops})
    monkeypatch.setattr("sys.argv", ["gpu_programs.py", "--sizes", "tiny"])
    with pytest.raises(SystemExit, match="tiny: not the same work, 2 FLOPs and by hand 1"):
        gpu_programs.main()


PEER = """
import sys
print('{"loss": 1.0}', flush=True)
for line in sys.stdin:
    if line.strip() == "work":
        print('{"flops": 2.0}', flush=True)
    else:
        STEP
"""
STEP = """print('{"loss": 1.0, "seconds": 0.5, "peak_bytes": 1}', flush=True)"""


def test_a_peer_that_crashes_has_no_ratio(tmp_path: Path) -> None:
    words = {name: (str(tmp_path / f"{name}.py"),) for name in ("first", "dies", "last")}
    for name, (path,) in words.items():
        Path(path).write_text(PEER.replace("STEP", "sys.exit('out of memory')" if name == "dies" else STEP))
    peers, absent = peers_main.measure([*words], [], 3, words)
    assert [(item.name, item.seconds, item.facts["flops"]) for item in peers] == [
        ("first", [0.5] * 3, 2.0),
        ("last", [0.5] * 3, 2.0),
    ]
    assert absent == {"dies": "failed: out of memory"}
    for peer in peers:
        peer.end()
