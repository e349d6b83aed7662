"""From logits to a token: logits processors, the draw, log-probabilities."""
