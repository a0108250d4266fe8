"""Cut: a loop over microbatches in pieces, by what each value needs."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import spanax
from spanax.errors import SpanaxError
from spanax.models import gpt
from spanax.trace.jaxpr.loops import split_backward
from spanax.trace.pipeline.partition import pipeline_partition
from spanax.trace.program import Program

CONFIG = gpt.GPTConfig(32, seq_len=8, num_layers=4, num_heads=2, embed_dim=16, dropout=0.1)


def traced(compute_dtype: str | None = None, remat: str | None = None, accumulate: str = "exact") -> Program:
    return spanax.trace(
        build=lambda rngs: gpt.GPT(CONFIG, rngs), optimizer=optax.adamw(1e-3), batch=gpt.example_batch(8, 8),
        loss=gpt.loss, microbatches=4, compute_dtype=compute_dtype, remat=remat, accumulate=accumulate,
    )  # fmt: skip


def names(ops: Any) -> list[str]:
    return [op.name for op in ops]


def test_counts_are_updated_with_their_layers_or_on_the_first_stage() -> None:
    pieces = pipeline_partition(traced(accumulate="mean").step, 4)
    assert len(pieces.layer_states) == 2 and len(pieces.states) == pieces.num_front_states == 1
    # Its value before is what the end makes the same mask from.
    assert pieces.ridden == (pieces.states[0].before,)


@pytest.mark.parametrize("remat", [None, "full"])
def test_a_split_backward_pass_divides_the_matmuls(remat: str | None) -> None:
    partition = pipeline_partition(traced(remat=remat).step, 4)
    two = split_backward(partition.backward)
    again = 5 if remat else 0  # qkv, scores, weighted values, the projection of heads, up
    first, second = (names(ops).count("dot_general") for ops in (two.first, two.second))
    assert second == 4, "the gradients of four weights"
    assert first == 8 + again, "four inputs of weights, and queries, keys, values and weights of attention"
    assert len(set(two.as_written.values())) == len(two.as_written)


def test_a_step_without_layers_is_refused() -> None:
    program = spanax.trace(
        build=lambda rngs: nnx.Linear(8, 8, rngs=rngs), optimizer=optax.sgd(0.1), microbatches=4,
        batch=jax.ShapeDtypeStruct((8, 8), "float32"), loss=lambda model, x: (model(x) ** 2).mean(),
    )  # fmt: skip
    with pytest.raises(SpanaxError, match="no loop over layers that could be divided"):
        pipeline_partition(program.step, 4)


class Watched(nnx.Module):
    """Adds a penalty on all layers' weights at once, outside of their loop."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = spanax.Stack(lambda rngs: nnx.Linear(8, 8, rngs=rngs), 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.blocks(x)


def test_functions_of_all_layer_weights_are_computed_before_the_loop() -> None:
    program = spanax.trace(
        build=Watched, optimizer=optax.sgd(0.1), microbatches=4, batch=jax.ShapeDtypeStruct((8, 8), "float32"),
        accumulate="mean",
        loss=lambda model, x: (model(x) ** 2).mean() + 1e-2 * jnp.square(model.blocks.kernel[...]).sum(),
    )  # fmt: skip
    partition = pipeline_partition(program.step, 4)
    assert "reduce_sum" in names(partition.prepared_ops) and partition.prepared
    assert any("always" in item.parts for item in partition.sums)
