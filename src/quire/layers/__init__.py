"""Building blocks of models. A layer knows the checkpoint names of its own tensors."""
