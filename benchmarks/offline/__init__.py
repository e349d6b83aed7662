"""Offline throughput, compared with Transformers."""
