"""The loop and its door. core, client and process know no torch; assemble puts the rooms together."""
