"""Devices: what each can do and prefers. detect.py knows no torch."""
