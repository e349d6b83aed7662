"""docs/troubleshooting.md quotes the messages as the code writes them."""

from __future__ import annotations

import re

import pytest

from tools.generated_tables import DOCS

ROWS = re.findall(r"^\| (.*?) \|", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.M)
QUOTES = sorted({quote for row in ROWS for quote in re.findall(r'"(.*?)"', row)})
CODE = re.sub(
    r'"\s*\n\s*f?"',  # a string of several lines
    "",
    "\n".join(p.read_text(encoding="utf-8") for p in (DOCS.parent / "src/quire").rglob("*.py")),
)


@pytest.mark.parametrize("quote", QUOTES)
def test_a_quoted_message_is_in_the_code(quote: str):
    # `... is not supported yet` follows the name of the feature; N and M are numbers
    parts = re.split(r"\.\.\.|\b[NM]\b|(?= is not supported yet)", quote)
    for part in filter(None, (part.strip(" ,") for part in parts)):
        assert part in CODE
