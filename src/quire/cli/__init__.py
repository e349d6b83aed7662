"""Commands: serve, chat, complete, run-batch, bench, doctor, replay, collect-env."""
