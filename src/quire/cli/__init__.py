"""The subcommands of `quire` except `bench`, one module each; `main.py` runs them."""
