"""Structured output: constrains outputs to a JSON schema, a regex, a choice, a grammar or structural tags."""
