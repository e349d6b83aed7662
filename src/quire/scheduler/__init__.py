"""Who runs next. Pure Python, no torch."""
