"""Models that compute vectors or scores in place of tokens: what a checkpoint offers, and the layers after its model."""
