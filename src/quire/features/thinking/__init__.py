"""Thinking budget: ends a model's thinking after a number of tokens."""
