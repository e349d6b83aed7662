"""How a linear's weights are stored and multiplied: one scheme a file."""
