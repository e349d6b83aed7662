"""`python -m quire.bench`: see offline.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from quire.bench import offline


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m quire.bench", description=offline.__doc__)
    offline.add_arguments(parser)
    return offline.run(parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
