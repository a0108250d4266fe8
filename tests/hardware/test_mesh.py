"""Mesh shapes: read from text or a mapping, and built over real devices."""

import jax
import pytest
from jax.sharding import AxisType

from spanax.errors import SpanaxError
from spanax.hardware.mesh import CANONICAL_AXES, MeshShape
from spanax.plan.presets import PRESETS


@pytest.mark.parametrize(
    ("arguments", "axes"),
    [
        ({"data": 4, "model": 2}, (("data", 4), ("model", 2))),
        ("data=4,model=2", (("data", 4), ("model", 2))),
        (" model = 2 , data = 4, ", (("model", 2), ("data", 4))),
        ("", ()),
        ({}, ()),
        (MeshShape((("x", 3),)), (("x", 3),)),
    ],
)
def test_a_mesh_shape_from_any_argument(arguments, axes) -> None:
    mesh = MeshShape.of(arguments)
    assert mesh.axes == axes and (not axes or MeshShape.of(repr(mesh)) == mesh)


def test_counts() -> None:
    mesh = MeshShape.of("data=4,model=2,pipe=1")
    assert mesh.size == 8
    assert mesh.names == ("data", "model", "pipe")
    assert [mesh.ways(axes) for axes in ((), ("data",), ("data", "model"), ("absent",))] == [1, 4, 8, 1]
    assert MeshShape.of({}).size == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": 0}, "mesh axis 'data' has size 0"),
        ({"data": "4"}, "mesh axis 'data' has size '4'"),
        ({"data": True}, "mesh axis 'data' has size True"),
        ("data=-8", "mesh axis 'data' has size -8"),
        ("data=4,data=2", "mesh axis 'data' is repeated"),
        ("data", "cannot read 'data' as a mesh axis"),
        ("data=4;model=2", "cannot read 'data=4;model=2' as a mesh axis"),
    ],
)
def test_an_invalid_value_raises(arguments, message: str) -> None:
    with pytest.raises(SpanaxError) as caught:
        MeshShape.of(arguments)
    assert str(caught.value).startswith(message)


def test_canonical_axes_are_those_of_the_presets() -> None:
    assert {axis for axes in PRESETS.values() for axis in axes} | {"pipe", "groups"} == set(CANONICAL_AXES)


def test_a_real_mesh_has_automatic_axes_and_the_first_or_requested_devices(devices: list[jax.Device]) -> None:
    mesh = MeshShape.of("data=4,model=2").build()
    assert dict(mesh.shape) == {"data": 4, "model": 2} and set(mesh.axis_types) == {AxisType.Auto}
    assert list(mesh.devices.flat) == devices[:8]
    assert list(MeshShape.of("data=2").build(devices[4:]).devices.flat) == devices[4:6]
    assert MeshShape.of({}).build().size == MeshShape.of("data=1").build().size == 1


def test_too_few_devices(devices: list[jax.Device]) -> None:
    with pytest.raises(SpanaxError, match="the mesh needs 16 devices, and there are 8") as caught:
        MeshShape.of("data=16").build(devices[:8])
    assert "--devices 16 (in Python: spanax.simulate(16))" in str(caught.value)
