"""Offline throughput beside Transformers."""
