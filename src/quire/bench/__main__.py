"""`quire bench` and `python -m quire.bench`: what is measured is the first word.

Imports only what that word needs: a load generator wants no torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

KINDS = {
    "serve": "load a running server, ours or another's (vLLM's options and result file)",
    "throughput": "many prompts at once, without a server",
    "latency": "one batch, again and again, without a server",
    "startup": "from nothing to ready, in new processes",
    "loading": "memory while a model is loaded, and seconds to its first token",
    "offline": "throughput beside Transformers; also without a word",
    "peers": "throughput beside vLLM and OpenVINO, each in its own environment",
    "serving": "what serving costs: the API process's CPU, tokens a second at 1, 16 and 64 clients",
    "steps": "what a step costs the scheduler",
    "host": "what a step of the whole engine costs beside the model, by part",
    "streaming": "what streaming to clients costs, beside the same requests offline",
    "quality": "what short weights and short keys and values cost the embedded model",
    "divergence": "how often company changes a bf16 answer",
    "structured": "what constrained output costs",
    "gpu": "a GPU's kernels, steps and serving: checked, then timed",
}
"""Word -> what it measures, in the module of that name: its `main(argv) -> int`."""


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["-h"], ["--help"]):
        print(usage(), end="")
        return 0
    kind = words.pop(0) if words and words[0] in KINDS else "offline"
    if kind == "offline" and words and not words[0].startswith("-"):
        print(f"quire bench: error: {words[0]!r}: not one of {', '.join(KINDS)}", file=sys.stderr)
        return 2
    return int(importlib.import_module(f"quire.bench.{kind}").main(words))


def usage() -> str:
    lines = ["usage: quire bench [WHAT] ...", ""]
    lines += [f"  {name:<11} {words}" for name, words in KINDS.items()]
    return "\n".join([*lines, "", "`quire bench WHAT --help` says more.", ""])


if __name__ == "__main__":
    raise SystemExit(main())
