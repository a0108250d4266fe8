"""Events can be read from intact and damaged files."""

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from spanax.entries.names import EVENTS
from spanax.train.record.events import KINDS, MAX_EVENTS, Begin, Events, read
from spanax.train.record.time_account import account, reached


def test_an_incomplete_line_does_not_affect_the_next(tmp_path: Path) -> None:
    events = Events(tmp_path)
    events.append("begin", step=0)
    with open(tmp_path / EVENTS, "ab") as file:
        file.write(b'{"event": "sa')
    events.append("end", step=7)
    assert [event["event"] for event in read(tmp_path).records] == ["begin", "end"]


def test_a_removed_folder_does_not_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Events(tmp_path / "gone").append("end", step=7)
    assert "cannot write" in capsys.readouterr().err and read(tmp_path / "gone").records == []


def test_damaged_or_newer_events_are_counted(tmp_path: Path) -> None:
    """A line that is being written is neither."""
    Events(tmp_path).append("begin", step=3, more={"of": "a newer version"})
    lies = [
        b"7", b"[1]", b"{}", b'{"event": []}', b'{"event": "died"}', b'{"event": "died", "time": null}',
        b'{"event": "died", "time": 1e999}', b'{"event": "died", "time": NaN}',
        b'{"event": "begin", "time": 1, "step": -1}', b'{"event": "died", "time": ' + b"9" * 400 + b"}",
        b'{"event": "ledger", "time": 1, "step": 1, "seconds": {}, "wall_seconds": 1}', b"\xff\xfe", b"[" * 100_000,
        b'{"event": "died", "time": 1, "x": "' + b"x" * (1 << 20) + b'"}',
    ]  # fmt: skip
    newer = [b'{"event": "sealed", "time": 1}', b'{"event": "sealed"}', b'{"event": "\\u001b[2J"}']
    with open(tmp_path / EVENTS, "ab") as file:
        file.write(b"\n".join([*lies, *newer, b""]) + b'{"event": "en')
    page = read(tmp_path)
    assert [event.event for event in page.events] == ["begin"] and page.num_damaged == len(lies)
    assert page.unknown == {"sealed": 2, "\x1b[2J": 1}
    assert isinstance(page.events[0], Begin) and page.events[0].step == 3
    assert page.records[0]["more"] == {"of": "a newer version"}


def test_every_kind_that_is_written_can_be_read(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        Events(tmp_path).append("sealed")
    for kind in KINDS:
        Events(tmp_path).append(kind, step=1, seconds={"step": 1}, wall_seconds=1)
    assert read(tmp_path).num_damaged == 1  # the silence of a `stuck` is a number
    assert len(read(tmp_path).events) == len(KINDS) - 1


def test_the_last_of_many_events_are_read_in_bounded_memory(tmp_path: Path) -> None:
    line = b'{"event": "skipped", "time": 9, "by": "rank 0", "reason": "%s"}\n' % (b"x" * 250)
    with open(tmp_path / EVENTS, "wb") as file:
        file.truncate(1 << 40)
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + line * (2 * EVENTS.max_bytes // len(line)))
    Events(tmp_path).append("ledger", time=11, step=7, seconds={"step": 5}, wall_seconds=5)
    tracemalloc.start()
    log = read(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()
    assert len(log.events) == MAX_EVENTS and log.is_tail and not log.num_damaged
    times = account(tmp_path)  # although the `begin` event is not among them
    assert times.is_tail and times.reached == reached(tmp_path) == 7


WRITE = """
import sys
from pathlib import Path
from spanax.train.record.events import Events
for number in range(200):
    Events(Path(sys.argv[1]), by=sys.argv[2]).append("bad_step", number=number, long="x" * 5000)
"""


def test_lines_of_two_processes_never_mix(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITE, str(tmp_path), by]) for by in ("rank 0", "supervisor")]
    assert [writer.wait(240) for writer in writers] == [0, 0]
    results = [(event["by"], event["number"]) for event in read(tmp_path).records]
    assert len(results) == 400
