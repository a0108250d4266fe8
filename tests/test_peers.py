"""Peers of a benchmark that did other work are not compared."""

import math
import subprocess
import sys
from typing import Any, cast

import pytest

import gpu
from peers import __main__ as peers_main
from peers.__main__ import Peer
from peers.alike import differences

DONE = {"parameters": 1000, "tokens": 64, "flops": 1e9, "losses": [3.0, 2.5]}


def test_the_same_work_in_another_order_of_sums_is_the_same() -> None:
    assert differences({"a": DONE, "b": DONE | {"flops": 1.005e9, "losses": [3.0, 2.5001]}}) == {}


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"parameters": 1001}, "1,001 parameters, not 1,000"),
        ({"tokens": 32}, "32 tokens, not 64"),
        ({"flops": 1.1e9}, "1.1e+09 FLOPs a step, not 1e+09"),
        ({"losses": [3.0, 2.6]}, "loss 2.60000 in step 2, not 2.50000"),
        ({"losses": [3.0, math.nan]}, "loss nan in step 2, not 2.50000"),
    ],
)
def test_other_work_is_told(other: dict[str, object], told: str) -> None:
    assert differences({"a": DONE, "b": DONE | other}) == {"b": told}


def test_a_gpu_is_asked_for_unless_a_toy_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "accelerator", lambda: None)
    monkeypatch.setattr("sys.argv", ["gpu.py"])
    with pytest.raises(SystemExit, match="no GPU is here"):
        gpu.main()


def test_mfu_is_that_of_the_convention_and_the_catalogues_peak() -> None:
    shape = gpu.SIZES["gpt2"]
    peer = Peer("a", cast(Any, None), {"versions": {}, "to_first_step_seconds": 1.0}, [0.1, 0.2, 0.3], [3.0])
    (row,) = gpu.rows_of("gpt2", shape, [peer], gpu.peak_of("NVIDIA H200"))
    # 123.6M weights that multiply, and 12 x 12 x 768 x 1024 of attention, for each of 32 x 1024 tokens.
    assert row["mfu"] == pytest.approx(32 * 1024 * (6 * 123_568_128 + 113_246_208) / 0.2 / 989e12)


@pytest.mark.parametrize("other", [{"tokens": 32}, {"parameters": 7}, {"flops": 2e9}, {"losses": [3.0, 2.6]}])
def test_other_work_on_a_gpu_is_told_and_rounding_is_not(other: dict[str, object]) -> None:
    assert gpu.other_work({"a": DONE, "b": DONE | {"losses": [3.0, 2.51]}}) == {}
    assert len(gpu.other_work({"a": DONE, "b": DONE | other})) == 1


@pytest.mark.slow
def test_the_toy_runs_here() -> None:
    command = [sys.executable, str(gpu.HERE / "gpu.py"), "--tiny", "--rounds", "2", "--only", "spanax"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert told.returncode == 0 and "| tiny | spanax, scanned |" in told.stdout, told.stderr


def test_a_peer_that_does_other_work_gets_no_ratio_and_the_end_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = DONE | {
        "to_first_step_seconds": 1.0,
        "first_step_seconds": 1.0,
        "peak_bytes": 1,
        "devices": 1,
        "versions": {},
    }
    names = (peers_main.REFERENCE, "alike", "another")
    made = [Peer(name, cast(Any, None), {**facts}, [0.1, 0.2], [3.0, 2.5]) for name in names]
    made[2].facts["parameters"] = 7
    monkeypatch.setattr(Peer, "end", lambda _: None)
    monkeypatch.setattr(peers_main, "measure", lambda *_: (made, {}))
    monkeypatch.setattr("sys.argv", ["peers"])
    with pytest.raises(SystemExit, match="not the same work as hand-written JAX, 1 device: another"):
        peers_main.main()
    told = capsys.readouterr().out
    assert "| alike | 1.000" in told and "| another | other work: 7 parameters, not 1,000 |" in told
