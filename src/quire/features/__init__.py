"""Features: each has a few small objects (a gate, a hook, a logits processor) that engine/assemble.py plugs in."""
