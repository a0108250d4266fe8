"""Quantized matmuls: the numbers of Qwix's own training, which matmuls are chosen, and what is stored for gradients."""

import builtins
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qwix
from flax import nnx

import spanax
from sampling import sampled
from spanax.errors import SpanaxError
from spanax.models.workloads import load
from spanax.trace.jaxpr.graph import CALLS, from_jaxpr
from spanax.trace.rewrites.matmul_dtype import MatmulDtypes
from spanax.trace.rewrites.pure_loss import pure_function
from spanax.trace.rewrites.quantized_matmul import RECIPES, quantized_matmul
from spanax.trace.rewrites.weight_matmuls import weight_matmuls

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:qwix")


class Net(nnx.Module):
    """Matmuls with one and with two contracted dims, and logits that are not quantized."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.LinearGeneral(16, (4, 8), rngs=rngs)
        self.down = nnx.LinearGeneral((4, 8), 16, axis=(-2, -1), rngs=rngs)
        self.head = nnx.Linear(16, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.down(jnp.sin(self.up(x))))


def squared(model: nnx.Module, x: jax.Array) -> jax.Array:
    return (model(x) ** 2).mean()


CELLS = [("int8", "float32"), ("int8", "bfloat16"), ("fp8", "float32"), ("fp8", "bfloat16")]


@pytest.mark.parametrize(("name", "dtype"), sampled(CELLS, CELLS[:1]))
def test_loss_and_gradients_are_those_of_qwix(devices: Any, name: str, dtype: str) -> None:
    recipe = RECIPES[name]
    kinds = {f"{kind}_calibration_method": recipe.calibration for kind in ("weight", "act", "bwd")}
    dtypes = {"weight_qtype": recipe.operand, "act_qtype": recipe.operand, "bwd_qtype": recipe.gradient}
    rule = qwix.QtRule(module_path="up|down", **dtypes, **kinds)
    x = jax.random.normal(jax.random.key(0), (2, 6, 16), dtype)
    model = Net(nnx.Rngs(0))
    model = nnx.merge(nnx.graphdef(model), jax.tree.map(lambda array: array.astype(dtype), nnx.state(model)))
    expected = nnx.jit(nnx.value_and_grad(squared))(qwix.quantize_model(model, qwix.QtProvider([rule]), x), x)
    plain = nnx.jit(nnx.value_and_grad(squared))(model, x)

    value, params, rest = pure_function(
        lambda model, x: (squared(model, x), {}), MatmulDtypes(None, name), model, nnx.Param
    )
    (loss, _), gradients = jax.jit(jax.value_and_grad(value, has_aux=True))(params, rest, x)

    def is_like(other: tuple[Any, Any]) -> bool:
        bound = 1e-6 if dtype == "float32" else 1e-2
        close = lambda a, b: jnp.abs(a - b).max() <= bound * jnp.abs(b).max()  # noqa: E731
        return jax.tree.all(jax.tree.map(close, (loss, gradients), other))

    assert is_like(expected) and not is_like(plain)


def test_tiles_are_of_nvfp4(devices: Any) -> None:
    """Of every 16 elements the largest has 2 significant bits at most, and of a scale 4."""
    x = np.random.default_rng(0).normal(size=(3, 32)).astype(np.float32) * [[1e-6], [1.0], [1e4]]
    numbers = (((1,), (0,)), ((), ()))
    found = np.asarray(quantized_matmul(jnp.asarray(x), jnp.eye(32), numbers, RECIPES["nvfp4"]))
    tiles = (found / np.abs(x).max(1, keepdims=True) * 6 * 448).reshape(3, 2, 16)
    scales = np.abs(tiles).max(2, keepdims=True) / 6
    assert len(np.unique(np.abs(np.round(tiles / scales, 3)))) <= 8
    assert np.allclose(np.frexp(scales)[0] * 16, np.round(np.frexp(scales)[0] * 16), atol=1e-3)
    assert np.abs(found - x).max(1).tolist() < (np.abs(x).max(1) / 6).tolist()


W = jax.ShapeDtypeStruct((16, 16), "float32")


def scanned(weights: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, w: (jnp.sin(x @ w.T.astype("float32")), None), x, jnp.stack([weights["a"]] * 2))[0]


def routed(weights: Any, x: Any) -> Any:
    gates, chosen = jax.lax.top_k(jax.nn.softmax(x @ weights["a"]), 2)
    return (gates * chosen).sum() * (jnp.sin(x @ weights["b"]) @ weights["c"])


def attended(weights: Any, x: Any) -> Any:
    q, k = x @ weights["a"], jax.checkpoint(lambda x: x @ weights["b"][:, ::-1])(x)
    return jax.nn.softmax(q @ k.T) @ x @ weights["c"]


CHOSEN: dict[str, tuple[Callable[..., Any], Sequence[str]]] = {
    "logits stay": (lambda weights, x: jnp.sin(x @ weights["a"]) @ weights["c"], ["a"]),
    "weights of layers": (lambda weights, x: scanned(weights, x) @ weights["c"], ["a"]),
    "routers stay": (routed, ["b"]),
    "scores stay": (attended, ["a", "b"]),
    "products of weights stay": (lambda weights, x: (x @ (weights["a"] @ weights["b"])) @ weights["c"], []),
    "lookups stay": (lambda weights, x: (weights["a"][x[:, 0].astype(int)] @ weights["b"]) @ weights["c"], ["b"]),
    "vectors stay": (lambda weights, x: (x @ weights["a"][0]) @ weights["b"] @ weights["c"], ["b"]),
    "joined weights": (lambda weights, x: (x @ jnp.concatenate([*weights.values()])[:16]) @ weights["c"], ["c"]),
    "calls": (lambda weights, x: jax.jit(jnp.dot)(x, weights["a"]) @ weights["c"], ["a"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOSEN)
def test_matmuls_of_weights_are_chosen(name: str) -> None:
    function, expected = CHOSEN[name]
    graph = from_jaxpr(jax.make_jaxpr(function)({"a": W, "b": W, "c": W}, W), CALLS, as_traced=True)
    assert sorted(weight_matmuls(graph, dict(zip(graph.body.inputs, "abc", strict=False)), 0).values()) == expected


def test_a_tile_divides_what_is_contracted() -> None:
    graph = from_jaxpr(jax.make_jaxpr(lambda w, x: jnp.sin(x @ w["a"]) @ w["b"] @ w["c"])({"a": W, "b": W, "c": W}, W))
    weights = dict(zip(graph.body.inputs, "abc", strict=False))
    assert [len(weight_matmuls(graph, weights, tile)) for tile in (16, 32)] == [2, 0]


class Frozen(Net):
    """A model of which only the head is trained."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.head.kernel = nnx.LoRAParam(self.head.kernel[...])


@pytest.mark.parametrize(("build", "wrt"), [(Net, nnx.Param), (Frozen, nnx.LoRAParam)])
def test_the_paths_of_weights_are_listed(build: Any, wrt: Any) -> None:
    program = spanax.trace(
        build=build, optimizer=lambda model: nnx.Optimizer(model, optax.sgd(0.1), wrt=wrt), loss=squared,
        batch=jax.ShapeDtypeStruct((8, 16), "float32"), quantize="fp8",
    )  # fmt: skip
    assert program.quantized == ("up.kernel", "down.kernel") and not program.variant(quantize=None).quantized


@pytest.mark.parametrize("name", sampled(list(RECIPES), ["int8"]))
def test_a_remat_of_matmuls_saves_results_and_no_sums(name: str) -> None:
    program = load("gpt-nano", batch_size=8).trace(quantize=name, compute_dtype="bfloat16", remat="dots")
    forward = next(op for op in program.step.graph.ops() if op.name == "scan")
    saved = [program.step.graph.avals[value] for value in forward.outputs]
    plain = load("gpt-nano", batch_size=8).trace(compute_dtype="bfloat16", remat="dots").step.graph
    expected = [plain.avals[value] for value in next(op for op in plain.ops() if op.name == "scan").outputs]
    assert sum(aval.size * aval.dtype.itemsize for aval in saved) <= sum(a.size * a.dtype.itemsize for a in expected)
    assert not {"int32", "int8"} & {str(aval.dtype) for aval in saved if aval.size > 1}


def refused(quantize: str, build: Any = Net, **options: Any) -> str:
    with pytest.raises(SpanaxError) as error:
        spanax.trace(
            build=build, optimizer=optax.sgd(0.1), batch=jax.ShapeDtypeStruct((8, 16), "float32"),
            quantize=quantize, **({"loss": squared} | options),
        )  # fmt: skip
    return str(error.value)


def test_what_cannot_be_quantized_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "did you mean 'int8'" in refused("int4")
    assert "add --lora rank=16" in refused("nf4")
    assert "no matmul to quantize" in refused("int8", lambda rngs: nnx.Linear(16, 16, rngs=rngs))
    assert "`quantize` requires `loss`" in refused("int8", loss=None, train_step=lambda model, optimizer, batch: {})
    imported = builtins.__import__
    missing = lambda name, *rest: imported("no_such" if name == "qwix" else name, *rest)  # noqa: E731
    monkeypatch.setattr(builtins, "__import__", missing)
    assert 'pip install "spanax[quantize]"' in refused("int8")
