"""Attention backends, all with one small interface."""
