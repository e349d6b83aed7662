"""A running engine writes its checkpoint as `load_format=sharded_state` reads it."""
