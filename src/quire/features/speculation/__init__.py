"""Speculative decoding: draft tokens, which the next step verifies."""
