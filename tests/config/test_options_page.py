"""docs/options.md and docs/vllm_flags.md say what the tables say."""

from __future__ import annotations

import pytest

from tools.generated_tables import DOCS, filled
from tools.list_options import TABLES


@pytest.mark.parametrize("name", TABLES)
def test_the_page_is_up_to_date(name):
    page = (DOCS / name).read_text(encoding="utf-8")
    assert filled(page, TABLES[name]) == page, "run: python -m tools.list_options"


@pytest.mark.parametrize(
    ("name", "table"), [(n, t) for n, tables in TABLES.items() for t in tables]
)
def test_a_stale_page_is_seen(name, table):
    page = (DOCS / name).read_text(encoding="utf-8")
    row = page.index("|---|", page.index(f"<!-- {table} -->"))
    stale = page[:row] + "| `stale`" + page[row:]
    assert filled(stale, TABLES[name]) == page != stale
