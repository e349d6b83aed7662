"""Structured output: text that keeps to a JSON schema, a regex, a choice, a grammar or tags."""
