"""docs/metrics.md has every metric that a server exports."""

from __future__ import annotations

import pytest

from tools.generated_tables import filled
from tools.list_metrics import PAGE, TABLES


def test_the_table_equals_the_exported_metrics():
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page, TABLES) == page, "run: python -m tools.list_metrics"


@pytest.mark.parametrize("name", ["vllm:num_requests_running", "vllm:time_to_first_token_seconds"])
def test_a_missing_metric_is_detected(name: str):
    page = PAGE.read_text(encoding="utf-8")
    row = f"| `{name}` |"
    lines = [line for line in page.splitlines(keepends=True) if not line.startswith(row)]
    assert len(lines) == len(page.splitlines()) - 1
    assert filled("".join(lines), TABLES) == page
