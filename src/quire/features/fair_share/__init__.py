"""Fair shares of the engine for tenants: the waiting queue of `--api-key-file`."""
