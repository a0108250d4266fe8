"""Weights in and out: what transformers answers, the same bytes again, and runs that begin from them."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import save_file

import spanax
from sampling import sampled
from spanax import cli
from spanax.errors import WriteError
from spanax.interop import export_weights, import_weights
from spanax.interop.configs import config_json, family_of, read_config
from spanax.interop.safetensors import Writer, tensors
from spanax.models.workloads import load
from spanax.train.data.text import tokenizer
from spanax.train.record.folder import write_records
from spanax.train.state.weights import Source
from spanax.train.store import manifest, view

WEIGHTS = Path(__file__).parent / "weights"
KINDS = {"gpt2": "gpt2", "llama": "llama", "llama-tied": "llama", "qwen2": "llama", "qwen3": "llama", "vit": "vit"}


def digests(folder: Path) -> dict[str, str]:
    """What every file of a folder holds."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


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


def imported(folder: Path) -> nnx.Module:
    """Our model with the weights of a folder, without the machinery around it."""
    graph, state = nnx.split(nnx.eval_shape(lambda: load(str(folder)).build(nnx.Rngs(0))))
    source = Source.of(folder)
    flat = nnx.to_flat_state(state)
    for path, variable in flat:
        paths = [".".join(map(str, path))]
        if paths[0] not in source.saved:
            first, *rest = map(str, path)
            paths = [".".join((first, str(number), *rest)) for number in range(variable.shape[0])]
        targets = {path: np.empty(variable.shape[len(paths) > 1 :], source.saved[path].split("[")[0]) for path in paths}
        arrays = [np.asarray(array, "float32") for array in source.read(targets).values()]
        variable.set_value(jnp.stack(arrays) if len(paths) > 1 else jnp.asarray(arrays[0]))
    return nnx.merge(graph, nnx.from_flat_state(flat))


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


GEMMA = {
    "vocab_size": 96, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 100.0, "dtype": "float32",
    "model_type": "gemma", "num_key_value_heads": 1, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True,
}  # fmt: skip


def random_tensors() -> dict[str, np.ndarray]:
    """Random weights of a Gemma, under the names of Hugging Face."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (96, 16), "norm": (16,)}
    for layer in (f"layers.{number}." for number in range(2)):
        shapes |= {f"{layer}{norm}_layernorm": (16,) for norm in ("input", "post_attention")}
        shapes |= {f"{layer}mlp.{item}_proj": (24, 16) for item in ("gate", "up")} | {f"{layer}mlp.down_proj": (16, 24)}
        shapes |= {f"{layer}self_attn.q_proj": (32, 16), f"{layer}self_attn.o_proj": (16, 32)}
        shapes |= {f"{layer}self_attn.{item}_proj": (8, 16) for item in "kv"}
    return {f"model.{key}.weight": rng.normal(0, 0.3, shape).astype("float32") for key, shape in shapes.items()}


def expected_logits(weights: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """The logits of one text in float64, from the paper (arXiv 2403.08295)."""
    num_tokens = len(tokens)
    get = lambda key: weights[f"{key}.weight"].astype(float)  # noqa: E731

    def norm(x: np.ndarray, key: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (get(key) + 1)

    def rotated(x: np.ndarray) -> np.ndarray:
        angles = np.outer(np.arange(num_tokens), 100.0 ** (-np.arange(0, 8, 2) / 8))[:, None]
        first, second = x[..., :4], x[..., 4:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    x = get("model.embed_tokens")[tokens] * 4.0  # the root of 16
    for layer in ("model.layers.0.", "model.layers.1."):
        attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
        h = norm(x, f"{layer}input_layernorm")
        q, k, v = ((h @ get(f"{attention}{item}_proj").T).reshape(num_tokens, -1, 8) for item in "qkv")
        k, v = (np.repeat(item, 4, axis=1) for item in (rotated(k), v))
        scores = np.einsum("thk,shk->hts", rotated(q), k) / np.sqrt(8)
        scores[:, ~np.tri(num_tokens, dtype=bool)] = -np.inf
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        x = x + np.einsum("hts,shk->thk", shares, v).reshape(num_tokens, 32) @ get(f"{attention}o_proj").T
        h = norm(x, f"{layer}post_attention_layernorm")
        gate, up = h @ get(f"{mlp}gate_proj").T, h @ get(f"{mlp}up_proj").T
        active = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        x = x + (active * up) @ get(f"{mlp}down_proj").T
    return norm(x, "model.norm") @ get("model.embed_tokens").T


def test_gemma_equals_its_paper(tmp_path: Path) -> None:
    """The other families have answers of transformers in `weights`."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    weights = random_tensors()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(GEMMA))
    import_weights(folder, "gemma", tmp_path / "in")
    tokens = np.random.default_rng(1).integers(0, 96, (2, 12))
    expected = np.stack([expected_logits(weights, text) for text in tokens])
    assert np.abs(expected).max() > 1
    logits = jax.jit(imported(tmp_path / "in"))(tokens)
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=1e-4)
    export_weights(tmp_path / "in", "llama", tmp_path / "out")
    assert digests(tmp_path / "out") == digests(folder)
    family, config = read_config(folder, "gemma")
    (folder / "config.json").write_text(json.dumps(config_json(family, config, "float32")))
    assert read_config(folder, "llama") == (family, config) and family_of("llama", config) == family


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
