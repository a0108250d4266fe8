"""Entries: what a run folder holds, by name, and how it is opened. Nothing here imports JAX."""
