"""`quire bench` and `python -m quire.bench`: run the benchmark that the first argument names.

Imports only the module of that benchmark: the load generator must run without torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

KINDS = {
    "serve": ("serve.run", "benchmark a running server (vLLM's options and result file)"),
    "sweep": ("sweep", "serve with each of several sets of flags, with a server for each"),
    "throughput": ("throughput", "offline throughput of many prompts, without a server"),
    "latency": ("latency", "latency of one batch, without a server"),
    "startup": ("startup", "cold and warm start time, in new processes"),
}
"""Name -> (module with `main(argv) -> int`, what it measures)."""


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["-h"], ["--help"]):
        print(usage(), end="")
        return 0
    if not words or words[0] not in KINDS:
        fault = (
            f"{words[0]!r} is not a benchmark" if words else "the name of a benchmark is missing"
        )
        print(f"quire bench: error: {fault}: choose from {', '.join(KINDS)}", file=sys.stderr)
        return 2
    return int(importlib.import_module(f"quire.bench.{KINDS[words[0]][0]}").main(words[1:]))


def usage() -> str:
    lines = ["usage: quire bench WHAT ...", ""]
    lines += [f"  {name:<14} {about}" for name, (_, about) in KINDS.items()]
    return "\n".join([*lines, "", "`quire bench WHAT --help` lists its options.", ""])


if __name__ == "__main__":
    raise SystemExit(main())
