"""Writes the table of docs/metrics.md from what a server exports.

python -m tools.list_metrics            rewrite the page's table
python -m tools.list_metrics --check    exit with 1 if it is not what this would write
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families

from quire.observe.metric_table import COUNTS, ENGINE_HISTOGRAMS, INFOS, RESIDENCY, SNAPSHOTS
from quire.observe.prometheus import ServerMetrics
from quire.protocol.output import EngineStats
from tools.generated_tables import DOCS, main

PAGE = DOCS / "metrics.md"
OF_PYTHON = ("python_", "process_")


def rows() -> Iterator[str]:
    yield "| name | type | meaning |"
    yield "|---|---|---|"
    replaced = {row.name for row in SNAPSHOTS if row.legacy}
    metrics = ServerMetrics("model")
    metrics.attach(EngineStats, 2048, {})  # the histograms of requests need an engine
    for family in text_string_to_metric_families(metrics.render().decode()):
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
    for name, (text, _) in INFOS.items():
        yield f"| `{name}` | gauge | {text} |"


TABLES = {"metrics": rows}


if __name__ == "__main__":
    sys.exit(main(__doc__, {PAGE: TABLES}))
