"""Text to tokens and back: prompts, templates, detokenizing. No torch in the text path."""
