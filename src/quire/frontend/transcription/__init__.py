"""Transcription: the tokens of a model that writes down speech, its prompts, and what its output says."""
