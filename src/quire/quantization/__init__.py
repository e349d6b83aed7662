"""Quantization methods and checkpoint schemes of linear layers, one per file."""
