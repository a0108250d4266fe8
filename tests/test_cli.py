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

RECIPE = {"ema", "max_grad_norm", "optimizer", "schedule", "warmup_steps", "weight_decay"}
FLAGS = {
    "train": {
        "accept_changed_model", "accumulate", "attention", "config", "data", "devices", "dtype", "eval_batches",
        "eval_every", "field", "global_batch_size", "init", "init_partial", "json", "keep_last", "layout",
        "log_every", "loss_chunks", "learning_rate", "max_bad_steps", "mesh", "microbatches", "on_bad_step",
        "optimizer_state",
        "output_dir", "pipeline_schedule", "plan", "profile", "remat", "resume", "save_every", "seed", "seq_len",
        "spike_factor", "steps", "steps_per_call", "tokenizer", "traceback", "track", "virtual_stages", "workload",
        "xla_flags",
        "num_epochs", "offload", "pad", *RECIPE,
    },
    "models": {"json", "name"},
    "axes": {"embed", "global_batch_size", "json", "layers", "seq_len", "traceback", "workload"},
    "check": {
        "accumulate", "attention", "cache", "codegen", "collectives", "dtype", "embed", "explain_collective",
        "fail_on", "global_batch_size", "inputs_only", "json", "layers", "layout", "level", "loss_chunks", "mesh",
        "microbatches", "on", "optimizer_state", "out", "parity", "pipeline_schedule", "plan", "profiled", "remat",
        "seq_len", "steps", "timeout", "traceback", "virtual_stages", "workload",
        "offload", "pad", *RECIPE,
    },
    "compare": {
        "all", "devices", "dtype", "embed", "global_batch_size", "json", "layers", "mesh", "on", "seq_len", "steps",
        "top", "traceback", "workload",
    },
    "inspect": {"hlo", "json", "leaf", "path", "schedule", "svg", "traceback", "workload"},
    "checkpoint": {"action", "directory", "json"},
    "plan": {
        "accumulate", "attention", "budget_hours", "calibrate", "compile", "diff", "dtype", "embed", "examples",
        "explain", "global_batch_size", "html", "json", "layers", "layout", "loss_chunks", "mesh", "microbatches",
        "no_pipeline", "on", "optimizer_state", "out", "out_cluster", "pipeline", "pipeline_schedule", "price", "remat",
        "save_seconds", "seq_len", "solve_for", "target_mfu", "tokens", "top", "traceback", "virtual_stages", "why",
        "workload",
        "offload", "pad", *RECIPE,
    },
    "probe": {"devices", "out", "seconds"},
    "report": {"json", "out", "run"},
    "doctor": {"hosts", "json", "output_dir", "timeout"},
    "import": {"dtype", "json", "kind", "output_dir", "source"},
    "export": {"checkpoint", "dtype", "file_size", "json", "kind", "output_dir", "traceback", "workload"},
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


BAD: dict[str, tuple[list[str], int, str]] = {
    "unknown workload": (["train", "gpt-nan"], 2, "did you mean 'gpt-nano'"),
    "a workload without data": (["train", "resnet50"], 2, "'resnet50' has no data"),
    "a length that is none": (["axes", "resnet50", "--seq-len", "8"], 2, "sequence length of 'resnet50' is fixed"),
    "unknown file": (["train", "nowhere.py:x"], 2, "'nowhere.py' does not exist"),
    "unknown layout": (["train", "--layout", "fdsp"], 2, "did you mean 'fsdp'"),
    "no layout, over a file": (
        ["train", "--config", "layout.toml", "--layout", "None"],
        2,
        "unknown layout 'None'",
    ),
    "unknown axis": (["train", "--mesh", "dta=8"], 2, "mesh axis 'dta' has no default meaning"),
    "mesh of another size": (["train", "--mesh", "data=4"], 2, "needs 4 devices, and the cluster has 8"),
    "a layout of an axis that is none": (
        ["plan", "gpt-nano", "--on", "h100:8", "--layout", "expert"],
        2,
        "mesh axis 'expert' (2) has nothing to shard",
    ),
    "a layout that divides one example": (
        ["plan", "gpt-nano", "--on", "cpu:8", "--layout", "context", "--global-batch-size", "1"],
        2,
        "mesh axis 'data' (4) has nothing to shard",
    ),
    "mesh that is no mesh": (["train", "--mesh", "4x2"], 2, "cannot read '4x2'"),
    "mesh of nothing": (["train", "--mesh", "data=0"], 2, "integer >= 1"),
    "batch that does not divide": (
        ["train", "--global-batch-size", "30", "--layout", "data"],
        2,
        "'batch' of size 30 is not divisible by 8",
    ),
    "no steps": (["train", "--steps", "0"], 2, "--steps is 0"),
    "a negative rate": (["train", "--learning-rate", "-1"], 2, "--learning-rate is -1"),
    "unknown dtype": (["train", "--dtype", "float23"], 2, "did you mean 'float32'"),
    "unknown optimizer": (["train", "--optimizer", "adam"], 2, "did you mean 'adamw'"),
    "a schedule that is none": (["train", "--schedule", "cosin"], 2, "did you mean 'cosine'"),
    "an average of everything": (["train", "--ema", "1"], 2, "--ema is 1.0; expected a number <= 0.999999"),
    "steps and epochs": (["train", "--steps", "5", "--num-epochs", "1"], 2, "both say how long"),
    "a warm-up to the end": (["train", "--steps", "5", "--warmup-steps", "5"], 2, "is not below --steps 5"),
    "an optimizer without the moments": (
        ["plan", "gpt-nano", "--on", "cpu:8", "--optimizer", "adafactor", "--optimizer-state", "bfloat16"],
        2,
        "'adafactor' cannot store its state in bfloat16",
    ),
    "an optimizer without the option": (
        ["plan", "unet-nano", "--on", "cpu:8", "--weight-decay", "0.1"],
        2,
        "this workload's optimizer takes no --weight-decay",
    ),
    "epochs of data without a length": (["train", "stream.py:workload", "--num-epochs", "1"], 65, "data with a length"),
    "a flag of another tool": (["train", "--per_device_batch_size", "4"], 2, "--global-batch-size N"),
    "a table of numbers": (["train", "--data", "numbers.csv"], 2, "A CSV file, docs/data.md"),
    "no command yet": (["generate", "runs/a"], 2, "docs/generate.md"),
    "unknown optimizer state": (["train", "--optimizer-state", "bfloat8"], 2, "did you mean 'bfloat16'"),
    "an option that is none": (["train", "--xla-flags", "xla_dump_to=7"], 2, "cannot set the option 'xla_dump_to"),
    "unknown option": (
        ["train", "--xla-flags", "xla_max_concurrent_host_send_recv=1"],
        2,
        "No such compile option: 'xla_max_concurrent_host_send_recv'",
    ),
    "unknown policy for bad steps": (["train", "--on-bad-step", "roll-back"], 2, "did you mean 'rollback'"),
    "a spike that is none": (["train", "--spike-factor", "1"], 2, "--spike-factor is 1.0; expected a number >= 1.1"),
    "no number of bad steps": (["train", "--max-bad-steps", "-1"], 2, "--max-bad-steps is -1"),
    "unknown remat policy": (["train", "--remat", "ful"], 2, "did you mean 'full'"),
    "unknown attention": (["train", "--attention", "fast"], 2, "known: plain, auto, flash"),
    "loss chunks of no number": (["train", "--loss-chunks", "many"], 2, "expected auto, or an integer from 1 to 65536"),
    "a profile of no steps": (["train", "--profile", "20:10"], 2, "it must be the first and the last step"),
    "a profile beyond the end": (["train", "--steps", "5", "--profile", "3:9"], 2, "--profile 1:5"),
    "calls that skip spikes": (
        ["train", "--steps-per-call", "4", "--on-bad-step", "skip", "--spike-factor", "5"],
        2,
        "cannot skip spikes",
    ),  # fmt: skip
    "resume from nowhere": (["train", "--resume"], 2, "--resume requires --output-dir, the run folder"),
    "resume to an earlier step": (
        ["train", "--output-dir", "ended", "--resume", "--steps", "5"],
        2,
        "has reached step 8",
    ),
    "resume without settings": (
        ["train", "--output-dir", "old", "--resume"],
        65,
        "contains a run but no 'config.toml'",
    ),
    "resume with half of the settings": (
        ["train", "--output-dir", "cut", "--resume"],
        65,
        "does not match its checksum",
    ),
    "missing data": (["train", "--data", "nowhere.txt"], 65, "nowhere.txt"),
    "empty data": (["train", "--data", "empty.txt"], 65, "empty"),
    "data that is not text": (["train", "--data", "latin.txt"], 65, "UTF-8"),
    "unknown tokenizer": (["train", "--tokenizer", "bite"], 2, "bite"),
    "missing table": (["train", "--data", "nowhere.jsonl"], 65, "cannot read 'nowhere.jsonl'"),
    "missing shards": (["train", "--data", "*.parquet"], 65, "no file matches '*.parquet'"),
    "a text that nobody named": (["train", "--data", "table.jsonl"], 2, "'table.jsonl' has no field 'text'"),
    "a text of another name": (["train", "--data", "table.jsonl", "--field", "contents"], 65, "did you mean 'content'"),
    "a mixture of nothing": (["train", "--data", "a.jsonl=0,b.jsonl=1"], 2, "the weight of a.jsonl must be a number"),
    "unknown tracker": (["train", "--track", "tensorbord"], 2, "did you mean 'tensorboard'"),
    "missing plan": (["train", "--plan", "nowhere.json"], 65, "cannot read the plan"),
    "a plan that is none": (["train", "--plan", "bad.json"], 65, "this is not a plan file"),
    "plan and mesh": (["train", "--plan", "bad.json", "--mesh", "data=8"], 2, "--plan already determines"),
    "missing config": (["train", "--config", "nowhere.toml"], 65, "cannot read the configuration"),
    "unknown key": (["train", "--config", "bad.toml"], 2, "did you mean 'steps'"),
    "wrong type": (["train", "--config", "type.toml"], 2, "it must be an integer"),
    "not toml": (["train", "--config", "latin.txt"], 65, "cannot read the configuration"),
    "out is a file": (["train", "--output-dir", "empty.txt"], 73, "cannot write to the run folder"),
    "a link in a run": (["train", "--output-dir", "foreign", "--resume"], 65, "'config.toml' is a symbolic link"),
    "a FIFO in a run": (["report", "foreign"], 65, "'events.jsonl' is a FIFO"),
    "a hard link in a run": (["train", "--output-dir", "twice"], 65, "'LOCK' has another name"),
    "a folder in a run": (["launch", "local", "--", "train", "--output-dir", "nested"], 65, "'LOCK' is a folder"),
    "out has a run": (["train", "--output-dir", "old"], 73, "already contains a run"),
    "no devices named": (["plan", "gpt-nano"], 2, "needs the devices"),
    "unknown chip": (["plan", "gpt-nano", "--on", "h10:8"], 2, "did you mean 'h100'"),
    "no such torus": (["plan", "gpt-nano", "--on", "v5p:3x2x1"], 2, "v5p"),
    "no devices": (["plan", "gpt-nano", "--on", "h100:0"], 2, "h100"),
    "a cluster file without units": (["plan", "gpt-nano", "--on", "units.toml:8"], 2, "80"),
    "a missing cluster file": (["plan", "gpt-nano", "--on", "nowhere.toml:8"], 65, "nowhere.toml"),
    "plan for an unknown workload": (["plan", "gpt4", "--on", "cpu:8"], 2, "unknown workload"),
    "plan for no batch": (
        ["plan", "gpt-nano", "--on", "cpu:8", "--global-batch-size", "0"],
        2,
        "expected a number >= 1",
    ),
    "plan for an unknown layout": (["plan", "gpt-nano", "--on", "cpu:8", "--layout", "fdsp"], 2, "did you mean 'fsdp'"),
    "plan beside an unknown layout": (
        ["plan", "nowhere.py:x", "--on", "cpu:8", "--why", "fdsp"],
        2,
        "did you mean 'fsdp'",
    ),
    "plan for an unknown axis": (["plan", "gpt-nano", "--on", "cpu:8", "--mesh", "dta=8"], 2, "did you mean 'data'"),
    "plan for another mesh": (["plan", "gpt-nano", "--on", "cpu:8", "--mesh", "data=3"], 2, "needs 3 devices"),
    "plan for an unknown dtype": (["plan", "gpt-nano", "--on", "a100:8", "--dtype", "bfloat17"], 2, "did you mean"),
    "a budget for nothing": (["plan", "gpt-nano", "--on", "cpu:8", "--budget-hours", "3"], 2, "needs --tokens"),
    "plans that are none": (["plan", "--diff", "bad.json", "bad.json"], 65, "this is not a plan file"),
    "comparing an unknown workload": (["compare", "gpt4"], 2, "unknown workload"),
    "comparing no steps": (["compare", "gpt-nano", "--steps", "0"], 2, "--steps is 0"),
    "comparing all and a few": (["compare", "gpt-nano", "--all", "--top", "3"], 2, "--all compares all"),
    "comparing on an unknown axis": (["compare", "gpt-nano", "--mesh", "dta=8"], 2, "did you mean 'data'"),
    "comparing on another mesh": (["compare", "gpt-nano", "--mesh", "data=3"], 2, "needs 3 devices"),
    "comparing what does not divide": (
        ["compare", "gpt-nano", "--mesh", "data=8", "--global-batch-size", "30"],
        2,
        "divisible",
    ),
    "comparing in an unknown dtype": (["compare", "gpt-nano", "--dtype", "float23"], 2, "did you mean 'float32'"),
    "inspecting nothing": (["inspect", "nowhere"], 65, "there is no plan or run 'nowhere'"),
    "inspecting what is no plan": (["inspect", "bad.json"], 65, "this is not a plan file"),
    "inspecting what is no run": (["inspect", "old"], 65, "neither plan nor checkpoint"),
    "reporting nothing": (["report", "nowhere"], 65, "folder 'nowhere' does not exist"),
    "reporting what is neither": (["report", "bad.json", "-o", "x.html"], 65, "neither a plan nor a check"),
    "reporting what is no run": (["report", "old"], 65, "'old' is not a run folder"),
    "a host without a port": (["doctor", "--hosts", "10.0.0.7"], 2, "'10.0.0.7' is not an address"),
    "importing nothing": (["import", "nowhere", "--as", "gpt2", "--output-dir", "new"], 65, "'nowhere' does not exist"),
    "importing as what is unknown": (
        ["import", "old", "--as", "gpt3", "--output-dir", "new"],
        2,
        "did you mean 'gpt2'",
    ),
    "importing pickled weights": (
        ["import", "pickled", "--as", "gpt2", "--output-dir", "new"],
        65,
        "which can run code",
    ),
    "importing in an unknown dtype": (
        ["import", "old", "--as", "gpt2", "--output-dir", "new", "--dtype", "float17"],
        2,
        "did you mean 'float16'",
    ),
    "importing without a config": (["import", "bare", "--as", "gpt2", "--output-dir", "new"], 65, "has no config.json"),
    "exporting nothing": (["export", "nowhere", "--as", "gpt2", "--output-dir", "new"], 65, "no checkpoint found"),
    "exporting into small files": (
        ["export", "old", "--as", "gpt2", "--output-dir", "new", "--file-size", "5"],
        2,
        "has no unit",
    ),
    "beginning from nothing": (["train", "--init", "nowhere"], 65, "no checkpoint found"),
    "rules of an unknown layout": (
        ["export-rules", "gpt-nano", "--mesh", "data=8", "--layout", "fdsp"],
        2,
        "did you mean 'fsdp'",
    ),
    "a folder of weights of no model": (["train", "odd"], 65, "does not describe a model"),
    "no checkpoints": (["checkpoint", "verify", "nowhere"], 65, "there is no folder 'nowhere'"),
}


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
    args, code, says = BAD[name]
    result, out, err = run(capsys, *args)
    lines = err.strip().splitlines()
    assert result == code and says in err, err
    assert lines[0].startswith("spanax: ") and len(lines) <= 4 and "Traceback" not in err and not out
    assert not (folder / "new").exists(), "something was left behind"
    assert not (folder / "runs").exists() or not any((folder / "runs").iterdir()), "something was left behind"
    golden_messages.compare(GOLDEN, BAD, name, f"spanax {' '.join(args)}\n{err.replace(str(folder), 'FOLDER')}")


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
    "a workload without data", "a length that is none", "unknown axis", "mesh of nothing", "calls that skip spikes",
    "resume to an earlier step", "resume without settings", "resume with half of the settings", "missing data",
    "empty data", "data that is not text", "missing table", "missing shards", "a text that nobody named",
    "a mixture of nothing", "unknown key", "a link in a run", "a FIFO in a run", "a hard link in a run",
    "a folder in a run", "out has a run", "a cluster file without units", "plan for another mesh",
    "comparing all and a few", "comparing on another mesh", "comparing what does not divide", "inspecting nothing",
    "inspecting what is no run", "reporting nothing", "reporting what is neither", "reporting what is no run",
    "steps and epochs",
    "epochs of data without a length", "a flag of another tool", "a table of numbers", "no command yet",
    "a host without a port", "importing nothing", "importing pickled weights", "importing without a config",
    "exporting nothing", "beginning from nothing", "no checkpoints", "no layout, over a file",
}  # fmt: skip
"""Errors whose fix a user carries out in a file, or chooses: nothing to append to the command."""

TWO_MISTAKES = {
    "importing as what is unknown", "importing in an unknown dtype", "exporting into small files", "plan and mesh",
    "a text of another name", "unknown attention", "plan beside an unknown layout",
}  # fmt: skip
"""Commands whose folder, plan or data is invalid as well, or whose kernel no CPU has."""

ERRORS = {name: text.partition("\n")[2] for name, text in golden_messages.sections(GOLDEN).items()}
FIXED = {name: followed(args, ERRORS.get(name, "")) for name, (args, _, _) in BAD.items()}


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
