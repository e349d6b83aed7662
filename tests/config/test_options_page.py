"""docs/options.md says what the tables say."""

from __future__ import annotations

from tools.list_options import PAGE, TABLES, filled


def test_the_page_is_up_to_date():
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page) == page, "run: python -m tools.list_options"


def test_a_stale_page_is_seen():
    page = PAGE.read_text(encoding="utf-8")
    for name in TABLES:
        start = page.index(f"<!-- {name} -->")
        row = page.index("| `", start)
        assert filled(page[:row] + "| `stale`" + page[row + 3 :]) == filled(page)
