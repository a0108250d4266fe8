"""Named workloads have the requested sizes; sizes that cannot be changed raise."""

import pytest

import spanax
from spanax.models.workloads import WORKLOADS, load


def shapes(workload: spanax.Workload) -> dict[str, tuple[int, ...]]:
    program = workload.trace(learning_rate=1e-3, num_steps=10)
    return {leaf.path: leaf.shape for leaf in (*program.leaves, *program.batch)}


@pytest.mark.parametrize("name", ["mixtral-8x7b", "vit-1b", pytest.param("resnet50", marks=pytest.mark.slow)])
def test_every_dim_of_a_workload_has_an_axis(name):
    axes = load(name).trace(learning_rate=1e-4, num_steps=10).step.axes
    assert axes.coverage == 1.0 and not axes.unknown


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_of_another_batch_size(name):
    batch = load(name, batch_size=6).batch
    assert {leaf.shape[0] for leaf in batch.values()} == {6}


def test_a_gpt_of_another_depth_and_width_keeps_its_heads():
    result_shapes = shapes(load("gpt2", num_layers=3, embed_dim=256, seq_len=64))
    assert result_shapes["blocks.attention.qkv.kernel"] == (3, 256, 3, 4, 64)
    assert result_shapes["blocks.up.kernel"] == (3, 256, 1024)
    assert result_shapes["inputs"] == (8, 64)


def test_a_llama_of_another_width_keeps_its_keys_and_the_shape_of_its_mlp():
    result_shapes = shapes(load("llama3-8b", num_layers=2, embed_dim=2048))
    assert result_shapes["blocks.attention.q.kernel"] == (2, 2048, 16, 128)
    assert result_shapes["blocks.attention.k.kernel"] == (2, 2048, 8, 128)
    assert result_shapes["blocks.mlp.up.kernel"] == (2, 2048, 7168)


def test_experts_and_images_of_another_depth_and_width():
    assert shapes(load("mixtral-8x7b", num_layers=2, embed_dim=1024))["blocks.experts.up"] == (2, 8, 1024, 3584)
    assert shapes(load("vit-1b", num_layers=2, embed_dim=704))["blocks.up.kernel"] == (2, 704, 3072)


@pytest.mark.parametrize(
    ("name", "sizes", "says"),
    [
        (
            "gpt2",
            {"embed_dim": 100},
            "--embed is 100; expected a multiple of 64.*\n  where: heads of 64\n  fix: --embed 64 or",
        ),
        ("gpt2", {"embed_dim": 10}, "fix: --embed 64$"),
        ("llama3-8b", {"embed_dim": 1500}, "where: heads of 128 on 8 keys and values\n  fix: --embed 1024 or 2048"),
        ("resnet50", {"num_layers": 3}, "the number of layers of 'resnet50' is fixed"),
        ("resnet50", {"embed_dim": 64}, "the width of 'resnet50' is fixed"),
        ("vit-1b", {"seq_len": 64}, "the sequence length of 'vit-1b' is fixed"),
        ("gpt2", {"num_layers": 0}, "num_layers is 0; expected an integer >= 1"),
    ],
)
def test_impossible_sizes_raise(name, sizes, says):
    with pytest.raises(spanax.SpanaxError, match=says):
        load(name, **sizes)


SIZES_FILE = """
import jax, spanax
from flax import nnx

def workload(num_layers=1, batch_size=4):
    return spanax.Workload(build=lambda rngs: nnx.Sequential(*[nnx.Linear(8, 8, rngs=rngs)] * num_layers),
                           batch=jax.ShapeDtypeStruct((batch_size, 8), "float32"), loss=lambda model, x: model(x).sum(),
                           num_steps=num_layers)
"""


def test_a_function_of_a_file_takes_the_sizes_it_knows(tmp_path):
    (tmp_path / "own_sizes.py").write_text(SIZES_FILE)
    assert load(f"{tmp_path}/own_sizes.py:workload", num_layers=3).num_steps == 3
    with pytest.raises(spanax.SpanaxError, match="the width of .* is fixed") as caught:
        load(f"{tmp_path}/own_sizes.py:workload", embed_dim=64)
    assert "a function that takes embed_dim" in str(caught.value)


@pytest.mark.parametrize("name", WORKLOADS)
def test_only_nano_image_workloads_have_data(name):
    """Images are not included: only the nano models have synthetic training and validation images."""
    workload = load(name)
    is_of_images = "images" in workload.batch
    assert (workload.source is None) == (is_of_images and "nano" not in name)
    assert (workload.validation is not None) == (is_of_images and "nano" in name)


def test_text_models_keep_their_vocabulary_and_nano_ones_take_the_tokenizers():
    assert load("llama3-8b", vocab_size=1000).vocab_size == 128_256
    assert load("llama-nano", vocab_size=1000).vocab_size == 1000
    assert load("mixtral-8x7b").tokenizer == "bpe:32000"
