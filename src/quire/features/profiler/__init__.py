"""Profiler: records steps of the worker with torch.profiler, between two calls."""
