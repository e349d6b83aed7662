"""Trace replay: a request's tokens are given, and its scores are the model's."""
