"""Stores of KV blocks outside the KV cache: files, their format, and the key that names blocks."""
