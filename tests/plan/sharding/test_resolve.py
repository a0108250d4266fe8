"""Resolve: the computed and the stored sharding of values, with the reasons."""

import pytest

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
    built_resolver = resolver(program, "fsdp", "fsdp=4")
    for leaf, value in zip(program.leaves, program.step.graph.body.inputs, strict=False):
        labels = program.step.axes.classes[value]
        spec, reasons = built_resolver.placed(leaf, labels)
        if leaf.kind == "param":
            assert not axes_of(built_resolver.used(labels, leaf.shape)) and axes_of(spec) == ["fsdp"], leaf.path
            assert [reason.code for reason in reasons] == [Code.STORED]
            (dim,) = (dim for dim, axes in enumerate(spec) if axes)
            assert leaf.shape[dim] % 4 == 0


def test_no_mesh_axis_shards_two_dims_of_a_value() -> None:
    program = small_gpt()
    built_resolver = resolver(program, "fsdp+tensor", "fsdp=2,model=2")
    for constraint, aval in zip(built_resolver.constraints(program.step), program.step.graph.avals, strict=True):
        for spec in () if constraint is None else (constraint.spec, constraint.computed):
            assert len(set(axes_of(spec))) == len(axes_of(spec)) and len(spec) == len(aval.shape)
            assert all(size % built_resolver.mesh.ways(axes) == 0 for size, axes in zip(aval.shape, spec, strict=True))


def test_a_gradient_is_sharded_as_its_parameter_under_fsdp_only() -> None:
    program = small_gpt()
    value = next(value for leaf, value in zip(program.leaves, program.step.graph.body.inputs, strict=False)
                 if leaf.kind == "param" and len(leaf.shape) > 1)  # fmt: skip
    labels, shape = program.step.axes.classes[value], program.step.graph.shape(value)
    for layout, is_sharded in (("fsdp", True), ("zero2", True), ("zero1", False)):
        built_resolver = resolver(program, layout, "fsdp=4")
        used = built_resolver.used(labels, shape)
        assert (built_resolver.stored(used, labels, shape, "gradient") != used) == is_sharded, layout
        assert built_resolver.stored(used, labels, shape, "optimizer") != used, layout


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
    built_resolver = resolver(program, "fsdp", "fsdp=16")
    leaf = Leaf("odd", (3, 5), "float32", "param", (None, None), None)
    spec, (reason,) = built_resolver.placed(leaf, (None, None))
    assert spec == ((), ()) and reason.code is Code.REPLICATED
    assert str(reason) == "stored replicated: no dim of 3x5 is divisible by fsdp=16"
    assert built_resolver.not_sharded(leaf, (None, None)) == []


def test_an_annotation_names_mesh_axes_or_nothing() -> None:
    mesh = MeshShape.of("fsdp=4")
    leaf = Leaf("kernel", (8, 1), "float32", "param", (None, None), ("fsdp", None))
    assert annotated(leaf, mesh) == (("fsdp",), ()) and annotated(leaf, MeshShape.of("data=4")) is None
    odd = Leaf("kernel", (6, 1), "float32", "param", (None, None), ("fsdp", None))
    with pytest.raises(SpanaxError, match="annotated to be sharded over fsdp along dim 0, and 6 % 4 = 2"):
        annotated(odd, mesh)
