"""Attention backends: how queries meet the KV cache, each behind one small face."""
