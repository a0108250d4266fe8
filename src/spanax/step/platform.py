"""Provides the platform of the devices of a mesh."""

from jax.sharding import AbstractMesh, Mesh


def platform_of(mesh: Mesh | AbstractMesh) -> str:
    """Returns `cpu`, `tpu` or `gpu`, as JAX names it; empty for an abstract mesh without an abstract device."""
    if isinstance(mesh, AbstractMesh):
        return "" if mesh.abstract_device is None else str(mesh.abstract_device.platform)
    return str(mesh.devices.flat[0].platform)
