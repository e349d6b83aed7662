"""Kernels in Triton: one file a family, each equal to its definition (`ops/reference.py`)."""
