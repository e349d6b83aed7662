"""Makes the speech model quire-tiny-whisper: sentences, their sound, the tokenizer, the weights and the figures of the model card."""
