"""Weights for a user's own class, without a table of its family."""
