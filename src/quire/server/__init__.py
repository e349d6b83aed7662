"""HTTP: the OpenAI, Anthropic and management routes. No torch."""
