"""Which block holds what. Pure Python, no torch."""
