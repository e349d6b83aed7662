"""Seeing: metrics and the statistics line. Pure Python, no torch."""
