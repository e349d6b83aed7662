"""The ranks that split a model, and what they exchange."""
