"""Weights in and out: what transformers answers, the same bytes again, and runs that begin from them."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spanax
from loaded import digests, imported
from sampling import sampled
from spanax import cli
from spanax.errors import WriteError
from spanax.interop import export_weights, import_weights
from spanax.interop.safetensors import Writer, tensors
from spanax.models.workloads import load
from spanax.train.data.text import tokenizer
from spanax.train.record.folder import write_records
from spanax.train.store import manifest, view

WEIGHTS = Path(__file__).parent / "weights"
KINDS = {"gpt2": "gpt2", "llama": "llama", "llama-tied": "llama", "qwen2": "llama", "qwen3": "llama", "vit": "vit"}


def copied(name: str, to: Path) -> Path:
    """A folder of weights of one's own."""
    return Path(shutil.copytree(WEIGHTS / name, to / name))


def begun(folder: Path, mesh: str = "data=1", **inputs: Any) -> spanax.Run:
    """A run that begins from a folder that was imported."""
    workload = load(str(folder), batch_size=4)
    program = spanax.trace(build=workload.build, optimizer=optax.sgd(0.1), batch=workload.batch, loss=workload.loss)
    plan = spanax.plan(program, spanax.cluster(f"cpu:{spanax.MeshShape.of(mesh).size}"), mesh=mesh)
    return spanax.start(program, plan, init=workload.init, **inputs)


def answers(name: str) -> dict[str, np.ndarray]:
    """What a model was given, images with their colours last, and what transformers answered."""
    result = {key: tensor.read() for key, tensor in tensors(WEIGHTS / f"{name}.safetensors").items()}
    assert np.abs(result["logits"]).max() > 0.1
    if name == "vit":
        result["inputs"] = result["inputs"].transpose(0, 2, 3, 1)
    return result


@pytest.mark.parametrize("name", sampled(KINDS, ["gpt2", "qwen3", "vit"]))
def test_weights_are_imported_and_exported_again(name: str, tmp_path: Path) -> None:
    done = import_weights(WEIGHTS / name, KINDS[name], tmp_path / "in")
    assert not done.left_out and view.verify(tmp_path / "in") == []
    export_weights(tmp_path / "in", KINDS[name], tmp_path / "out")
    assert digests(tmp_path / "out") == digests(WEIGHTS / name), "not the bytes that came in"
    expected, model = answers(name), imported(tmp_path / "in")
    logits = jax.jit(model)(expected["inputs"])
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4, rtol=0)
    if "greedy" in expected:
        tokens = expected["greedy"].tolist()
        (result,) = spanax.generate(model, expected["inputs"][:1], len(tokens), temperature=0, fallback=False)
        assert list(result.tokens) == tokens


@pytest.mark.parametrize("name", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "vit"))])
def test_a_run_on_a_mesh_starts_with_the_imported_logits(name: str, tmp_path: Path) -> None:
    import_weights(WEIGHTS / name, KINDS[name], tmp_path / "in")
    expected = answers(name)
    result = jax.jit(begun(tmp_path / "in", "fsdp=2,model=2").model())(jnp.asarray(expected["inputs"]))
    np.testing.assert_allclose(np.asarray(result), expected["logits"], atol=1e-4, rtol=0)


def test_names_of_a_bare_model_masks_and_a_head_that_repeats(tmp_path: Path) -> None:
    """The oldest files of GPT-2 have no prefix, their masks with them, and some the tied matrix twice."""
    folder = copied("gpt2", tmp_path)
    result = {name.removeprefix("transformer."): tensor.read() for name, tensor in tensors(folder).items()}
    (folder / "model.safetensors").unlink()
    masks = {f"h.{i}.attn.bias": np.tril(np.ones((1, 1, 32, 32), "float32")) for i in range(2)}
    result |= masks | {"lm_head.weight": result["wte.weight"]}
    with Writer(folder / "model.safetensors", result) as file:
        for name, tensor in result.items():
            file.put(name, tensor)
    done = import_weights(folder, "gpt2", tmp_path / "in")
    assert done.left_out == {"transformer.h.*.attn.bias": 2} and done.twice == ("lm_head.weight",)
    export_weights(tmp_path / "in", "gpt2", tmp_path / "out")
    written = {name: tensor.read() for name, tensor in tensors(tmp_path / "out").items()}
    assert written.keys() == result.keys() - masks.keys()
    assert all(np.array_equal(written[name], result[name]) for name in written)


def test_two_commands_from_weights_to_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Imported, trained on a mesh with the tokenizer that came along, and exported as what it was imported as."""
    text = tmp_path / "text.txt"
    text.write_text(Path(__file__).read_text())
    came, run, out = (str(tmp_path / name) for name in ("in", "run", "out"))
    cli.main(["import", str(WEIGHTS / "gpt2"), "--as", "gpt2", "--output-dir", came])
    cli.main([
        "train", came, "--data", str(text), "--steps", "2", "--seq-len", "16", "--global-batch-size", "8", "--lr",
            "1", "--output-dir", run,
        "--mesh", "fsdp=4,model=2", "--eval-batches", "1",
    ])  # fmt: skip
    cli.main(["export", run, "--as", "gpt2", "--output-dir", out, "--file-size", "1 MiB", "--json"])
    done = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert done["step"] == 2 and list(done["files"]) == ["model.safetensors"]
    before, after = (tensors(folder) for folder in (WEIGHTS / "gpt2", Path(out)))
    assert {name: (array.shape, array.dtype) for name, array in before.items()} == {
        name: (array.shape, array.dtype) for name, array in after.items()
    }
    moved = [name for name in before if not np.array_equal(before[name].read(), after[name].read())]
    assert len(moved) == len(before), "every tensor was trained"
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (WEIGHTS / "gpt2" / name).read_bytes()
    cli.main(["inspect", came, "--json"])
    assert json.loads(capsys.readouterr().out)["bytes_per_device"]["param"] == 4 * 11_904


def test_a_run_saves_the_tokenizer_that_it_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is resumed, exported and imported with the same ids, without the cache and without another training."""
    (tmp_path / "text.txt").write_text(Path(__file__).read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = ["--steps-per-call", "1", "--eval-batches", "1", "--save-every", "1", "--output-dir", "run"]
    cli.main([
        "train", "llama-nano", "--data", "text.txt", "--tokenizer", "bpe:300", "--steps", "1", "--seq-len", "16",
        "--global-batch-size", "8", "--devices", "1", *settings,
    ])  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    monkeypatch.setattr(tokenizer, "_train", lambda *args: pytest.fail("trained again"))
    cli.main(["train", "--resume", "--steps", "2", "--devices", "1", *settings])
    assert "step 2  checkpoint" in capsys.readouterr().out
    cli.main(["export", "run", "--as", "llama", "--output-dir", "out"])
    assert Path("out/tokenizer.json").read_bytes() == Path("run/tokenizer.json").read_bytes()
    assert json.loads(Path("out/tokenizer_config.json").read_text()) == {"tokenizer_class": "PreTrainedTokenizerFast"}
    cli.main(["import", "out", "--as", "llama", "--output-dir", "in"])
    saved, imported = (tokenizer.load_tokenizer(f"{folder}/tokenizer.json") for folder in ("run", "in"))
    assert saved.vocab_size == 300 == load("in").vocab_size
    assert imported.encode(b"import jax\n").tolist() == saved.encode(b"import jax\n").tolist()


def test_the_tokenizer_of_a_run_replaces_that_of_its_weights(tmp_path: Path) -> None:
    import_weights(WEIGHTS / "gpt2", "gpt2", tmp_path / "in")
    (tmp_path / "in" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    (tmp_path / "in" / "chat_template.jinja").write_text("another")
    run = begun(tmp_path / "in")
    run.save(tmp_path / "run" / "checkpoints").wait()
    original = (WEIGHTS / "gpt2" / "tokenizer.json").read_text()
    config = {"workload": str(tmp_path / "in")}
    for text, expected in (
        (original, "<|endoftext|>"),
        (original.replace('"),":299', '"</s>":299').replace(',[")",","]', ""), "</s>"),
    ):
        template = {"template": "{{ messages }}", "eos_token": expected}
        write_records(tmp_path / "run", config, "{\n}", [], tokenizer=text, chat_template=template)
        out = tmp_path / f"out of {expected.strip('</>|')}"
        export_weights(tmp_path / "run", "gpt2", out)
        assert (out / "tokenizer.json").read_text() == text
        assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
        assert json.loads((out / "tokenizer_config.json").read_text())["eos_token"] == expected


def test_a_large_file_is_exported_as_several(tmp_path: Path) -> None:
    import_weights(WEIGHTS / "qwen3" / "model.safetensors", "llama", tmp_path / "in")
    done = export_weights(tmp_path / "in", "llama", tmp_path / "out", file_bytes=20_000)
    assert list(done.files) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    before, after = tensors(WEIGHTS / "qwen3"), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name].read(), after[name].read()) for name in before)


def test_another_dtype(tmp_path: Path) -> None:
    import_weights(WEIGHTS / "llama", "llama", tmp_path / "in", dtype="float32")
    done = export_weights(tmp_path / "in", "llama", tmp_path / "out", dtype="bfloat16")
    assert done.dtypes == ("bfloat16",)
    assert digests(tmp_path / "out") == digests(WEIGHTS / "llama"), "bfloat16 is float32 with fewer bits"
    done = export_weights(tmp_path / "in", "llama", tmp_path / "wide")
    assert done.dtypes == ("float32",)
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.slow
def test_a_model_that_was_never_imported_gets_a_config(tmp_path: Path) -> None:
    """A run of a workload with a name: its config.json describes it well enough to be imported."""
    program = load("llama-nano", batch_size=8).trace(learning_rate=0.1, num_steps=1)
    run = spanax.start(program, spanax.plan(program, spanax.cluster("cpu:1"), layout="data"))
    run.save(tmp_path / "steps").wait()
    export_weights(tmp_path / "steps", "llama", tmp_path / "out", workload="llama-nano")
    import_weights(tmp_path / "out", "llama", tmp_path / "in")
    again = begun(tmp_path / "in")
    assert again.program.num_params == run.program.num_params
    for path, array in run.params().items():
        np.testing.assert_array_equal(array, again.params()[path], err_msg=path)


def test_the_destination_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "mine").write_text("")
    with pytest.raises(WriteError, match="is not empty"):
        import_weights(WEIGHTS / "gpt2", "gpt2", tmp_path / "in")
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["mine"]
    (tmp_path / "in" / "mine").unlink()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manifest, "write", full)
    with pytest.raises(WriteError, match="no space left"):
        import_weights(WEIGHTS / "gpt2", "gpt2", tmp_path / "in")
    assert list((tmp_path / "in").iterdir()) == [], "half of it was left"
