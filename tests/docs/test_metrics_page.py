"""docs/metrics.md has every metric that a server exports."""

from __future__ import annotations

from tools.generated_tables import filled
from tools.list_metrics import PAGE, TABLES


def test_the_table_equals_the_exported_metrics():
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page, TABLES) == page, "run: python -m tools.list_metrics"


def test_a_missing_metric_is_detected():
    page = PAGE.read_text(encoding="utf-8")
    lines = [line for line in page.splitlines(keepends=True) if "num_requests_running" not in line]
    assert filled("".join(lines), TABLES) == page
