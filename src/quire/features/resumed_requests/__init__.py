"""Admits requests that ran when another process died, one at a time."""
