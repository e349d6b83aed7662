"""The fused path of a CPU: layers, stacks of layers and whole steps in one call of the kernels."""
