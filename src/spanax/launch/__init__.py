"""Launch: processes for a run, here or on a cluster, and the one that watches them. Nothing here imports JAX."""
