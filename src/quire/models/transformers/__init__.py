"""The Transformers backend: Hugging Face model code over Quire's attention and KV cache."""
