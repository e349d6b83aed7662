"""From logits to a token: rules on logits, the draw, log-probabilities."""
