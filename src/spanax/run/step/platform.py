"""Platform: what the devices of a mesh are."""

from jax.sharding import AbstractMesh, Mesh


def platform_of(mesh: Mesh | AbstractMesh) -> str:
    """`cpu`, `tpu` or `gpu`, as JAX calls it; empty for a mesh without devices that says nothing of them."""
    if isinstance(mesh, AbstractMesh):
        return "" if mesh.abstract_device is None else str(mesh.abstract_device.platform)
    return str(mesh.devices.flat[0].platform)
