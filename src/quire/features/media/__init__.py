"""Pictures in prompts: rows of the vision tower in the place of embeddings, a cache of them, and their budget in a step."""
