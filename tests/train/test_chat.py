"""Training on conversations: built-in models and one's own, in every layout, resumed, and sampled with the template."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

import spanax
from sampling import sampled
from spanax import cli
from spanax.commands.generate import GenerateCommand, _options
from spanax.errors import SpanaxError
from spanax.interop.loaded_model import load_model
from spanax.models import gpt, llama, moe
from spanax.models.workloads import load
from spanax.train.config import TrainConfig
from spanax.train.data.text.chat_template import BUILT_IN, ChatTemplate
from spanax.train.record.folder import read_environment
from spanax.train.workload_tracing import _with_defaults

T = 64
WORKLOAD = f"""
from spanax import Workload
from spanax.models import gpt

CONFIG = gpt.GPTConfig(256, {T}, num_layers=2, num_heads=2, embed_dim=16)
OPTIONS = {{"build": lambda rngs: gpt.GPT(CONFIG, rngs), "loss": gpt.loss, "source": "chat.jsonl", "vocab_size": 256}}
chat = Workload(batch=gpt.example_batch(8, {T}, True), **OPTIONS)
text = Workload(batch=gpt.example_batch(8, {T}), **OPTIONS)
"""

OWN = BUILT_IN["chatml"].replace("<|im_start|>", "#")


@pytest.fixture
def place(tmp_path: Path, devices: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows = [{"prompt": f"{i}?", "completion": f"{i * 7}"} for i in range(800)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.py").write_text(WORKLOAD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def run(*args: str) -> None:
    cli.main(["train", "own.py:chat", "--layout", "fsdp", "--devices", "2", *args])


def losses(folder: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def test_a_run_is_evaluated_and_sampled_with_its_template(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "own.jinja").write_text(OWN)
    run("--steps", "1", "--chat-template", "own.jinja", "--output-dir", "run")
    assert "held-out loss" in capsys.readouterr().out
    assert read_environment(place / "run").chat_template == ChatTemplate(OWN).record
    (place / "own.jinja").unlink()  # the run has its own
    saved = load_model(place / "run")
    assert saved.chat_template == ChatTemplate(OWN)
    assert _options(GenerateCommand(place, chat=True), saved, 1)["stop"] == ["<|im_end|>"]
    monkeypatch.setattr("spanax.interop.loaded_model.load_model", lambda *_, **__: saved)
    options = ("--temperature", "0", "--max-new-tokens", "3")
    cli.main(["generate", "run", "--chat", "--prompt", "3?", *options])
    cli.main(["generate", "run", "--prompt", "#user\n3?<|im_end|>\n#assistant\n", *options])
    asked, plain = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert asked["prompt"] == "3?" and asked["tokens"] == plain["tokens"] != []


@pytest.mark.slow
def test_a_resumed_run_has_the_template_that_it_began_with(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "own.jinja").write_text(OWN)
    arguments = ("--chat-template", "own.jinja", "--schedule", "constant", "--warmup-steps", "0")
    run("--steps", "4", *arguments, "--output-dir", "whole")
    run("--steps", "2", *arguments, "--output-dir", "part")
    (place / "own.jinja").write_text("{{ changed }}")
    run("--resume", "--steps", "4", "--output-dir", "part")
    assert losses(place / "whole") == losses(place / "part") != {}
    with pytest.raises(SystemExit):
        run("--resume", "--steps", "5", "--chat-template", "chatml", "--output-dir", "part")
    assert "--chat-template" in capsys.readouterr().err


def test_a_model_gets_the_batch_of_its_data(place: Path, tmp_path: Path) -> None:
    config = TrainConfig(global_batch_size=4, data="chat.jsonl", devices=1)
    (tmp_path / "text.txt").write_text("some text\n" * 100)
    for name in ("gpt-nano", "llama-nano", "moe-nano"):
        workload, _ = _with_defaults(partial(load, name), config)
        assert sorted(workload.batch) == ["inputs", "positions", "segments", "targets", "weights"], name
        workload, _ = _with_defaults(partial(load, name), replace(config, data="text.txt"))
        assert sorted(workload.batch) == ["inputs", "targets"]
    with pytest.raises(SpanaxError, match="conversations need `weights` in the batch"):
        spanax.batches("chat.jsonl", load("own.py:text").batch)


MODELS: dict[str, Any] = {
    "gpt": (gpt.GPT, gpt.GPTConfig(256, 32, num_layers=2, num_heads=4, embed_dim=32), gpt.loss),
    "llama": (llama.Llama, llama.LlamaConfig(256, 32, 2, 4, 2, embed_dim=32, mlp_dim=64), llama.loss),
    "moe": (
        moe.Mixtral,
        moe.MoEConfig(256, 32, 2, 4, 2, embed_dim=32, mlp_dim=32, num_experts=4, capacity_factor=None),
        moe.loss,
    ),
}
CELLS = [
    ("data=2,context=2", "ring", 2), ("data=2", None, 4), ("data=1", None, 4), ("fsdp=8", "fsdp", 1),
    ("data=2,context=4", "ring", 1), ("data=2,context=4", "context", 1), ("model=4", "tensor", 1),
    ("pipe=2,data=2", "pipeline", 4),
    ("fsdp=2,model=2", "fsdp+tensor", 2),
]  # fmt: skip
EXACT = [(name, *cell) for name in MODELS for cell in CELLS if name != "moe" or cell[2] == 1]
"""A mixture of experts averages its microbatches."""


def step(name: str, mesh: str, layout: str | None, microbatches: int) -> tuple[float, np.ndarray]:
    """The loss and the gradients of a step on packed rows, of which each has another number of tokens that count."""
    model, config, loss = MODELS[name]
    batch = gpt.example_batch(8, 32, True)
    options = {"optimizer": optax.sgd(0.1, momentum=0.0), "microbatches": microbatches}
    program = spanax.trace(build=lambda rngs: model(config, rngs), batch=batch, loss=loss, **options)
    size = int(np.prod([int(axis.partition("=")[2]) for axis in mesh.split(",")]))
    plan = spanax.plan(program, spanax.cluster(f"cpu:{size}"), mesh=mesh, layout=layout)
    training = spanax.start(program, plan, seed=3)
    rows = next(
        spanax.batches("varied.jsonl", {path: np.zeros(leaf.shape, leaf.dtype) for path, leaf in batch.items()})
    )
    metrics = training.step(rows)
    gradients = [array for path, array in sorted(training.arrays("optimizer").items()) if ".trace." in path]
    return float(metrics["loss"]), np.concatenate([np.asarray(array).ravel() for array in gradients])


@pytest.mark.parametrize(("name", "mesh", "layout", "microbatches"), sampled(EXACT, [("llama", *CELLS[0])]))
def test_a_packed_step_equals_that_of_one_device(
    name: str, mesh: str, layout: str | None, microbatches: int, place: Path
) -> None:
    rows = [{"prompt": "a" * (i % 7 + 1), "completion": "b" * (i % 9 * (i % 3 == 0) + 1)} for i in range(400)]
    (place / "varied.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loss, gradients = step(name, mesh, layout, microbatches)
    expected, reference = step(name, "data=1", None, 1)
    assert loss == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(gradients, reference, rtol=0, atol=1e-5 * np.abs(reference).max())
