"""Makes quire-tiny-whisper: its sentences, their sound, its tokenizer, its weights and its figures."""
