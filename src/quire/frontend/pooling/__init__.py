"""Requests whose output is a tensor: their inputs, their outputs, and scores of pairs of texts."""
