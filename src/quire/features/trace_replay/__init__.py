"""Trace replay: a request's tokens are given, and its scores are those of the model."""
