"""Makes quire-tiny: its text, its tokenizer, its weights and its figures."""
