"""Writes the table of docs/metrics.md from what a server exports.

python -m tools.list_metrics            rewrite the page's table
python -m tools.list_metrics --check    exit with 1 if it is not what this would write
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from quire.observe.metric_table import COUNTS, ENGINE_HISTOGRAMS, RESIDENCY, SNAPSHOTS
from quire.observe.prometheus import ServerMetrics

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
START, END = "<!-- metrics -->\n", "<!-- end of metrics -->\n"
OF_PYTHON = ("python_", "process_")


def rows() -> Iterator[str]:
    yield "| name | type | meaning |"
    yield "|---|---|---|"
    replaced = {row.name for row in SNAPSHOTS if row.legacy}
    for family in text_string_to_metric_families(ServerMetrics("model").render().decode()):
        if family.name.endswith("_created") or family.name.startswith(OF_PYTHON):
            continue
        if family.name in replaced or family.documentation.startswith("Old"):
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        yield f"| `{name}` | {family.type} | {family.documentation} |"
    for row in ENGINE_HISTOGRAMS.values():
        needs = " Only with `--kv-cache-metrics`." if row.family == RESIDENCY else ""
        yield f"| `{row.name}` | histogram | {row.help}{needs} |"
    for name, text in COUNTS.values():
        yield f"| `{name}_total` | counter | {text} |"


def filled(page: str) -> str:
    """`page` with the lines between the markers written anew."""
    before, found, rest = page.partition(START)
    _, closed, after = rest.partition(END)
    if not (found and closed):
        raise ValueError(f"{PAGE.name} has no markers {START.strip()} ... {END.strip()}")
    return f"{before}{START}\n" + "\n".join(rows()) + f"\n\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.list_metrics", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    only_check = parser.parse_args().check
    old = PAGE.read_text(encoding="utf-8")
    new = filled(old)
    if only_check:
        return int(old != new)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
