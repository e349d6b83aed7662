"""The command `quire`: imports only the module of the given subcommand."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "serve": ("quire.cli.serve", "start an HTTP server with the OpenAI API"),
    "chat": ("quire.cli.chat", "chat with a model, or with a running server"),
    "complete": ("quire.cli.complete", "complete text with a model, or with a running server"),
    "bench": (
        "quire.bench.__main__",
        "benchmark a server or the engine (the commands of vllm bench)",
    ),
    "run-batch": ("quire.cli.run_batch", "run an OpenAI batch file of requests"),
    "doctor": (
        "quire.cli.doctor",
        "check whether a model would start on this machine, and how many requests fit",
    ),
    "collect-env": (
        "quire.cli.collect_env",
        "describe this machine and installation for a bug report",
    ),
    "completion": ("quire.cli.completion", "print a completion script for bash, zsh or fish"),
    "kv": ("quire.cli.kv", "list, verify or delete the KV blocks in a folder (--kv-disk-dir)"),
    "replay": ("quire.cli.replay", "run the last steps of a crashed engine again"),
    "version": ("", "print the version"),
}
"""Subcommand -> (module with `main(argv) -> int`, what it does)."""


CACHE = "models are in the Hugging Face cache: "
OLLAMA = {
    "pull": "`quire serve NAME` and `quire chat NAME` download a model when they need it",
    "run": "use `quire chat NAME`",
    "list": f"{CACHE}`hf cache ls` lists them",
    "ls": f"{CACHE}`hf cache ls` lists them",
    "rm": f"{CACHE}`hf cache rm` deletes them",
    "ps": "a server has one model: GET /v1/models names it, GET /health says whether it is loaded",
    "show": "`quire doctor NAME` describes a model on this machine",
    "stop": "press Ctrl-C in the terminal of `quire serve`",
}
"""Command of Ollama -> what to use."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    first = words[0] if words else "--help"
    if first in ("-v", "--version", "-V", "version"):
        from quire.version import __version__

        print(__version__)
        return 0
    if first in ("-h", "--help", "help"):
        print(usage(), end="")
        return 0 if words else 2
    if first not in COMMANDS:
        print(f"quire: error: {_unknown(first)}", file=sys.stderr)
        return 2
    return _run(first, words[1:])


def _run(command: str, words: list[str]) -> int:
    module = COMMANDS[command][0]
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as why:
        if why.name != module:
            raise
        print(f"quire: error: `quire {command}` is not part of this version", file=sys.stderr)
        return 2
    try:
        return int(found.main(words) or 0)
    except KeyboardInterrupt:
        return 130


def usage() -> str:
    lines = ["usage: quire COMMAND ...", ""]
    lines += [f"  {name:<12} {words}" for name, (_, words) in COMMANDS.items()]
    lines += [
        "",
        "`quire serve` starts the embedded model; `quire COMMAND --help` lists its options.",
    ]
    return "\n".join(lines) + "\n"


def _unknown(word: str) -> str:
    import difflib

    if word in OLLAMA:
        return f"unknown command {word!r}, a command of Ollama: {OLLAMA[word]}"
    near = difflib.get_close_matches(word, COMMANDS, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; choose from {', '.join(COMMANDS)}"
    return f"unknown command {word!r}{hint}"


if __name__ == "__main__":
    sys.exit(main())
