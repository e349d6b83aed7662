"""Checks and timings of the GPU path, on a GPU."""
