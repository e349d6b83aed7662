"""What can be chosen: frozen dataclasses, one section a file; `engine.py` is the tree of them."""
