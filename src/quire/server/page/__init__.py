"""GET /: a page to chat with the model and to see the engine at work. Self-contained."""
