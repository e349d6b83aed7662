"""Pictures, videos and sound in prompts: rows of their towers in the place of embeddings, a cache of them, and their budget in a step."""
