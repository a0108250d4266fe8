"""The command line: its surface, and what it says to bad input."""

import ast
import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import golden_messages
from followed import followed
from requested import flag_names
from sampling import sampled
from spanax import cli
from spanax.commands import train
from spanax.commands.answer import Answer
from spanax.errors import SpanaxError
from spanax.sealed import sealed
from spanax.train.config import TrainConfig
from spanax.train.record.folder import write_records
from spanax.train.store import manifest

GOLDEN = Path(__file__).parent / "golden" / "cli_errors.txt"

RECIPE = {"ema", "lora", "max_grad_norm", "optimizer", "schedule", "warmup_steps", "weight_decay"}
FLAGS = {
    "train": {
        "accept_changed_model", "accumulate", "attention", "chat_template", "config", "data", "devices", "dtype",
        "eval_batches", "eval_every", "field", "global_batch_size", "init", "init_partial", "json", "keep_last",
        "layout", "log_every", "loss_chunks", "learning_rate", "max_bad_steps", "mesh", "microbatches", "on_bad_step",
        "optimizer_state", "quantize",
        "output_dir", "pipeline_schedule", "plan", "profile", "remat", "resume", "save_every", "seed", "seq_len",
        "spike_factor", "steps", "steps_per_call", "tokenizer", "traceback", "track", "virtual_stages", "workload",
        "xla_flags",
        "num_epochs", "offload", "pad", "sample_every", "sample_prompts", *RECIPE,
    },
    "generate": {
        "chat", "checkpoint", "json", "layout", "dtype", "max_new_tokens", "mesh", "min_p", "num_samples", "prompt",
        "prompts", "repetition_penalty", "seed", "stop", "temperature", "top_k", "top_p", "traceback", "workload",
    },
    "evaluate": {
        "chat", "checkpoint", "json", "layout", "limit", "mesh", "seed", "tasks", "traceback", "workload",
    },
    "models": {"json", "name"},
    "axes": {"embed", "global_batch_size", "json", "layers", "seq_len", "traceback", "workload"},
    "check": {
        "accumulate", "attention", "cache", "codegen", "collectives", "dtype", "embed", "explain_collective",
        "fail_on", "global_batch_size", "inputs_only", "json", "layers", "layout", "level", "loss_chunks", "mesh",
        "microbatches", "on", "optimizer_state", "out", "parity", "pipeline_schedule", "plan", "profiled", "remat",
        "seq_len", "steps", "timeout", "traceback", "virtual_stages", "workload",
        "offload", "pad", "quantize", *RECIPE,
    },
    "compare": {
        "all", "devices", "dtype", "embed", "global_batch_size", "json", "layers", "mesh", "on", "seq_len", "steps",
        "top", "traceback", "workload",
    },
    "inspect": {"hlo", "json", "leaf", "path", "schedule", "svg", "traceback", "workload"},
    "checkpoint": {"action", "directory", "json"},
    "plan": {
        "accumulate", "attention", "budget_hours", "calibrate", "compile", "diff", "dtype", "embed", "examples",
        "explain", "generate", "global_batch_size", "html", "json", "layers", "layout", "loss_chunks", "mesh",
        "microbatches", "no_pipeline", "on", "optimizer_state", "out", "out_cluster", "pipeline", "pipeline_schedule",
        "price", "remat", "save_seconds", "seq_len", "solve_for", "target_mfu", "tokens", "top", "traceback",
        "virtual_stages", "why", "workload", "offload", "pad", "quantize", *RECIPE,
    },
    "probe": {"devices", "out", "seconds"},
    "report": {"json", "out", "run"},
    "doctor": {"hosts", "json", "output_dir", "timeout"},
    "import": {
        "base", "dry_run", "dtype", "into", "json", "kind", "map", "output_dir", "source", "traceback",
    },  # fmt: skip
    "export": {
        "checkpoint", "dtype", "file_size", "json", "kind", "merge", "output_dir", "traceback", "workload",
    },
    "export-rules": {"global_batch_size", "json", "layout", "mesh", "seq_len", "traceback", "workload"},
}  # fmt: skip


def test_the_surface_is_frozen() -> None:
    assert {name: flag_names(verb.flags) for name, verb in cli.COMMANDS.items() if name != "launch"} == FLAGS


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    try:
        cli.main(args)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    out, err = capsys.readouterr()
    return code, out, err


def test_axes_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "axes", "gpt-nano", "--json")
    data = json.loads(out)
    assert code == 0 and data["unknown"] == {} and data["coverage"] == 1.0
    names = {axis["name"] for axis in data["axes"]}
    assert {"batch", "seq", "embed", "mlp", "heads", "vocab", "layers"} <= names
    by_path = {leaf["path"]: leaf["axes"] for leaf in data["leaves"]}
    assert by_path["inputs"] == ["batch", "seq"] and by_path["embed"] == ["vocab", "embed"]


def test_axes_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "axes", "gpt-nano", "--global-batch-size", "4")
    assert code == 0 and out.startswith("axis") and "vocab" in out


BAD: dict[str, tuple[int, str]] = {
    "unknown workload": (2, "train gpt-nan"),
    "a workload without data": (2, "train resnet50"),
    "a length that is none": (2, "axes resnet50 --seq-len 8"),
    "unknown file": (2, "train nowhere.py:x"),
    "unknown layout": (2, "train --layout fdsp"),
    "no layout, over a file": (2, "train --config layout.toml --layout None"),
    "unknown axis": (2, "train --mesh dta=8"),
    "mesh of another size": (2, "train --mesh data=4"),
    "a layout of an axis that is none": (2, "plan gpt-nano --on h100:8 --layout expert"),
    "a layout that divides one example": (2, "plan gpt-nano --on cpu:8 --layout context --global-batch-size 1"),
    "mesh that is no mesh": (2, "train --mesh 4x2"),
    "mesh of nothing": (2, "train --mesh data=0"),
    "batch that does not divide": (2, "train --global-batch-size 30 --layout data"),
    "no steps": (2, "train --steps 0"),
    "a negative rate": (2, "train --learning-rate -1"),
    "unknown dtype": (2, "train --dtype float23"),
    "a quantization as dtype": (2, "train --dtype fp8"),
    "unknown quantization": (2, "plan gpt-nano --on h100:8 --quantize int4"),
    "a dtype of frozen weights": (2, "plan gpt-nano --on h100:8 --quantize nf4"),
    "quantization without a rate": (2, "plan gpt-nano --on v5e:2x2 --quantize fp8"),
    "quantization of nothing": (2, "plan resnet-nano --on h100:8 --quantize int8"),
    "adapters of nothing": (2, "train --lora rank=8"),
    "adapters of no rank": (2, "train --lora alpha=8"),
    "adapters of half a rank": (2, "plan gpt-nano --on cpu:8 --lora rank=2.5"),
    "adapters beside no layer": (2, "plan gpt-nano --on cpu:8 --lora rank=2,modules=q"),
    "frozen weights in a format that is none": (2, "plan gpt-nano --on cpu:8 --lora rank=2 --quantize fp8"),
    "unknown optimizer": (2, "train --optimizer adam"),
    "a schedule that is none": (2, "train --schedule cosin"),
    "an average of everything": (2, "train --ema 1"),
    "steps and epochs": (2, "train --steps 5 --num-epochs 1"),
    "a warm-up to the end": (2, "train --steps 5 --warmup-steps 5"),
    "an optimizer without the moments": (
        2, "plan gpt-nano --on cpu:8 --optimizer adafactor --optimizer-state bfloat16"
    ),
    "an optimizer without the option": (2, "plan unet-nano --on cpu:8 --weight-decay 0.1"),
    "epochs of data without a length": (65, "train stream.py:workload --num-epochs 1"),
    "a flag of another tool": (2, "train --per_device_batch_size 4"),
    "a table of numbers": (2, "train --data numbers.csv"),
    "unknown optimizer state": (2, "train --optimizer-state bfloat8"),
    "an option that is none": (2, "train --xla-flags xla_dump_to=7"),
    "unknown option": (2, "train --xla-flags xla_max_concurrent_host_send_recv=1"),
    "unknown policy for bad steps": (2, "train --on-bad-step roll-back"),
    "a spike that is none": (2, "train --spike-factor 1"),
    "no number of bad steps": (2, "train --max-bad-steps -1"),
    "unknown remat policy": (2, "train --remat ful"),
    "unknown attention": (2, "train --attention fast"),
    "loss chunks of no number": (2, "train --loss-chunks many"),
    "a profile of no steps": (2, "train --profile 20:10"),
    "a profile beyond the end": (2, "train --steps 5 --profile 3:9"),
    "calls that skip spikes": (2, "train --steps-per-call 4 --on-bad-step skip --spike-factor 5"),
    "samples without prompts": (2, "train --sample-every 200"),
    "samples at no step": (2, "train --sample-every 0 --sample-prompts empty.txt"),
    "resume from nowhere": (2, "train --resume"),
    "resume to an earlier step": (2, "train --output-dir ended --resume --steps 5"),
    "resume without settings": (65, "train --output-dir old --resume"),
    "resume with half of the settings": (65, "train --output-dir cut --resume"),
    "missing data": (65, "train --data nowhere.txt"),
    "empty data": (65, "train --data empty.txt"),
    "data that is not text": (65, "train --data latin.txt"),
    "unknown tokenizer": (2, "train --tokenizer bite"),
    "conversations without a template": (2, "train --data chats/good.jsonl"),
    "a conversation without an answer": (65, "train --data chats/silent.jsonl --chat-template chatml"),
    "missing table": (65, "train --data nowhere.jsonl"),
    "missing shards": (65, "train --data *.parquet"),
    "a text that nobody named": (2, "train --data table.jsonl"),
    "a text of another name": (65, "train --data table.jsonl --field contents"),
    "a mixture of nothing": (2, "train --data a.jsonl=0,b.jsonl=1"),
    "unknown tracker": (2, "train --track tensorbord"),
    "missing plan": (65, "train --plan nowhere.json"),
    "a plan that is none": (65, "train --plan bad.json"),
    "plan and mesh": (2, "train --plan bad.json --mesh data=8"),
    "missing config": (65, "train --config nowhere.toml"),
    "unknown key": (2, "train --config bad.toml"),
    "wrong type": (2, "train --config type.toml"),
    "not toml": (65, "train --config latin.txt"),
    "out is a file": (73, "train --output-dir empty.txt"),
    "a link in a run": (65, "train --output-dir foreign --resume"),
    "a FIFO in a run": (65, "report foreign"),
    "a hard link in a run": (65, "train --output-dir twice"),
    "a folder in a run": (65, "launch local -- train --output-dir nested"),
    "out has a run": (73, "train --output-dir old"),
    "no devices named": (2, "plan gpt-nano"),
    "unknown chip": (2, "plan gpt-nano --on h10:8"),
    "no such torus": (2, "plan gpt-nano --on v5p:3x2x1"),
    "no devices": (2, "plan gpt-nano --on h100:0"),
    "a cluster file without units": (2, "plan gpt-nano --on units.toml:8"),
    "a missing cluster file": (65, "plan gpt-nano --on nowhere.toml:8"),
    "plan beside an unknown layout": (2, "plan nowhere.py:x --on cpu:8 --why fdsp"),
    "plan for another mesh": (2, "plan gpt-nano --on cpu:8 --mesh data=3"),
    "generation with a flag of training": (2, "plan gpt-nano --on cpu:8 --generate --remat full"),
    "generation with images": (2, "plan vit-nano --on cpu:8 --generate"),
    "a budget for nothing": (2, "plan gpt-nano --on cpu:8 --budget-hours 3"),
    "plans that are none": (65, "plan --diff bad.json bad.json"),
    "evaluating no tasks": (65, "evaluate old --tasks nowhere.jsonl"),
    "evaluating what is no JSON": (65, "evaluate old --tasks tasks/text.jsonl"),
    "an example without a kind": (65, "evaluate old --tasks table.jsonl"),
    "an example with an unknown key": (65, "evaluate old --tasks tasks/unknown.jsonl"),
    "an answer that is no choice": (65, "evaluate old --tasks tasks/answer.jsonl"),
    "an example without choices": (65, "evaluate old --tasks tasks/choices.jsonl"),
    "evaluating nothing of each task": (2, "evaluate old --tasks table.jsonl --limit 0"),
    "comparing no steps": (2, "compare gpt-nano --steps 0"),
    "comparing all and a few": (2, "compare gpt-nano --all --top 3"),
    "inspecting nothing": (65, "inspect nowhere"),
    "inspecting what is no plan": (65, "inspect bad.json"),
    "inspecting what is no run": (65, "inspect old"),
    "reporting nothing": (65, "report nowhere"),
    "reporting what is neither": (65, "report bad.json -o x.html"),
    "reporting what is no run": (65, "report old"),
    "a host without a port": (2, "doctor --hosts 10.0.0.7"),
    "importing nothing": (65, "import nowhere --as gpt2 --output-dir new"),
    "importing as what is unknown": (2, "import old --as gpt3 --output-dir new"),
    "importing to nowhere": (2, "import old --as gpt2"),
    "importing pickled weights": (65, "import pickled --as gpt2 --output-dir new"),
    "importing without a config": (65, "import bare --as gpt2 --output-dir new"),
    "exporting nothing": (65, "export nowhere --as gpt2 --output-dir new"),
    "exporting into small files": (2, "export old --as gpt2 --output-dir new --file-size 5"),
    "beginning from nothing": (65, "train --init nowhere"),
    "rules of an unknown layout": (2, "export-rules gpt-nano --mesh data=8 --layout fdsp"),
    "a folder of weights of no model": (65, "train odd"),
    "no checkpoints": (65, "checkpoint verify nowhere"),
}  # fmt: skip
"""By name, the exit code and the command; its message is in the golden file."""


STREAM = """\
import itertools, jax, numpy as np, spanax
from flax import nnx

workload = spanax.Workload(
    build=lambda rngs: nnx.Linear(8, 8, rngs=rngs),
    batch=jax.ShapeDtypeStruct((16, 8), "float32"),
    loss=lambda model, x: (model(x) ** 2).mean(),
    source=lambda: (np.ones((16, 8), "float32") for _ in itertools.count()),
)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes("caf\xe9 ".encode("latin-1") * 1000)
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "bad.toml").write_text("step = 3\n")
    (tmp_path / "layout.toml").write_text('layout = "fsdp"\n')
    (tmp_path / "type.toml").write_text('steps = "3"\n')
    (tmp_path / "units.toml").write_text('like = "h100"\nmemory = "80"\n')
    for name in ("old", "pickled", "bare", "odd", "cut"):
        (tmp_path / name).mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"")
    (tmp_path / "bare" / "model.safetensors").write_bytes(b"\2" + bytes(7) + b"{}")
    (tmp_path / "odd" / "model.json").write_text('{"model": "gpt2", "shape": {"vocab_size": 8}}')
    (tmp_path / "table.jsonl").write_text('{"id": 1, "content": "to be"}\n')
    said = [{"role": role, "content": "1"} for role in ("user", "assistant")]
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "good.jsonl").write_text((json.dumps({"messages": said}) + "\n") * 40)
    (tmp_path / "chats" / "silent.jsonl").write_text((json.dumps({"messages": said[:1]}) + "\n") * 40)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "text.jsonl").write_text("to be\n")
    (tmp_path / "tasks" / "unknown.jsonl").write_text('{"task": "a", "prompt": "b", "expected": "c", "stops": ["d"]}\n')
    for name, choices in (("answer", '["a", "b"]'), ("choices", "[]")):
        example = f'\n{{"task": "a", "context": "b", "choices": {choices}, "answer": 2}}\n'
        (tmp_path / "tasks" / f"{name}.jsonl").write_text(example)
    (tmp_path / "numbers.csv").write_text("width,species\n1.5,2\n")
    (tmp_path / "stream.py").write_text(STREAM)
    (tmp_path / "old" / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "cut" / "config.toml").write_text(sealed('workload = "gpt2"\nlr = 0.01\n')[:-5])
    for name in ("foreign", "twice", "nested/LOCK"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "foreign" / "config.toml").symlink_to("../bad.toml")
    os.mkfifo(tmp_path / "foreign" / "events.jsonl")
    os.link(tmp_path / "empty.txt", tmp_path / "twice" / "LOCK")
    for step in ("4", "8"):
        (tmp_path / "ended" / "checkpoints" / step).mkdir(parents=True)
        (tmp_path / "ended" / "checkpoints" / step / "meta.json").write_bytes(manifest.meta_text({}, {}))
        manifest.write(tmp_path / "ended" / "checkpoints" / step)
    write_records(tmp_path / "ended", TrainConfig().record(), "{\n}\n", [])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_reported_in_four_lines(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, command = BAD[name]
    result, out, err = run(capsys, *command.split())
    lines = err.strip().splitlines()
    assert result == code, err
    assert lines[0].startswith("spanax: ") and len(lines) <= 4 and "Traceback" not in err and not out
    assert not (folder / "new").exists(), "something was left behind"
    assert not (folder / "runs").exists() or not any((folder / "runs").iterdir()), "something was left behind"
    golden_messages.compare(GOLDEN, BAD, name, f"spanax {command}\n{err.replace(str(folder), 'FOLDER')}")


def test_one_function_parses_every_command_line() -> None:
    """It lets `None` be no value of a flag: tyro would take the word for the absence of a value."""
    files = [path.read_text() for path in (Path(__file__).parents[1] / "src").rglob("*.py")]
    calls = [ast.unparse(node) for text in files for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    (parser,) = [call for call in calls if call.startswith("tyro.cli(")]
    assert "DisallowNone" in parser


def test_the_golden_messages_are_those_of_the_bad_input() -> None:
    assert list(golden_messages.sections(GOLDEN)) == list(BAD)


QUICK = (
    "unknown layout", "mesh of another size", "batch that does not divide", "an option that is none",
    "resume from nowhere", "no such torus", "comparing no steps", "rules of an unknown layout",
    "a layout of an axis that is none", "a layout that divides one example",
)  # fmt: skip

PROSE = {
    "frozen weights in a format that is none",
    "a workload without data", "a length that is none", "unknown axis", "mesh of nothing", "calls that skip spikes",
    "resume to an earlier step", "resume without settings", "resume with half of the settings", "missing data",
    "empty data", "data that is not text", "missing table", "missing shards", "a text that nobody named",
    "a mixture of nothing", "unknown key", "a link in a run", "a FIFO in a run", "a hard link in a run",
    "a folder in a run", "out has a run", "a cluster file without units", "plan for another mesh",
    "comparing all and a few", "inspecting nothing",
    "inspecting what is no run", "reporting nothing", "reporting what is neither", "reporting what is no run",
    "steps and epochs", "generation with a flag of training", "generation with images",
    "evaluating no tasks", "evaluating what is no JSON", "an example without a kind",
    "an example with an unknown key", "an answer that is no choice", "an example without choices",
    "epochs of data without a length", "a flag of another tool", "a table of numbers",
    "a host without a port", "importing nothing", "importing pickled weights", "importing without a config",
    "exporting nothing", "beginning from nothing", "no checkpoints", "no layout, over a file",
    "a conversation without an answer",
}  # fmt: skip
"""Errors whose fix a user carries out in a file, or chooses: nothing to append to the command."""

TWO_MISTAKES = {
    "importing as what is unknown", "exporting into small files", "plan and mesh",
    "a text of another name", "unknown attention", "plan beside an unknown layout", "evaluating nothing of each task",
}  # fmt: skip
"""Commands whose folder, plan or data is invalid as well, or whose kernel no CPU has."""

ERRORS = {name: text.partition("\n")[2] for name, text in golden_messages.sections(GOLDEN).items()}
FIXED = {name: followed(command.split(), ERRORS.get(name, "")) for name, (_, command) in BAD.items()}


def test_a_fix_is_followed_or_is_prose() -> None:
    assert {name for name, text in ERRORS.items() if "fix: " in text and not FIXED[name]} == PROSE


@pytest.mark.parametrize("name", sampled([name for name in FIXED if FIXED[name]], QUICK))
def test_a_fix_works(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spanax.train.trainer.begin", lambda *_: sys.exit(0))
    comparison = importlib.import_module("spanax.check.measure.compare")
    monkeypatch.setattr(comparison, "layouts", lambda *_, **__: sys.exit(0))
    for args in FIXED[name]:
        code, _, err = run(capsys, *args)
        assert ERRORS[name].splitlines()[0] not in err
        assert name in TWO_MISTAKES or code == 0, err


def test_a_run_can_be_resumed_at_its_last_step(folder: Path) -> None:
    """As a supervisor does with a run that ended while it was saving."""
    from spanax.train.record.folder import check_steps

    check_steps(folder / "ended", 8)
    check_steps(folder / "old", 1)
    with pytest.raises(SpanaxError, match="has reached step 8"):
        check_steps(folder / "ended", 7)


def test_a_folder_in_use_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from spanax.train.record.run_lock import claimed

    with claimed(folder / "held", resume=False):
        # Locks belong to the open file, so the second run has to be a process of its own.
        done = subprocess.run(
            [sys.executable, "-m", "spanax", "train", "--output-dir", "held"],
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 73 and "is in use" in done.stderr and f"process {os.getpid()}" in done.stderr


def test_flags_win_over_the_file(folder: Path) -> None:
    (folder / "good.toml").write_text('steps = 7\nlr = 1\nlayout = "fsdp"\n')  # `lr` is a former name
    command = TrainConfig(config="good.toml", steps=9)
    result = train.with_files(command, ["--config", "good.toml", "--steps", "9"])
    assert (result.steps, result.learning_rate, result.layout) == (9, 1, "fsdp")


@pytest.mark.parametrize(
    ("flags", "place"),
    [
        (["--steps", "9"], ("fsdp+tensor", "fsdp=4,model=2")),
        (["--mesh", "data=8"], (None, "data=8")),
        (["--layout", "zero1"], ("zero1", None)),
        (["--devices", "4"], ("fsdp+tensor", None)),
        (["--devices", "1", "--layout", "data"], ("data", None)),
    ],
)
def test_a_resumed_run_uses_the_requested_mesh(
    flags: list[str], place: tuple[str | None, str | None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'workload = "gpt2"\nsteps = 5\nseed = 3\nlayout = "fsdp+tensor"\nmesh = "fsdp=4,model=2"\n'
    (folder / "old" / "config.toml").write_text(sealed(text))
    taken: list[TrainConfig] = []
    verb = dataclasses.replace(cli.COMMANDS["train"], answer=lambda config: taken.append(config) or Answer())
    monkeypatch.setitem(cli.COMMANDS, "train", verb)
    cli.main(["train", "--output-dir", "old", "--resume", *flags])
    assert (taken[0].layout, taken[0].mesh) == place
    assert (taken[0].workload, taken[0].seed) == ("gpt2", 3)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--version")
    assert code == 0 and re.fullmatch(r"spanax \d+\.\d+\.\d+\S*\n", out)
