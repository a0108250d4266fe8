"""Calibration: the constants of a chip, fitted to measured steps."""
