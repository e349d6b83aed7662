"""Observability: metrics, the statistics log line, traces. Pure Python, no torch."""
