"""`quire bench` and `python -m quire.bench`: what is measured is the first word.

quire bench [offline] ...     offline throughput beside Transformers (offline.py)
quire bench steps ...         what a step costs the scheduler (steps.py)
quire bench divergence ...    how often company changes a bf16 answer (divergence.py)
quire bench structured ...    what constrained output costs (structured.py)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from quire.bench import divergence, offline, steps, structured


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["steps"]:
        return steps.main(words[1:])
    if words[:1] == ["divergence"]:
        return divergence.main(words[1:])
    if words[:1] == ["structured"]:
        return structured.main(words[1:])
    words = words[1:] if words[:1] == ["offline"] else words
    parser = argparse.ArgumentParser(
        prog="quire bench",
        description=offline.__doc__,
        epilog="`quire bench steps`: of a step alone.",
    )
    offline.add_arguments(parser)
    return offline.run(parser.parse_args(words), words)


if __name__ == "__main__":
    raise SystemExit(main())
