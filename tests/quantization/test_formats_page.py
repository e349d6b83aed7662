"""docs/quantization.md lists exactly the formats that are tested."""

from __future__ import annotations

from tools.generated_tables import filled
from tools.list_formats import PAGE, TABLES


def test_the_page_equals_the_tools_output() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page, TABLES) == page, "run: python -m tools.list_formats"
