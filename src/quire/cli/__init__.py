"""Commands: serve, chat, complete, bench, collect-env."""
