"""The configuration: frozen dataclasses, one section a file; `engine.py` combines them."""
