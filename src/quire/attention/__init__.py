"""Attention backends, all behind one small interface."""
