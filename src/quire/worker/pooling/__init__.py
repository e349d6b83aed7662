"""The model output of pooling models: vectors and scores of prompts, in place of tokens."""
