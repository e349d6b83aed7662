"""Prompts that are embeddings in place of tokens."""
