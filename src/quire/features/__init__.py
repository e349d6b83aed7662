"""Features: each a few small objects that fit the sockets of the rooms; engine/assemble.py plugs them in."""
