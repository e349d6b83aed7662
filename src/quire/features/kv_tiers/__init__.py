"""KV blocks that are kept outside the KV cache, and found there by their names."""
