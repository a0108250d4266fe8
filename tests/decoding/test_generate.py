"""Generation equals a loop over the whole sequence, on every mesh, with every rule of sampling."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import own_kernels
import spanax
from causal import CAUSAL, Learned
from spanax.check.hlo.collectives import collectives, totals
from spanax.decoding import rows
from spanax.decoding.decoder import Decoder, called
from spanax.decoding.sampling import Sampling, draw
from spanax.errors import DecodeError, RangeError
from spanax.models import llama, moe
from spanax.plan.evaluate import evaluate

SIZES: dict[str, Any] = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32, "mlp_dim": 64}
CONFIG = llama.LlamaConfig(64, 64, **SIZES)
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3], [5, 8, 9, 7, 9, 3, 2]]


@pytest.fixture(scope="module")
def model() -> llama.Llama:
    return llama.Llama(CONFIG, nnx.Rngs(0))


def greedy(
    function: Any, model: nnx.Module, prompt: list[int], count: int, length: int = 20
) -> tuple[tuple[int, ...], list[float]]:
    """The most likely tokens and their log-probabilities, from the forward pass of `length` tokens for each."""
    ids, numbers = list(prompt), []
    forward = nnx.jit(function)
    for _ in range(count):
        logits = forward(model, jnp.array([ids + [0] * (length - len(ids))]))
        logits = (logits[0] if isinstance(logits, tuple) else logits)[0, len(ids) - 1]
        numbers.append(float(jax.nn.log_softmax(logits).max()))
        ids.append(int(logits.argmax()))
    return tuple(ids[len(prompt) :]), numbers


def test_greedy_tokens_are_those_of_the_forward_pass(model: llama.Llama) -> None:
    for prompt, result in zip(PROMPTS, spanax.generate(model, PROMPTS, 10, temperature=0), strict=True):
        tokens, log_probabilities = greedy(called, model, prompt, 10)
        assert result.tokens == tokens
        assert np.allclose(result.log_probabilities, log_probabilities, atol=1e-5)
        assert result.text is None and not result.is_stopped


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of models that drop activations, or depend on the number of tokens
@pytest.mark.parametrize("name", [name for name in CAUSAL if name != "bfloat16"])
def test_512_greedy_tokens_are_those_of_recomputation(name: str) -> None:
    """Or as many as the model has positions for."""
    case = CAUSAL[name]
    model = case.build(nnx.Rngs(0))
    inputs = {key: value[:1] for key, value in case.inputs.items() if key not in case.per_token}
    ones = dict.fromkeys(case.per_token, 1)

    def function(model: nnx.Module, tokens: Any, **given: Any) -> Any:
        given |= {key: jnp.full(tokens.shape, value) for key, value in ones.items()}
        return (case.call or called)(model, tokens, **given)

    options: dict[str, Any] = {"function": function, "inputs": inputs, "temperature": 0, "fallback": False}
    prompt, length = PROMPTS[0], 576
    try:
        (result,) = spanax.generate(model, [prompt], 512, **options)
    except (RangeError, DecodeError):  # it has fewer positions
        length = case.length
        (result,) = spanax.generate(model, [prompt], length - len(prompt), **options)
    model.eval()
    forward = partial(function, **inputs)
    assert result.tokens == greedy(forward, model, prompt, len(result.tokens), length)[0]


RULES: dict[str, Any] = {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3, "temperature": 0.8}


@pytest.mark.parametrize(("mesh", "is_gathered"), [("data=4", True), ("fsdp=4,model=2", False), ("fsdp=2", True)])
def test_samples_are_the_same_on_every_mesh_and_streamed(
    model: llama.Llama, monkeypatch: pytest.MonkeyPatch, mesh: str, is_gathered: bool
) -> None:
    """Shards that the sequences do not fill compute one that is dropped."""
    monkeypatch.setattr(rows, "are_gathered", lambda *_: is_gathered)
    options = {"max_new_tokens": 6, "seed": 5, "num_samples": 2, **RULES}
    prompts = PROMPTS[:3]
    expected = [result.tokens for result in spanax.generate(model, prompts, **options)]
    assert len(expected) == 6 and expected[0] != expected[1]
    assert [result.tokens for result in spanax.generate(model, prompts, mesh=mesh, **options)] == expected
    steps = list(spanax.generate(model, prompts, mesh=mesh, stream=True, **options))
    assert [*map(tuple, np.transpose(steps).tolist())] == expected


def test_activations_that_move_to_fused_weights_leave_them_in_the_order_of_their_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Queries, keys and values of an encoder: the fused weight stays where it is stored, with `model` along others."""
    monkeypatch.setattr(rows, "are_gathered", lambda *_: False)
    case = CAUSAL["cross attention"]
    model = case.build(nnx.Rngs(0))
    inputs = {name: np.repeat(array[:1], 4, 0) for name, array in case.inputs.items()}
    options = {"function": case.call, "inputs": inputs, "temperature": 0}
    expected, found = (spanax.generate(model, PROMPTS, 2, mesh=mesh, **options) for mesh in (None, "fsdp=2,model=2"))
    for one, other in zip(expected, found, strict=True):
        assert one.tokens == other.tokens
        assert np.allclose(one.log_probabilities, other.log_probabilities, atol=1e-5)


@pytest.mark.parametrize(
    "mesh", ["fsdp=4,model=2", *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ("fsdp=8", "model=8"))]
)
def test_a_step_moves_what_is_planned(model: llama.Llama, monkeypatch: pytest.MonkeyPatch, mesh: str) -> None:
    """Activations to stored weights; what is drawn adds a few numbers for each sequence."""
    monkeypatch.setattr(rows, "are_gathered", lambda *_: False)
    decoder = Decoder(lambda: model, called, None, (), False)
    placed = rows.Rows.of(model, decoder.derived(decoder.form_for(12, {})), 8, mesh=mesh)
    assert placed.planned is not None
    _, step = placed.planned
    state, (token, positions) = step.abstract
    num_parameters = len(decoder.parameters())
    lowered = jax.jit(placed.stepped).lower(state[:num_parameters], state[num_parameters:], [token], positions)
    (module,) = lowered.compile().runtime_executable().hlo_modules()
    moved = totals(collectives(module.as_serialized_hlo_module_proto(), step.plan.mesh))
    planned = evaluate(step.program, step.plan, spanax.cluster("cpu:8")).collectives
    for axis, kinds in planned.items():
        # XLA for CPUs reduces whole sums and slices them.
        sums = kinds.pop("all-reduce", 0) + kinds.pop("reduce-scatter", 0) * step.plan.mesh.ways([axis])
        assert moved[axis].pop("all-reduce", 0) == sums
        assert moved[axis] == kinds
    assert moved.keys() == planned.keys()


def test_an_expert_mesh_and_like() -> None:
    config = moe.MoEConfig(64, 64, **SIZES, num_experts=4, capacity_factor=None)
    model = moe.Mixtral(config, nnx.Rngs(0))
    prompts = [*PROMPTS, *PROMPTS[::-1]]
    expected = [greedy(called, model, prompt, 5)[0] for prompt in prompts]
    step = spanax.jit(lambda model, tokens: model(tokens)[0], mesh="data=2,expert=4")
    step.prepare(model, jax.ShapeDtypeStruct((8, 16), "int32"))
    results = spanax.generate(model, prompts, 5, temperature=0, like=step)
    assert [result.tokens for result in results] == expected


class WithKernels(nnx.Module):
    """Two scanned layers of a norm and attention, which are kernels of one's own if the kind is `own`."""

    def __init__(self, kind: str, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Param(jax.random.normal(rngs.params(), (64, 32)))
        self.qkv = nnx.Param(0.2 * jax.random.normal(rngs.params(), (2, 3, 32, 4, 8)))
        self.kind = kind

    def __call__(self, tokens: Any) -> Any:
        run = own_kernels.kernels(self.kind)

        def layer(x: Any, qkv: Any) -> Any:
            rows = run["norm"](x.reshape(-1, 32), jnp.ones(32)).reshape(x.shape)
            mixed = run["attention"](*jnp.einsum("btd,cdhk->cbhtk", rows, qkv))
            return x + mixed.swapaxes(1, 2).reshape(x.shape), None

        x, _ = jax.lax.scan(layer, self.embed[tokens], self.qkv[...])
        return x @ self.embed[...].T


def test_kernels_of_ones_own_compute_one_position_by_their_references() -> None:
    plain, own = (WithKernels(kind, nnx.Rngs(0)) for kind in ("plain", "own"))
    decoder = Decoder(lambda: own, called, None, (), False)
    decoder.form_for(16, {})
    assert decoder.recomputed == ()
    expected = [result.tokens for result in spanax.generate(plain, PROMPTS, 5, temperature=0)]
    results = spanax.generate(own, PROMPTS, 5, temperature=0, mesh="fsdp=2,model=2")
    assert [result.tokens for result in results] == expected


def test_each_row_ends_at_its_stop(model: llama.Llama) -> None:
    free = [result.tokens for result in spanax.generate(model, PROMPTS, 10, temperature=0)]
    stop = free[0][3], free[0][4]
    results = spanax.generate(model, PROMPTS, 10, temperature=0, stop=[stop, 63])
    assert results[0].tokens == free[0][:3] and results[0].is_stopped
    assert len(results[0].log_probabilities) == 3
    others = [result for result in results[1:] if not result.is_stopped]
    assert others and all(len(result.tokens) == 10 for result in others)
    rows = np.transpose(list(spanax.generate(model, PROMPTS, 10, temperature=0, stop=[stop], stream=True)))
    assert rows[0].tolist() == [*free[0][:5], -1, -1, -1, -1, -1]


class Letters:
    """A tokenizer of one id for each letter."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 64 for letter in text if "A" <= letter <= "Z"]

    def decode(self, ids: Any) -> str:
        return "".join(chr(each + 64) for each in ids)


def test_texts(model: llama.Llama) -> None:
    (free,) = spanax.generate(model, ["ABC"], 4, temperature=0, tokenizer=Letters())
    assert free.text == Letters().decode(free.tokens) and len(free.text) == 4
    with pytest.raises(spanax.SpanaxError, match="cannot make the stop"):
        spanax.generate(model, ["ABC"], 4, tokenizer=Letters(), stop=["a"])


def test_a_trained_model_needs_no_new_derivation(model: llama.Llama) -> None:
    """The arrays are those of the call; only another structure derives again."""
    before = spanax.generate(model, [[1, 2]], 4, temperature=0)
    old = model.head.kernel[...]
    model.head.kernel[...] = -old
    after = spanax.generate(model, [[1, 2]], 4, temperature=0)
    assert after[0].tokens == greedy(called, model, [1, 2], 4)[0] != before[0].tokens
    model.head.kernel[...] = old


def test_log_probabilities_are_those_of_a_train_step() -> None:
    model = llama.Llama(CONFIG, nnx.Rngs(1))

    @spanax.jit(mesh="fsdp=2,model=2")
    def step(model: nnx.Module, ids: jax.Array) -> Any:
        def loss(model: Any) -> Any:
            numbers = jnp.take_along_axis(jax.nn.log_softmax(model(ids[:, :-1])), ids[:, 1:, None], axis=-1)
            return -numbers.mean(), numbers[:, -12:, 0]

        (_, numbers), gradients = nnx.value_and_grad(loss, has_aux=True)(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), gradients))
        return numbers

    for seed, like in enumerate([None, step]):  # the second time, the sharded and updated arrays
        results = spanax.generate(model, [PROMPTS[0]] * 2, 12, seed=seed, like=like)
        ids = np.array([[*PROMPTS[0], *result.tokens] for result in results])
        numbers = [result.log_probabilities for result in results]
        assert np.allclose(step(model, ids), numbers, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompts": [[]]}, "prompt 0 is empty"),
        ({"prompts": []}, "no prompt"),
        ({"prompts": ["text"]}, "tokenizer="),
        ({"prompts": "text"}, "`prompts`"),
        ({"prompts": [[0.5]]}, "token ids"),
        ({"temperature": -1}, "`temperature`"),
        ({"temperature": float("nan")}, "`temperature`"),
        ({"top_k": 0}, "`top_k`"),
        ({"top_p": 1.5}, "`top_p`"),
        ({"min_p": -0.1}, "`min_p`"),
        ({"repetition_penalty": 0}, "`repetition_penalty`"),
        ({"max_new_tokens": 0}, "`max_new_tokens`"),
        ({"num_samples": True}, "`num_samples`"),
        ({"stop": [[]]}, "stop is empty"),
        ({"stop": [64]}, "`stop` has token 64"),
        ({"stop": "x"}, "`stop` is 'x'"),
        ({"prompts": [[1], [-1]]}, "`prompts` has token -1"),
        ({"model": nnx.view(Learned(nnx.Rngs(0)), deterministic=True), "max_new_tokens": 64}, "64 positions"),
    ],
)
def test_bad_input(model: llama.Llama, options: dict[str, Any], words: str) -> None:
    with pytest.raises(spanax.SpanaxError, match=words):
        spanax.generate(**{"model": model, "prompts": [[1, 2], [3]], "max_new_tokens": 2, **options})


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({"top_k": 2}, {1, 2}),
        ({"top_p": 0.6}, {1, 2}),
        ({"top_p": 0.4}, {1}),
        ({"min_p": 0.5}, {1, 2}),
        ({"temperature": 0.0}, {1}),
        ({"top_k": 3, "min_p": 0.9}, {1}),
        ({"repetition_penalty": 50.0}, {0, 2, 3}),
        ({}, {0, 1, 2, 3}),
    ],
)
def test_each_rule_keeps_its_tokens(rules: dict[str, Any], kept: set[int]) -> None:
    logits = jnp.tile(jnp.log(jnp.array([0.1, 0.5, 0.3, 0.1])) + 30.0, (400, 1))
    keys = jax.random.split(jax.random.key(0), 400)
    seen = jnp.tile(jnp.arange(4) == 1, (400, 1)) if "repetition_penalty" in rules else None
    tokens, numbers = draw(logits, keys, Sampling(**rules).checked(), seen)
    assert set(tokens.tolist()) == kept
    assert np.allclose(numbers, jnp.log(jnp.array([0.1, 0.5, 0.3, 0.1]))[tokens], atol=1e-5)
