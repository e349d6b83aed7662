"""Checkpoints in Mistral's own format: params.json, consolidated*.safetensors, tekken.json."""
