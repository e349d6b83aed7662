"""Engines of data parallelism share the experts of a mixture."""
