"""Devices: what each can do and prefers. `detect.py` does not import torch."""
