"""The engine loop, its process, and the clients that reach it. Only `build.py` imports packages that need torch."""
