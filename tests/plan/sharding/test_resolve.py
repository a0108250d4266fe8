"""Resolve: the computed and the stored sharding of values, with the reasons."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import spanax
from programs import small_gpt
from spanax.errors import SpanaxError
from spanax.hardware.mesh import MeshShape
from spanax.plan.presets import layout_named
from spanax.plan.reason import Code
from spanax.plan.sharding.resolve import Resolver, Spec, annotated, resolve
from spanax.trace.program import Program
from spanax.trace.variables import Leaf


def resolver(program: Program, layout: str, mesh: str) -> Resolver:
    shape = MeshShape.of(mesh)
    return resolve(program, layout_named(layout, shape), shape, {})


def axes_of(spec: Spec) -> list[str]:
    return [axis for axes in spec for axis in axes]


def test_fsdp_stores_sharded_what_it_computes_replicated() -> None:
    program = small_gpt()
    actual = resolver(program, "fsdp", "fsdp=4")
    for leaf, value in zip(program.leaves, program.step.graph.body.inputs, strict=False):
        labels = program.step.axes.classes[value]
        spec, reasons = actual.placed(leaf, labels)
        if leaf.kind == "param":
            assert not axes_of(actual.used(labels, leaf.shape)) and axes_of(spec) == ["fsdp"], leaf.path
            assert [reason.code for reason in reasons] == [Code.STORED]
            (dim,) = (dim for dim, axes in enumerate(spec) if axes)
            assert leaf.shape[dim] % 4 == 0


def test_no_mesh_axis_shards_two_dims_of_a_value() -> None:
    program = small_gpt()
    actual = resolver(program, "fsdp+tensor", "fsdp=2,model=2")
    for constraint, aval in zip(actual.constraints(program.step), program.step.graph.avals, strict=True):
        for spec in () if constraint is None else (constraint.spec, constraint.computed):
            assert len(set(axes_of(spec))) == len(axes_of(spec)) and len(spec) == len(aval.shape)
            assert all(size % actual.mesh.ways(axes) == 0 for size, axes in zip(aval.shape, spec, strict=True))


def test_a_gradient_is_sharded_as_its_parameter_under_fsdp_only() -> None:
    program = small_gpt()
    value = next(value for leaf, value in zip(program.leaves, program.step.graph.body.inputs, strict=False)
                 if leaf.kind == "param" and len(leaf.shape) > 1)  # fmt: skip
    labels, shape = program.step.axes.classes[value], program.step.graph.shape(value)
    for layout, is_sharded in (("fsdp", True), ("zero2", True), ("zero1", False)):
        actual = resolver(program, layout, "fsdp=4")
        used = actual.used(labels, shape)
        assert (actual.stored(used, labels, shape, "gradient") != used) == is_sharded, layout
        assert actual.stored(used, labels, shape, "optimizer") != used, layout


def test_equal_keys_have_equal_constraints() -> None:
    program = small_gpt()
    constraints, keys = resolver(program, "fsdp", "fsdp=4").constraints(program.step), program.step.sharding_keys
    numbers = {key.number: key for key in keys}
    assert len(numbers) == len(set(keys)) < len(keys)
    assert all(numbers[key.number] == key for key in keys)
    first = {key.number: constraints[value] for value, key in reversed(list(enumerate(keys)))}
    assert all(constraints[value] == first[key.number] for value, key in enumerate(keys))
    assert constraints[:3] == [constraints[0], constraints[1], constraints[2]]
    with pytest.raises(IndexError):
        constraints[len(constraints)]


def test_a_leaf_without_a_divisible_dim_is_replicated_with_the_reason() -> None:
    program = small_gpt()
    actual = resolver(program, "fsdp", "fsdp=16")
    leaf = Leaf("odd", (3, 5), "float32", "param", (None, None), None)
    spec, (reason,) = actual.placed(leaf, (None, None))
    assert spec == ((), ()) and reason.code is Code.REPLICATED
    assert str(reason) == "stored replicated: no dim of 3x5 is divisible by fsdp=16"
    assert actual.not_sharded(leaf, (None, None)) == []


def test_an_annotation_names_mesh_axes_or_nothing() -> None:
    mesh = MeshShape.of("fsdp=4")
    leaf = Leaf("kernel", (8, 1), "float32", "param", (None, None), ("fsdp", None))
    assert annotated(leaf, mesh) == (("fsdp",), ()) and annotated(leaf, MeshShape.of("data=4")) is None
    odd = Leaf("kernel", (6, 1), "float32", "param", (None, None), ("fsdp", None))
    with pytest.raises(SpanaxError, match="annotated to be sharded over fsdp along dim 0, and 6 % 4 = 2"):
        annotated(odd, mesh)


def test_a_mesh_axis_shards_the_first_dim_of_its_ranks_that_divides() -> None:
    program = small_gpt()
    actual = resolver(program, "data+tensor", "data=2,model=2")
    (batch,) = actual.assignment.ranks["data"]
    first, second = sorted(actual.assignment.ranks["model"], key=actual.assignment.ranks["model"].__getitem__)[:2]

    def computed(*shape: int, replicated: frozenset[int] = frozenset()) -> Spec:
        return actual.computed((batch, second, first), shape, replicated, is_routed=False)

    assert computed(8, 8, 8) == (("data",), (), ("model",))
    assert computed(8, 8, 7) == (("data",), ("model",), ()), "the next rank"
    assert computed(7, 8, 8) == ((), (), ("model",)), "7 % 2 = 1"
    assert computed(8, 8, 8, replicated=frozenset({2})) == (("data",), ("model",), ())
    assert actual.computed((None, None, None), (8, 8, 8), is_routed=False) == ((), (), ())


def test_storage_shards_the_largest_replicated_dim() -> None:
    actual = resolver(small_gpt(), "fsdp", "fsdp=4")
    none = ((), ())
    assert actual.stored(none, (None, None), (8, 16), "param") == ((), ("fsdp",))
    assert actual.stored(none, (None, None), (16, 8), "param") == (("fsdp",), ())
    assert actual.stored(none, (None, None), (8, 18), "param") == (("fsdp",), ()), "18 % 4 = 2"
    assert actual.stored(none, (None, None), (3, 5), "param") == none
    assert actual.stored((("fsdp",), ()), (None, None), (8, 16), "param") == (("fsdp",), ()), (
        "already sharded over fsdp"
    )
    assert actual.stored(none, (None, None), (8, 16), "batch") == none


def test_activations_are_computed_and_weights_stored() -> None:
    program = small_gpt()
    actual = resolver(program, "fsdp", "fsdp=4")
    constraints, keys = actual.constraints(program.step), program.step.sharding_keys
    for leaf, value in zip(program.leaves, program.step.graph.body.inputs, strict=False):
        constraint = constraints[value]
        if leaf.kind == "param" and len(leaf.shape) > 1:
            assert constraint is not None and axes_of(constraint.spec) == ["fsdp"] and not axes_of(constraint.computed)
    by_batch = [constraints[value] for value, key in enumerate(keys) if program.step.batch_labels & {*key.labels}]
    assert any(each is not None and each.spec[0] == ("fsdp",) and each.used is None for each in by_batch)


class Named(nnx.Module):
    """Two layers of equal use, of which the author named the hidden dim of the first."""

    def __init__(self, rngs: nnx.Rngs):
        wide = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "wide"))
        self.up, self.down = nnx.Linear(16, 64, kernel_init=wide, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)
        self.second_up, self.second_down = nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.down(jnp.tanh(self.up(x)))
        return x + self.second_down(jnp.tanh(self.second_up(x)))


def test_another_trace_of_a_program_has_the_pins() -> None:
    program = spanax.trace(
        build=Named, optimizer=optax.sgd(0.1), batch=jax.ShapeDtypeStruct((16, 16), "float32"),
        loss=lambda model, x: (model(x) ** 2).mean(),
    )  # fmt: skip
    mesh = MeshShape.of("model=2")
    pinned = resolve(program, layout_named("tensor", mesh), mesh, {"wide": None})
    specs = []
    for traced in (program, program.variant(microbatches=2)):
        values = dict(zip((leaf.path for leaf in traced.leaves), traced.step.graph.body.inputs, strict=False))
        leaf = next(leaf for leaf in traced.leaves if leaf.path == "up.kernel")
        specs.append(pinned.of(traced).placed(leaf, traced.step.axes.classes[values[leaf.path]])[0])
    assert specs == [((), ()), ((), ())]


def test_another_trace_of_a_program_has_the_chunks_of_its_stages() -> None:
    program, mesh = small_gpt(num_layers=6), MeshShape.of("pipe=2")
    layout = layout_named("pipeline", mesh)
    chunked = resolve(program, layout, mesh, {}, num_chunks=2)
    parts = [[*chunked.of(each).assignment.parts.values()] for each in (program, program.variant(microbatches=2))]
    assert [each.num_chunks for part in parts for each in part] == [2, 2]
