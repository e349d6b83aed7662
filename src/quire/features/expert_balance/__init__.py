"""Experts move between ranks so that all have as many tokens (EPLB)."""
