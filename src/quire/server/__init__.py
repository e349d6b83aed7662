"""HTTP: the OpenAI routes and their friends. No torch."""
