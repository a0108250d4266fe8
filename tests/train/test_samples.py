"""Samples of a model in training: those of its checkpoints, once for each step, without effect on the training."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import tokenizers
from flax import nnx

import spanax
from sampling import sampled
from spanax.models import gpt
from spanax.train.config import TrainConfig
from spanax.train.data.text.tokenizer import load_tokenizer
from spanax.train.trainer import train

CONFIG = gpt.GPTConfig(256, 32, num_layers=2, num_heads=2, embed_dim=16, dropout=0.1)
PROMPTS = ["ab", "c\x1bd", "the end of"]


ENGINE = tokenizers.Tokenizer.from_str(load_tokenizer("bytes").to_json())


@pytest.fixture
def place(tmp_path: Path, devices: Any) -> Path:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    (tmp_path / "prompts.txt").write_text("\n \n".join(PROMPTS) + "\n")
    return tmp_path


def workload(place: Path, **changes: Any) -> spanax.Workload:
    options = {"build": lambda rngs: gpt.GPT(CONFIG, rngs), "loss": gpt.loss, "source": str(place / "text.txt")}
    batch = gpt.example_batch(8, CONFIG.seq_len)
    return spanax.Workload(**options | {"batch": batch, "optimizer": optax.adam(1e-2), "vocab_size": 256} | changes)


def trained(place: Path, out: str, emit: Any = lambda event: None, **settings: Any) -> None:
    """Trains on two devices, with samples unless a setting is None; `changes` are those of the workload."""
    changes = settings.pop("changes", {})
    samples = {"sample_every": 2, "sample_prompts": str(place / "prompts.txt")}
    options = {"steps": 4, "mesh": "fsdp=2", "seed": 7, "eval_batches": 1, **samples, **settings}
    config = TrainConfig(workload="own", output_dir=str(place / out), **options)
    train(lambda **_: workload(place, **changes), config, jax.devices()[:2], emit, spanax.generate)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("mesh", sampled(["fsdp=2", "pipe=2"], ["fsdp=2"]))
def test_samples_are_those_of_the_checkpoint_and_change_nothing(mesh: str, place: Path, compilations: Any) -> None:
    seen: list[tuple[dict[str, Any], int]] = []
    trained(place, "run", lambda event: seen.append((event, len(compilations))), mesh=mesh, steps=2)
    assert [event["prompt"] for event, _ in seen if event["event"] == "sample"] == PROMPTS
    with (place / "run" / "samples.jsonl").open("a") as file:
        file.write(json.dumps(lines(place / "run")[0] | {"step": 3}) + "\n")  # of steps that were lost
    seen.clear()
    trained(place, "run", lambda event: seen.append((event, len(compilations))), mesh=mesh, resume=True)
    *_, evaluated = (count for event, count in seen if event["event"] == "eval")
    assert {count for event, count in seen if event["event"] == "sample"} == {evaluated}
    recorded = lines(place / "run")
    assert [(line["step"], line["prompt"]) for line in recorded] == [(at, text) for at in (2, 4) for text in PROMPTS]

    trained(place, "other", mesh=mesh, sample_every=None, sample_prompts=None)
    program = workload(place).trace()
    plan = spanax.plan(program, spanax.cluster("cpu:2"), mesh=mesh)
    runs = [spanax.restore(program, plan, place / out / "checkpoints") for out in ("run", "other")]
    for first, second in zip(*(run.state for run in runs), strict=True):
        assert bool((first == second).all())
    assert not (place / "other" / "samples.jsonl").exists()

    model = runs[0].model()
    model.eval()
    expected = spanax.generate(model, PROMPTS, 32 - max(map(len, PROMPTS)), seed=7 + 4, tokenizer=ENGINE)
    for line, result in zip(recorded[3:], expected, strict=True):
        assert tuple(line["tokens"]) == result.tokens and line["text"] == result.text and len(result.tokens) == 22
        assert np.allclose(line["log_probabilities"], result.log_probabilities, atol=1e-6)


class Encoder(nnx.Module):
    """A model that looks ahead; without `returned`, one that returns no logits."""

    def __init__(self, rngs: nnx.Rngs, returned: bool = True):
        self.embed, self.head = nnx.Embed(256, 8, rngs=rngs), nnx.Linear(8, 256, rngs=rngs)
        self.returned = returned

    def __call__(self, tokens: jax.Array) -> Any:
        x = self.embed(tokens)
        logits = self.head(x + x.mean(1, keepdims=True))
        return logits if self.returned else logits.mean()


def encoder_loss(model: Encoder, batch: Any) -> Any:
    logits = model(batch["inputs"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean() if logits.ndim else logits


@pytest.mark.parametrize(
    ("prompts", "changes", "words"),
    [
        ("\n", {}, "cannot read the prompts"),
        ("a" * 32, {}, "a prompt has 32 tokens, and the sequences of this run have 32"),
        ("a", {"source": "tokens.bin"}, "the training data has no tokenizer"),
        ("a", {"build": Encoder, "loss": encoder_loss}, "this model is not causal"),
        ("a", {"build": partial(Encoder, returned=False), "loss": encoder_loss}, r"returns logits \[batch, tokens"),
    ],
)
def test_what_cannot_be_sampled_ends_the_run_before_its_first_step(
    prompts: str, changes: dict[str, Any], words: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    (place / "prompts.txt").write_text(prompts)
    (place / "tokens.bin").write_bytes(b"a\0" * 4000)
    with pytest.raises(spanax.SpanaxError, match=words):
        trained(place, "run", changes=changes)
    assert not (place / "run" / "metrics.jsonl").exists()
