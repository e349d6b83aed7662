"""Functions with kernels: each has a reference body, which is its definition."""
