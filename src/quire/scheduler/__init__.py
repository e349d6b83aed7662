"""Which requests run next. Pure Python, no torch."""
