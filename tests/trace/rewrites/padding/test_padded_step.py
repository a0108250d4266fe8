"""Padded axes: the step computes what it computes without padding, on one device and on several."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from spanax.check.parity.parity import parity
from spanax.errors import SpanaxError
from spanax.models import gpt, llama, moe
from spanax.plan.evaluate import evaluate as price
from spanax.plan.plan import Schedule
from spanax.trace.jaxpr.interpret import evaluate

ADAMW = optax.adamw(1e-2, eps=1e-3)
"""Its epsilon keeps gradients that are only rounding, such as those of the biases of keys, from becoming updates."""

TOKENS = {name: jax.ShapeDtypeStruct((8, 16), "int32") for name in ("inputs", "targets")}


def gpt_program(num_heads=5, embed_dim=40, num_layers=2, **options):
    config = gpt.GPTConfig(101, seq_len=16, num_layers=num_layers, num_heads=num_heads, embed_dim=embed_dim)
    return spanax.trace(
        build=lambda rngs: gpt.GPT(config, rngs),
        optimizer=ADAMW,
        batch=TOKENS,
        loss=gpt.loss,
        **options,
    )


def llama_program():
    config = llama.LlamaConfig(101, 16, 2, num_heads=10, num_kv_heads=5, embed_dim=40, mlp_dim=64)
    return spanax.trace(
        build=lambda rngs: llama.Llama(config, rngs),
        optimizer=ADAMW,
        batch=TOKENS,
        loss=llama.loss,
    )


def moe_program():
    config = moe.MoEConfig(64, 16, 2, num_heads=4, num_kv_heads=4, embed_dim=32, mlp_dim=48, num_experts=6)
    return spanax.trace(build=lambda rngs: moe.Mixtral(config, rngs), optimizer=ADAMW, batch=TOKENS, loss=moe.loss)


class Normalized(nnx.Module):
    """Divides each of 5 heads by its norm, which is 0 / 0 in padding, and drops those of an odd index."""

    def __init__(self, rngs):
        self.up = nnx.Param(jax.random.normal(rngs.params(), (12, 5, 4)))
        self.down = nnx.Param(jax.random.normal(rngs.params(), (5, 4, 12)))

    def __call__(self, x):
        y = jnp.einsum("bd,dhk->bhk", x, self.up[...])
        y = y / jnp.sqrt((y**2).sum(-1, keepdims=True))
        largest = y.max(1) * jnp.log(jnp.abs(y)).sum((1, 2))[:, None] + y.min(1) + y.prod(1)
        return jnp.einsum("bhk,hkd->bd", y, self.down[...]) + largest.sum(-1, keepdims=True)


def normalized_program():
    return spanax.trace(
        build=Normalized,
        optimizer=optax.adam(1e-2),
        batch=jax.ShapeDtypeStruct((8, 12), "float32"),
        loss=lambda model, x: (model(x) ** 2).mean(),
    )


def inputs(program, graph):
    """Returns the initial state and a random batch."""
    rng = np.random.default_rng(0)
    values = []
    for leaf, value in zip((*program.leaves, *program.batch), graph.body.inputs, strict=True):
        dtype = graph.avals[value].dtype
        if jnp.issubdtype(dtype, jnp.floating):
            values.append(np.abs(rng.normal(size=leaf.shape, scale=0.1)).astype(dtype))
        else:
            values.append(rng.integers(0, 64, leaf.shape).astype(dtype))
    return values


def padded(program, *multiples):
    return program.variant(padded=multiples)


def sizes(program, name):
    """Returns the sizes of the dims of an axis among all values of a step."""
    axes, graph = program.step.axes, program.step.graph
    rows = [zip(graph.shape(v), axes.of(v), strict=True) for v in range(len(graph.avals))]
    return {size for row in rows for size, axis in row if axis == name}


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(
    ("make", "multiples"),
    [
        (llama_program, (("heads", 4), ("vocab", 8))),
        (normalized_program, (("hidden", 4), ("heads", 4), ("mlp", 4))),
    ],
)
def test_a_padded_step_computes_the_same(make, multiples):
    program = make()
    multiples = tuple(pair for pair in multiples if pair[0] in program.step.axes.names.values())
    other = padded(program, *multiples)
    for name, number in multiples:
        true = min(sizes(program, name))
        assert any(size % number == 0 for size in sizes(other, name) - sizes(program, name)), (name, true)
    values = inputs(program, program.step.graph)
    outs = [jax.jit(lambda *args, g=each.step.graph: evaluate(g, args))(*values) for each in (program, other)]
    for expected, actual in zip(*outs, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=1e-5)
    assert all(np.isfinite(np.asarray(out)).all() for out in outs[1])


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("mode", ["clip", "fill", "promise_in_bounds"])
def test_indices_beyond_an_axis_do_not_reach_its_padding(mode):
    class Lookup(nnx.Module):
        def __init__(self, rngs):
            self.kernel = nnx.Param(jax.random.normal(rngs.params(), (8, 5)))

        def __call__(self, x, index):
            logits = x @ self.kernel[...]
            return logits.at[jnp.arange(8), index].get(mode=mode, fill_value=7.0)

    batch = {"x": jax.ShapeDtypeStruct((8, 8), "float32"), "i": jax.ShapeDtypeStruct((8,), "int32")}
    program = spanax.trace(
        build=Lookup, optimizer=optax.sgd(0.1), batch=batch, loss=lambda m, b: (m(b["x"], b["i"]) ** 2).mean()
    )
    name = next(leaf for leaf in program.leaves if leaf.path == "kernel").axes[1]
    other = padded(program, (name, 4))
    assert 8 in sizes(other, name)
    values = inputs(program, program.step.graph)
    index = next(i for i, leaf in enumerate((*program.leaves, *program.batch)) if leaf.path == "i")
    values[index] = np.asarray([0, 1, 2, 3, 4, *((3, 2, 1) if mode == "promise_in_bounds" else (5, 7, 9))], "int32")
    expected, actual = (evaluate(each.step.graph, values) for each in (program, other))
    for left, right in zip(expected, actual, strict=True):
        np.testing.assert_allclose(right, left, rtol=1e-5)


def trained(program, plan, steps=2):
    """Returns the losses of some steps, and the parameters after them."""
    run = spanax.start(program, plan)
    rng = np.random.default_rng(0)
    batches = [{name: rng.integers(0, 64, (8, 16)).astype("int32") for name in TOKENS} for _ in range(steps)]
    losses = [float(run.step(batch)["loss"]) for batch in batches]
    return losses, {path: np.asarray(array) for path, array in run.arrays("param").items()}


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(
    ("make", "layout", "mesh", "pad"),
    [
        (gpt_program, "data+tensor", "data=2,model=4", "heads,vocab"),
        (moe_program, "expert", "data=2,expert=4", "experts"),
    ],
)
def test_a_padded_layout_equals_one_device(make, layout, mesh, pad):
    program = make()
    plan = spanax.plan(program, "cpu:8", layout=layout, mesh=mesh, pad=pad)
    assert "padded to" in plan.why and spanax.Plan.from_json(plan.to_json()) == plan
    losses, params = trained(program, plan)
    expected_losses, expected_params = trained(program, spanax.plan(program, "cpu:1", layout="data"))
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for path, expected in expected_params.items():
        assert params[path].shape == expected.shape
        np.testing.assert_allclose(params[path], expected, rtol=1e-5, atol=1e-5, err_msg=path)


def test_a_plan_states_what_it_pads_and_only_on_request():
    program = gpt_program(25, 100)
    plain = spanax.plan(program, "cpu:8", layout="tensor", mesh="model=8")
    plan = spanax.plan(program, "cpu:8", layout="tensor", mesh="model=8", pad=["heads"])
    assert plain.schedule.padded == () and "padded" not in plain.to_json()
    assert plan.schedule.padded == (("heads", 8),)
    assert "25 heads padded to 32 over model=8" in plan.why
    assert plan["blocks.attention.qkv.kernel"].local_shape == plain["blocks.attention.qkv.kernel"].local_shape
    priced = [price(program, each, spanax.cluster("cpu:8")).candidate for each in (plain, plan)]
    assert priced[1].flops < priced[0].flops


@pytest.mark.parametrize(
    ("pad", "message"),
    [("batch", "cannot pad axis 'batch'"), ("embed", "no mesh axis shards"), ("head", "cannot pad axis 'head'")],
)
def test_axes_that_cannot_be_padded_raise(pad, message):
    with pytest.raises(SpanaxError, match=message):
        spanax.plan(gpt_program(), "cpu:4", layout="tensor", mesh="model=4", pad=pad)


@pytest.mark.usefixtures("devices")
def test_stages_of_a_pipeline_pad_as_one_device_computes():
    """Axes are padded inside of the stages; of three layers in two stages, the rows are padded as well."""
    program = gpt_program(num_layers=3, microbatches=4)
    schedule = Schedule(microbatches=4, pipeline="zero-bubble")
    plan = spanax.plan(program, "cpu:8", mesh="pipe=2,model=4", schedule=schedule, pad="heads,vocab")
    assert plan.schedule.padded == (("heads", 4), ("vocab", 4)) and "5 heads padded to 8" in plan.why
    result = parity(program, plan, steps=2)
    assert result.passes, [result.worst(group) for group in ("loss", "gradients", "parameters")]
