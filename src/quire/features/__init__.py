"""Features: each has a few small objects (a gate, a hook, a logits processor) that engine/build.py plugs in."""
