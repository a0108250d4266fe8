"""Events: what is told can be read, whatever befell the file."""

import subprocess
import sys
from pathlib import Path

import pytest

from spanax.entries.names import EVENTS
from spanax.run.record.events import Events, read


def test_half_a_line_does_not_take_the_next_with_it(tmp_path: Path) -> None:
    events = Events(tmp_path)
    events.tell("begin", step=0)
    with open(tmp_path / EVENTS, "ab") as file:
        file.write(b'{"event": "sa')
    events.tell("end", step=7)
    assert [event["event"] for event in read(tmp_path)] == ["begin", "end"]


def test_a_folder_that_is_gone_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Events(tmp_path / "gone").tell("end", step=7)
    assert "cannot write" in capsys.readouterr().err and read(tmp_path / "gone") == []


WRITE = """
import sys
from pathlib import Path
from spanax.run.record.events import Events
for number in range(200):
    Events(Path(sys.argv[1]), by=sys.argv[2]).tell("step", number=number, long="x" * 5000)
"""


def test_lines_of_two_processes_never_mix(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITE, str(tmp_path), by]) for by in ("rank 0", "supervisor")]
    assert [writer.wait(240) for writer in writers] == [0, 0]
    found = [(event["by"], event["number"]) for event in read(tmp_path)]
    assert len(found) == 400
