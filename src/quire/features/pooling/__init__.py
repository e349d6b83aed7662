"""Pooling: a model that computes vectors and scores in place of tokens."""
