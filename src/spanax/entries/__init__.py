"""Names and opens the entries of a run folder. Does not import JAX."""
