"""Starts and supervises the processes of a run, on this machine or on a cluster. Does not import JAX."""
