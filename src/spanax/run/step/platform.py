"""Platform: what the devices of a mesh are."""

from jax.sharding import AbstractMesh, Mesh


def platform_of(mesh: Mesh | AbstractMesh) -> str:
    """`cpu`, `tpu` or `gpu`, as JAX calls it; empty for a mesh without devices."""
    return "" if isinstance(mesh, AbstractMesh) else str(mesh.devices.flat[0].platform)
