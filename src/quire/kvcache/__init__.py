"""Which KV cache block belongs to which request, and what it contains. Pure Python, no torch."""
