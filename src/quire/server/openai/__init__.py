"""OpenAI's HTTP endpoints, with vLLM's extensions."""
