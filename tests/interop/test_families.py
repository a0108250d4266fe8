"""Families as tables: what transformers computes, the same bytes again, and the user's own class without a table."""

import json
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import own_models
import spanax
from drawn import INPUTS, ORACLES, drawn
from loaded import digests, imported
from sampling import sampled
from spanax import cli
from spanax.errors import WeightsError, WorkloadError
from spanax.interop import export_weights, import_weights
from spanax.interop.configs import families, read_config
from spanax.interop.hf_import import match_weights, params_of
from spanax.interop.loaded_model import load_model
from spanax.interop.mapping import Array, arrays_of
from spanax.interop.own_class.groups import words
from spanax.interop.own_class.match import Rows, match_own
from spanax.interop.safetensors import tensors
from spanax.models.imported import model_class
from spanax.models.workloads import load
from spanax.train.state.weights import Source

WEIGHTS = Path(__file__).parent / "weights"
MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"
KNOWN: dict[str, Any] = json.loads(ORACLES.read_text())


def into(kind: str) -> str | None:
    """The class of a family in the examples; None if it is built in."""
    example = families()[kind].example
    return None if example is None else str(MODELS / example)


@cache
def model_of(name: str) -> tuple[Any, list[Array]]:
    """What builds the model of an oracle or of a folder of weights, and its arrays by the table of its family."""
    config = KNOWN[name]["config"] if name in KNOWN else json.loads((WEIGHTS / name / "config.json").read_text())
    kind = config["model_type"]
    family, settings = read_config(folder_of(config), kind, into(kind))
    build = partial(model_class(family.model, into(kind)).build, settings)
    return build, arrays_of(family, params_of(build))


def folder_of(config: Mapping[str, Any], weights: Mapping[str, np.ndarray] | None = None) -> Path:
    """A new folder with a config.json, and with weights."""
    FOLDERS.append(FOLDERS[0] / str(len(FOLDERS)))
    FOLDERS[-1].mkdir()
    (FOLDERS[-1] / "config.json").write_text(json.dumps(config))
    if weights is not None:
        save_file(dict(weights), FOLDERS[-1] / "model.safetensors", metadata={"format": "pt"})
    return FOLDERS[-1]


FOLDERS: list[Path] = []


@pytest.fixture(autouse=True, scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    FOLDERS[:] = [tmp_path_factory.mktemp("folders")]


@pytest.mark.parametrize("name", sampled(KNOWN, ["gemma3_text", "mixtral", "phi3", "t5"]))
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    config = KNOWN[name]["config"]
    kind = config["model_type"]
    _, arrays = model_of(name)
    folder = folder_of(config, {each: drawn(each, array.tensor_shape) for array in arrays for each in array.names})
    import_weights(folder, kind if into(kind) else None, tmp_path / "in", into=into(kind))
    tokens = jnp.asarray(INPUTS)
    inputs = (tokens, tokens[:, ::-1]) if kind == "t5" else (tokens,)
    result = jax.jit(imported(tmp_path / "in"))(*inputs)
    logits = result[0] if kind == "mixtral" else result
    np.testing.assert_allclose(logits[:, -1, :6], KNOWN[name]["logits"], atol=1e-5, rtol=1e-5)
    export_weights(tmp_path / "in", families()[kind].model, tmp_path / "out")
    assert digests(tmp_path / "out") == digests(folder)
    if kind == "t5":
        with pytest.raises(WorkloadError, match="T5 takes answer_BT besides tokens"):
            load_model(tmp_path / "in")


GEMMA_3 = {
    "vocab_size": 262_144, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
    "hidden_size": 1152, "intermediate_size": 6912, "sliding_window": 512, "sliding_window_pattern": 6,
    "rope_theta": 1_000_000, "rope_local_base_freq": 10_000, "rope_scaling": None, "final_logit_softcapping": None,
}  # fmt: skip
FLAN_T5 = {
    "vocab_size": 32_128, "num_layers": 8, "num_heads": 6, "d_model": 512, "d_kv": 64, "d_ff": 1024,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "config", "num_params", "settings"),
    [
        # Sources: config.json of google/gemma-3-1b-it and google/flan-t5-small; the paper of Gemma 3, table 1.
        ("gemma3_text", GEMMA_3, 999_885_952, {"full_every": 6, "rope_theta": 1e6, "window_rope_theta": 1e4}),
        ("t5", FLAN_T5, 76_961_152, {"scaled_outputs": False, "tied_embeddings": False}),
    ],
)
def test_the_config_of_an_older_transformers_is_read(
    kind: str, config: dict[str, Any], num_params: int, settings: dict[str, Any]
) -> None:
    family, ours = read_config(folder_of(config | {"model_type": kind}), kind, into(kind))
    params = params_of(partial(model_class(family.model, into(kind)).build, ours))
    assert sum(int(np.prod(shape)) for shape in params.values()) == num_params
    assert {key: getattr(ours, key) for key in settings} == settings


NAMES = {"as they are": True, "without the names of the family": False, "renamed": False}


@pytest.mark.parametrize("how", NAMES)
def test_names_and_shapes_match_as_the_tables_or_not_at_all(how: str) -> None:
    """Every family, matched without its table. A match is never a wrong one, whatever the tensors are called."""
    for name in [*KNOWN, *(path.name for path in WEIGHTS.iterdir() if path.is_dir())]:
        build, expected = model_of(name)
        rename: Callable[[str], str] = renamed if how == "renamed" else str
        owners = {rename(each): array for array in expected for each in array.names}
        files: Any = {
            each: SimpleNamespace(name=each, shape=array.tensor_shape, dtype="float32", read=lambda: np.zeros(1))
            for each, array in owners.items()
        }
        kind = name.partition("-")[0]
        family = families()[kind] if NAMES[how] else None
        model = nnx.eval_shape(lambda build=build: build(nnx.Rngs(0)))
        arrays, _, problems = match_own(model, files, family, Rows(), name)
        table = {array.path: array for array in expected}
        for array in arrays:
            by_table = table[array.path]
            assert array.names == tuple(map(rename, by_table.names)), f"{name}: {array.path}"
            numbers = np.arange(np.prod(array.shape)).reshape(array.shape)
            pairs = zip(array.views(numbers), by_table.views(numbers), strict=True)
            for (_, view), (_, other) in pairs:
                np.testing.assert_array_equal(view.reshape(-1), other.reshape(-1), f"{name}: {array.path}")
        assert len(arrays) == len(table) or problems
        if kind == "gpt2":  # most of its shapes differ, but (3 H K) may be any order of the three
            assert len(arrays) > 15 and not any(".qkv." in array.path for array in arrays)
        if NAMES[how] and kind not in ("vit", "gpt2"):  # theirs or ours are queries, keys and values in one
            assert not problems, f"{name}: {problems[0]}"


def renamed(name: str) -> str:
    """A name whose parts mean nothing."""
    parts = name.split(".")
    return (
        ".".join(part if part.isdecimal() else f"z{sum(part.encode()) % 997}" for part in parts[:-1]) + f".{parts[-1]}"
    )


OWN = Path(own_models.__file__)


@pytest.mark.parametrize("name", ["Listed", "Stacked"])
def test_weights_are_imported_into_a_class_of_ones_own(name: str, tmp_path: Path) -> None:
    import_weights(WEIGHTS / "llama", None, tmp_path / "in", into=f"{OWN}:{name}", dtype="float32")
    program = load(f"{OWN}:{name.lower()}").trace(learning_rate=0.1, num_steps=1)
    plan = spanax.plan(program, spanax.cluster("cpu:1"), layout="data")
    params = spanax.start(program, plan, init=tmp_path / "in").params()
    theirs = {key: np.asarray(tensor.read(), "float32") for key, tensor in tensors(WEIGHTS / "llama").items()}
    layers = [{key.partition(".1.")[2]: value for key, value in theirs.items() if ".1." in key}][0]
    expected = {
        "attn_norm.w": layers["input_layernorm.weight"],
        "wq.kernel": layers["self_attn.q_proj.weight"].T,
        "wk.kernel": layers["self_attn.k_proj.weight"].T.reshape(16, 2, 4),
        "wv.kernel": layers["self_attn.v_proj.weight"].T.reshape(16, 2, 4),
        "wo.kernel": layers["self_attn.o_proj.weight"].T.reshape(4, 4, 16),
        "ffn_norm.scale": layers["post_attention_layernorm.weight"],
        "gate": layers["mlp.gate_proj.weight"].T,
        "up.kernel": layers["mlp.up_proj.weight"].T,
        "down.kernel": layers["mlp.down_proj.weight"].T,
    }
    for path, value in expected.items():
        ours = params[f"layers.1.{path}"] if name == "Listed" else params[f"layers.{path}"][1]
        np.testing.assert_array_equal(ours, value, err_msg=path)
    np.testing.assert_array_equal(params["tok_embed.embedding"], theirs["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["lm_head.kernel"], theirs["lm_head.weight"].T)
    np.testing.assert_array_equal(params["ln_f.w"], theirs["model.norm.weight"])


@pytest.mark.parametrize(
    ("first", "is_transposed"), [((8, 8), True), ((12, 8), True), ((8, 12), False)], ids=["none", "torch", "Conv1D"]
)
def test_a_square_matrix_is_stored_as_the_other_matrices(first: tuple[int, int], is_transposed: bool) -> None:
    width = max(first)
    shapes = {"first.weight": first, "first.bias": (width,), "second.weight": (8, 8)}
    files: Any = {name: SimpleNamespace(name=name, shape=shape, dtype="float32") for name, shape in shapes.items()}
    model = nnx.eval_shape(lambda: own_models.Square(nnx.Rngs(0), width))
    arrays, _, problems = match_own(model, files, None, Rows(), "here")
    assert not problems
    dims = {array.path: array.dims for array in arrays}
    assert dims["second.kernel"] == ("B A -> A B" if is_transposed else "A B -> A B")


NET = {
    "conv.weight": (8, 3, 3, 3), "conv.bias": (8,), "bn.weight": (8,), "bn.bias": (8,), "bn.running_mean": (8,),
    "bn.running_var": (8,), "square": (8, 8), "classifier.weight": (10, 8), "classifier.bias": (10,),
}  # fmt: skip
ROWS = """
skip = ["classifier.*"]

[tensors]
"square" = ["square", "B A -> A B"]
"head.kernel" = []
"head.bias" = []
"""


def test_rows_say_what_names_and_shapes_do_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = {name: drawn(name, shape) for name, shape in NET.items()}
    folder = folder_of({}, weights | {"bn.num_batches_tracked": np.zeros((), "int64")})
    (tmp_path / "rows.toml").write_text(ROWS)
    arguments = ["import", str(folder), "--into", f"{OWN}:Net", "--output-dir", str(tmp_path / "in")]
    with pytest.raises(WeightsError, match="5 arrays or tensors do not match"):
        import_weights(folder, None, tmp_path / "in", into=f"{OWN}:Net")
    cli.main([*arguments, "--dry-run"])
    shown = capsys.readouterr().out
    assert "not matched: square [8, 8] may be square as A B -> A B or B A -> A B" in shown
    assert "not matched: head.kernel [8, 5] fits no tensor that is left" in shown
    assert not (tmp_path / "in").exists()
    arguments += ["--map", str(tmp_path / "rows.toml")]
    cli.main([*arguments, "--dry-run", "--json"])
    matches = json.loads(capsys.readouterr().out)
    assert not (tmp_path / "in").exists() and not matches["not_matched"]
    assert matches["left_out"] == {"bn.num_batches_tracked": 1, "classifier.weight": 1, "classifier.bias": 1}
    cli.main(arguments)
    matched = match_weights(folder, None, into=f"{OWN}:Net", mapping=tmp_path / "rows.toml")
    assert {array.path for array in matched.arrays} == {
        "conv.kernel", "conv.bias", "bn.scale", "bn.bias", "bn.mean", "bn.var", "square",
    }  # fmt: skip
    by_path = {array.path: array for array in matched.arrays}
    assert by_path["conv.kernel"].names == ("conv.weight",) and by_path["conv.kernel"].tensor_shape == (8, 3, 3, 3)
    assert by_path["bn.mean"].names == ("bn.running_mean",)
    read = Source.of(tmp_path / "in").read(
        {"conv.kernel": np.empty((3, 3, 3, 8), "f"), "square": np.empty((8, 8), "f")}
    )
    np.testing.assert_array_equal(read["conv.kernel"], weights["conv.weight"].transpose(2, 3, 1, 0))
    np.testing.assert_array_equal(read["square"], weights["square"].T)


def test_words_that_place_a_norm_are_not_dropped() -> None:
    assert words("layers.*.input_layernorm") == ("input", "norm") != words("layers.*.post_attention_layernorm")
