"""Tables of the pages in docs/ that are written from code, between `<!-- NAME -->` and `<!-- end -->`.

python -m tools.list_...            rewrite the tables
python -m tools.list_... --check    exit with 1 if one of them is not what this would write
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
Tables = Mapping[str, Callable[[], Iterable[str]]]
"""Name of a table -> its lines."""


def filled(page: str, tables: Tables) -> str:
    """The page with the current tables.

    Raises:
        ValueError: a table's markers are not in the page once.
    """
    for name, rows in tables.items():
        start, table = f"<!-- {name} -->", "\n".join(rows()).strip()
        before, *after = page.split(start)
        if len(after) != 1 or "<!-- end -->" not in after[0]:
            raise ValueError(f"the page must have {start} once, and then <!-- end -->")
        rest = after[0].partition("<!-- end -->")[2]
        page = f"{before}{start}\n\n{table}\n\n<!-- end -->{rest}"
    return page


def main(what: str | None, pages: Mapping[Path, Tables]) -> int:
    """Rewrite the pages, or check them; returns the exit status. `what`: the tool's description for --help."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--check", action="store_true", help="write nothing")
    only_check = parser.parse_args().check
    stale = False
    for path, tables in pages.items():
        page = path.read_text(encoding="utf-8")
        wanted = filled(page, tables)
        stale = stale or page != wanted
        if not only_check:
            path.write_text(wanted, encoding="utf-8")
    return int(only_check and stale)
