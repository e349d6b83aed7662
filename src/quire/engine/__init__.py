"""The engine loop, its process, and the clients that reach it. Only `assemble.py` imports packages that need torch."""
