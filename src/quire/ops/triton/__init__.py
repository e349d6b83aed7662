"""Triton kernels, one file per family; each names the definition that it agrees with."""
