"""Frozen output of the command line: text and JSON of the verbs that need no devices, as digests."""

import re

import pytest

from frozen.digests import ROOT
from frozen.golden import compare
from spanax import cli

VARYING = re.compile(
    r'(?:priced in|after|checked in) [\d.]+ s|"(?:search_|trace_)?seconds": [\d.e-]+|"program_hash": "\w+"|\.py:\d+:\d+'
)
"""Elapsed times, lines of files, and the hash of a program whose locations contain the folder of the checkout."""

PLANS = ["gpt-nano --on h100:2x8", "moe-nano --on v5e:4x4", "llama3-8b --on h100:8x8", "resnet50 --on a100-80gb:8"]

COMMANDS = [
    *(f"plan {plan}{json}" for plan in PLANS for json in ("", " --json")),
    *(f"axes {plan.split()[0]}{json}" for plan in PLANS for json in ("", " --json")),
    *(f"check gpt-nano --on v5e:4x4 --level 1 --layout fsdp+tensor{json}" for json in ("", " --json")),
    "plan gpt-nano --on h100:8 --explain embed",
    "plan llama3-8b --on h100:8 --solve-for batch",
    "plan llama3-8b --on h100:8 --solve-for devices",
    "plan llama3-8b --on h100:32 --tokens 300e9 --budget-hours 500",
    "plan gpt-nano --on h100:8 --layout fsdp --diff data",
    "export-rules gpt-nano --mesh fsdp=4,model=2",
    "export-rules gpt-nano --mesh fsdp=4,model=2 --json",
]


def output(capsys: pytest.CaptureFixture[str], command: str) -> str:
    try:
        code: object = cli.main(command.split()) or 0
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    text = f"{code}\n{captured.out}\n{captured.err}".replace(str(ROOT), "ROOT")
    return VARYING.sub("", text)


@pytest.mark.slow
def test_output_is_frozen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    compare("cli", {"output": {command: output(capsys, command) for command in COMMANDS}})
