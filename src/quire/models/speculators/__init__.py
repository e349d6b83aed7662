"""Models that guess tokens from the hidden states of another model: EAGLE, MTP, Medusa, MLP speculators."""
