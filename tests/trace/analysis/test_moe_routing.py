"""Routing: of each form in which models choose experts, what experts compute, and when tokens are sent to them."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import experts
import spanax
import zoo
from spanax.trace.analysis.moe_routing import Routing
from spanax.trace.program import Program


class Pooled(nnx.Module):
    """Experts whose places are for the tokens of any example: (B, D) in, four experts of two places each."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.router = nnx.Linear(16, 4, rngs=rngs)
        self.up = nnx.Param(jax.random.normal(rngs.params(), (4, 16, 24)))
        self.down = nnx.Param(jax.random.normal(rngs.params(), (4, 24, 16)))

    def __call__(self, x_BD: jax.Array) -> jax.Array:
        chosen_BE = jax.nn.one_hot(jax.lax.top_k(self.router(x_BD), 1)[1][:, 0], 4)
        place_BE = jnp.where(chosen_BE > 0, jnp.cumsum(chosen_BE, axis=0) - 1, -1)
        slots_BEC = jax.nn.one_hot(place_BE.astype(jnp.int32), 2)
        h_ECF = jax.nn.gelu(jnp.einsum("BEC,BD,EDF->ECF", slots_BEC, x_BD, self.up[...], optimize=[(0, 1), (0, 1)]))
        return jnp.einsum("BEC,ECD->BD", slots_BEC, jnp.einsum("ECF,EFD->ECD", h_ECF, self.down[...]))


@functools.cache
def program(name: str) -> Program:
    if name in ("pooled", "grouped"):
        return spanax.trace(
            build=Pooled if name == "pooled" else lambda rngs: experts.Layer("flaxformer, masks", rngs),
            optimizer=optax.sgd(0.1),
            batch=jax.ShapeDtypeStruct((64, 16) if name == "pooled" else (16, 8, experts.DIM), "float32"),
            loss=lambda model, x: (model(x) ** 2).mean(),
        )
    case = zoo.ZOO[name]
    return spanax.trace(build=case.build, optimizer=case.optimizer, batch=case.batch(16), loss=case.loss)


def named(program: Program, routing: Routing) -> tuple[list[list[str]], list[list[str]]]:
    """The names of what experts compute, and of the weights that choose them."""
    names = program.step.axes.names
    inside, scoring = (
        sorted({tuple(sorted(names.get(label, "?") for label in key)) for key in keys})
        for keys in (routing.inside, routing.scoring)
    )
    return [list(item) for item in inside], [list(item) for item in scoring]


ROUTER = ["embed", "experts"]


@pytest.mark.parametrize(
    ("name", "inside", "scoring"),
    [
        ("moe", [["batch", "embed", "experts", "slots"], ["batch", "experts", "mlp", "slots"]], []),
        ("mixtral", [["batch", "embed", "experts", "slots"], ["batch", "experts", "mlp", "slots"]], []),
        ("dropless", [["batch", "experts", "mlp", "seq"]], [ROUTER]),
        ("pooled", [["experts", "features", "slots"], ["experts", "hidden", "slots"]], []),
    ],
)
def test_the_flops_of_experts(name: str, inside: list[list[str]], scoring: list[list[str]]) -> None:
    result = program(name)
    (first, *_) = [routing for routing in result.step.routings.values() if routing.inside]
    assert named(result, first) == (inside, scoring)


@pytest.mark.parametrize(
    ("name", "counts"),
    [("moe", True), ("mixtral", False), ("dropless", False), ("pooled", True), ("grouped", True)],
)
def test_choices_of_tokens_are_counted_per_slot(name: str, counts: bool) -> None:
    (routing, *_) = [routing for routing in program(name).step.routings.values() if routing.inside]
    sent = routing.num_sent + routing.num_pooled
    assert (sent > 0) == (routing.num_tokens > 0) == counts
    assert (routing.num_pooled > 0) == (name == "pooled")


@pytest.mark.parametrize(("ways", "is_sent"), [(2, False), (4, True), (8, True)])
def test_tokens_are_exchanged_if_there_are_more_devices_than_slots_per_token(ways: int, is_sent: bool) -> None:
    routing = Routing(True, frozenset(), frozenset({(0, 1)}), num_tokens=1000, num_sent=2500, num_pooled=0)
    assert routing.is_sent(ways, 1) == routing.is_sent(ways, 16) == is_sent


def test_pooled_slots_are_sent_only_over_one_group() -> None:
    routing = Routing(True, frozenset(), frozenset({(0, 1)}), num_tokens=1000, num_sent=0, num_pooled=600)
    assert routing.is_sent(8, 1) and not routing.is_sent(8, 2)


@pytest.mark.parametrize(
    ("name", "ways", "kernel"), [("mixtral", 2, ""), ("mixtral", 4, ""), ("dropless", 4, "expert")]
)
def test_a_router_is_replicated_if_tokens_are_sent(name: str, ways: int, kernel: str) -> None:
    mesh = f"data={8 // ways},expert={ways}"
    plan = spanax.plan(program(name), spanax.cluster("cpu:8"), layout="expert", mesh=mesh)
    assert plan["blocks.experts.up"].spec == ((), ("expert",), (), ())
    assert plan["blocks.experts.router.kernel"].spec[2] == ((kernel,) if kernel else ())
