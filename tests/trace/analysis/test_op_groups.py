"""Operation groups: how often operations run in a step, and their FLOPs, compared with formulas by hand.

B batch, T positions, V vocabulary, D embed, F mlp, L layers; a multiply-add is two FLOPs.
"""

import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import spanax
import zoo
from programs import array, graph_of, small_gpt, zoo_program
from spanax.plan.place import resolver_of
from spanax.plan.sharding.operands import operand_sharding
from spanax.plan.sharding.partition import as_masks
from spanax.trace.analysis.op_groups import OpGroup, Phase, contraction_flops, executed_flops
from spanax.trace.jaxpr.graph import CONTRACTIONS, Body, Graph
from spanax.trace.program import Program

CONFIG = zoo.GPT_SCAN
B, T, V, D, L = 16, CONFIG.seq_len, CONFIG.vocab_size, CONFIG.embed_dim, CONFIG.num_layers
F = 4 * D
# qkv, out, up and down are 12 D**2 weights; scores and mixture meet every position with every other.
LAYER_FLOPS = 2 * B * T * 12 * D**2 + 2 * 2 * B * T**2 * D
HEAD_FLOPS = 2 * B * T * D * V
FORWARD_FLOPS = L * LAYER_FLOPS + HEAD_FLOPS


def matmuls(program: Program) -> list[OpGroup]:
    return [kind for kind in program.step.op_groups if kind.op.name in CONTRACTIONS]


def flops(program: Program, **fields: Any) -> int:
    """FLOPs of a step in matmuls whose kinds have these fields."""
    return sum(
        kind.runs * contraction_flops(program.step.graph, kind.op)
        for kind in matmuls(program)
        if all(getattr(kind, name) == value for name, value in fields.items())
    )


def counted(graph: Graph) -> Counter[str]:
    """How often each operation runs, by going through the loops."""

    def of(body: Body, times: int) -> Counter[str]:
        counts = Counter[str]()
        for op in body.ops:
            counts[op.name] += times
            for inner in op.bodies:
                counts += of(inner, times * (op.params["length"] if op.name == "scan" else 1))
        return counts

    return of(graph.body, 1)


# A complete step


@pytest.mark.parametrize("scan", [True, False])
def test_flops_of_a_gpt_are_the_closed_form(scan: bool) -> None:
    program = small_gpt(scan_layers=scan)
    tokens, in_matmuls = B * T, L * 12 * D**2 + V * D
    assert flops(program) == 6 * in_matmuls * tokens + 12 * L * D * T * tokens
    assert flops(program, phase=Phase.FORWARD) == FORWARD_FLOPS
    assert flops(program, phase=Phase.BACKWARD) == 2 * FORWARD_FLOPS
    assert flops(program, phase=Phase.UPDATE) == 0


@pytest.mark.parametrize("scan", [True, False])
def test_full_remat_adds_the_forward_pass_of_a_layer_but_for_its_last_matmul(scan: bool) -> None:
    # What `down` makes is the layer's result: nothing on the way back needs it.
    again = L * (LAYER_FLOPS - 2 * B * T * F * D)
    assert flops(small_gpt(scan_layers=scan, remat=True)) == 3 * FORWARD_FLOPS + again


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("remat", [True, False])
def test_operations_are_counted_as_often_as_they_run(scan: bool, remat: bool) -> None:
    program = small_gpt(scan_layers=scan, remat=remat)
    counts = Counter[str]()
    for kind in program.step.op_groups:
        counts[kind.op.name] += kind.runs
    assert counts == counted(program.step.graph)


def test_microbatches_run_the_layers_as_often() -> None:
    case = zoo.ZOO["mlp"]

    def of(count: int) -> Program:
        return spanax.trace(
            build=case.build, optimizer=case.optimizer, batch=case.batch(16), loss=case.loss, microbatches=count
        )

    assert flops(of(4)) == flops(of(1)) == 2 * 3 * 16 * (32 * 128 + 128 * 128 + 128 * 16) - 2 * 16 * 32 * 128
    assert sum(kind.runs for kind in matmuls(of(4))) == 4 * sum(kind.runs for kind in matmuls(of(1)))


def test_the_carry_of_the_layers_is_detected() -> None:
    program = small_gpt(remat=True)
    carry, num_layers = program.step.layer_carry
    assert num_layers == L and carry is not None
    assert program.step.graph.shape(carry) == (B, T, D)
    assert small_gpt(scan_layers=False).step.layer_carry == (None, 0)


def test_attention_scores_are_distinguished() -> None:
    step = small_gpt().step
    shapes = {step.graph.shape(value) for value, labels in enumerate(step.axes.classes) if labels in step.score_labels}
    assert {(B, 8, T, T), (L, B, 8, T, T)} <= shapes
    assert all(shape[-4:] in ((B, 8, T, T), (B, T, 8, T)) for shape in shapes)


# Inert operations


@pytest.mark.parametrize(
    ("name", "layout", "mesh"),
    [
        ("gpt", "fsdp", "fsdp=8"),
        ("gpt", "fsdp+tensor+seq", "fsdp=4,model=2"),
        ("gpt", "zero1", "fsdp=8"),
        ("gpt", "context", "data=4,context=2"),
        ("moe", "expert", "data=2,expert=4"),
        ("cnn", "fsdp+tensor", "fsdp=4,model=2"),
    ],
)
def test_an_inert_operation_never_communicates(name: str, layout: str, mesh: str) -> None:
    program = zoo_program(name)
    plan = spanax.plan(program, spanax.cluster("cpu:8"), layout=layout, mesh=mesh)
    resolver = resolver_of(program, plan)
    constraints, graph = resolver.constraints(program.step), program.step.graph
    bits = {axis: 1 << index for index, axis in enumerate(plan.mesh.names)}

    def masks(value: int) -> tuple[int, ...]:
        constraint = constraints[value]
        return (0,) * len(graph.shape(value)) if constraint is None else as_masks(constraint.spec, bits)

    elementwise = [op for op in graph.ops() if op.is_elementwise]
    assert 2 * len(program.step.inert) > len(elementwise) and set(elementwise) >= program.step.inert
    for op in program.step.inert:
        assert len({masks(value) for value in (*op.inputs, *op.outputs) if graph.shape(value)}) <= 1, op
        assert operand_sharding(resolver, program.step, op, constraints) is None, op


# Matmuls and convolutions


def all_flops(function: Any, *shapes: Any) -> list[int]:
    graph = graph_of(function, *shapes)
    return [contraction_flops(graph, op) for op in graph.ops() if op.name in CONTRACTIONS]


@pytest.mark.parametrize(
    ("spec", "lhs", "rhs", "expected"),
    [
        ("ij,jk->ik", (5, 7), (7, 3), 2 * 5 * 7 * 3),
        ("i,i->", (7,), (7,), 2 * 7),
        ("i,j->ij", (5,), (3,), 2 * 5 * 3),
        ("bij,bjk->bik", (4, 5, 7), (4, 7, 3), 2 * 4 * 5 * 7 * 3),
        ("bthk,bshk->bhts", (2, 5, 3, 4), (2, 7, 3, 4), 2 * 2 * 3 * 5 * 7 * 4),
        ("bthk,hkd->btd", (2, 5, 3, 4), (3, 4, 6), 2 * 2 * 5 * 12 * 6),
    ],
)
def test_flops_of_a_matmul(spec: str, lhs: tuple[int, ...], rhs: tuple[int, ...], expected: int) -> None:
    assert all_flops(lambda x, y: jnp.einsum(spec, x, y), lhs, rhs) == [expected]


def convolve(x: jax.Array, w: jax.Array, *, strides: int = 1, groups: int = 1, padding: str = "SAME") -> jax.Array:
    return lax.conv_general_dilated(
        x, w, (strides,) * 2, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(
    ("groups", "strides", "padding"), [(1, 1, "VALID"), (2, 1, "SAME"), (6, 2, "SAME"), (1, 2, "SAME")]
)
def test_a_convolution_has_the_flops_that_xla_counts(groups: int, strides: int, padding: str) -> None:
    shapes = array(4, 8, 8, 6), array(3, 3, 6 // groups, 12)
    function = lambda x, w: convolve(x, w, strides=strides, groups=groups, padding=padding)  # noqa: E731
    analysis = jax.jit(function).lower(*shapes).cost_analysis()
    assert all_flops(function, *shapes) == [analysis["flops"]]


def compiled_flops(function: Any, *shapes: Any) -> float:
    """FLOPs that XLA counts in the program that it runs on a CPU, with those of everything elementwise."""
    return float(jax.jit(function).lower(*shapes).compile().cost_analysis()["flops"])


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("num_groups", [1, 4, 16])
def test_xla_runs_a_ragged_matmul_once_for_every_group(num_groups: int) -> None:
    def loss(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        return jnp.square(lax.ragged_dot(x, w, sizes)).sum()

    M, K, N = 256, 128, 192
    shapes = array(M, K), array(num_groups, K, N), array(num_groups, dtype="int32")
    graph = graph_of(jax.grad(loss, (0, 1)), *shapes)
    ops = [op for op in graph.ops() if op.name in CONTRACTIONS]
    assert [contraction_flops(graph, op) for op in ops] == 3 * [2 * M * K * N]
    assert [executed_flops(graph, op) for op in ops] == 3 * [2 * M * K * N * num_groups]
    executed = sum(executed_flops(graph, op) for op in ops)
    assert executed == pytest.approx(compiled_flops(jax.grad(loss, (0, 1)), *shapes), rel=0.05)


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(
    ("strides", "padding", "input_dilation", "window_dilation", "groups"),
    [
        ((1, 1), "SAME", (1, 1), (1, 1), 1),
        ((2, 2), "SAME", (1, 1), (1, 1), 1),
        ((2, 1), "VALID", (1, 1), (1, 2), 1),
        ((1, 1), ((1, 2), (2, 1)), (2, 2), (1, 1), 1),
        ((1, 1), ((2, 0), (0, 3)), (1, 1), (2, 2), 2),
        ((2, 2), "SAME", (1, 1), (1, 1), 8),
    ],
)
def test_the_gradients_of_a_convolution_have_the_flops_that_xla_counts(
    strides: Any, padding: Any, input_dilation: Any, window_dilation: Any, groups: int
) -> None:
    def convolved(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x, w, strides, padding, input_dilation, window_dilation, ("NHWC", "HWIO", "NHWC"), groups
        )

    shapes = array(4, 12, 12, 8), array(3, 3, 8 // groups, 16)

    def both(x: jax.Array, w: jax.Array, y: jax.Array) -> Any:
        return jax.vjp(convolved, x, w)[1](y)

    shapes = (*shapes, jax.eval_shape(convolved, *shapes))
    analysis = jax.jit(both).lower(*shapes).cost_analysis()
    graph = graph_of(both, *shapes)
    result = [contraction_flops(graph, op) for op in graph.ops() if op.name in CONTRACTIONS]
    assert len(result) == 2 and sum(result) == analysis["flops"]


def test_an_moe_computes_its_slots_and_not_every_expert_for_every_token() -> None:
    program, config = zoo_program("mixtral"), zoo.MIXTRAL
    graph, E = program.step.graph, config.num_experts
    slots = math.ceil(config.capacity_factor * config.experts_per_token * config.seq_len / E)
    weights = (E, config.embed_dim, config.mlp_dim), (E, config.mlp_dim, config.embed_dim)
    result = sum(
        kind.runs * contraction_flops(graph, kind.op)
        for kind in matmuls(program)
        if kind.phase == Phase.FORWARD and any(graph.shape(value) in weights for value in kind.op.inputs[:2])
    )
    assert result == config.num_layers * 3 * 2 * B * E * slots * config.embed_dim * config.mlp_dim
