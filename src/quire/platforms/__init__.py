"""Devices: what each can do and prefers. facts.py knows no torch."""
