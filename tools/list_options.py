"""Writes the tables of docs/options.md from the dataclasses, the table of old names and the table of variables.

    python -m tools.list_options            rewrite the page's tables
    python -m tools.list_options --check    exit with 1 if they are not what this would write

Knows what `quire serve --help=all` knows. Loads no model.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from quire import env
from quire.config.help import sections
from quire.config.options import Option, options, section_help
from quire.config.vllm_flags import OLD, SHORT

PAGE = Path(__file__).resolve().parents[1] / "docs" / "options.md"
KINDS = {"flag": "", "int": "N", "float": "X", "text": "TEXT", "json": "JSON", "list": "TEXT ...", "maybe": "[TEXT]"}  # fmt: skip
TREATMENTS = {"A": "accepted", "W": "accepted, with a warning", "E": "refused"}


def flags() -> Iterator[str]:
    """A table for each section."""
    for section in sections():
        title, words = section_help(section)
        yield f"### {title}: `--help={section}`"
        yield ""
        yield "| flag | default | |"
        yield "|---|---|---|"
        for option in options().values():
            if option.section == section:
                yield f"| {_spelt(option)} | {_default(option)} | {_cell(words[option.name])} |"
        yield ""


def _spelt(option: Option) -> str:
    dashed = option.name.replace("_", "-")
    names = [f"--{dashed}", *option.short]
    value = "\\|".join(option.choices) if option.choices else KINDS[option.kind]
    return ", ".join(f"`{name}`" for name in names) + (f" {value}" if value else "")


def _default(option: Option) -> str:
    if option.default is None or option.default in ([], {}):
        return ""
    text = option.default if isinstance(option.default, str) else json.dumps(option.default)
    return f"`{text}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def old_names() -> Iterator[str]:
    yield "| name | here | |"
    yield "|---|---|---|"
    for name, row in sorted(OLD.items()):
        if name == "model_tag":
            continue  # the positional word
        short = f", `{SHORT[name]}`" if name in SHORT else ""
        yield f"| `{name}`{short} | {TREATMENTS[row.treatment]} | {_cell(row.say)} |"


def variables() -> Iterator[str]:
    yield "| variable | default | |"
    yield "|---|---|---|"
    for row in env.VARIABLES.values():
        default = "" if row.default in (None, "") else f"`{row.default}`"
        fills = f" Fills `{row.field}`." if row.field else ""
        yield f"| `QUIRE_{row.name}` | {default} | {_cell(row.help)}{fills} |"


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "flags": flags,
    "old names": old_names,
    "variables": variables,
}


def filled(page: str) -> str:
    """The page with each table between `<!-- name -->` and `<!-- end -->` as it should be."""
    for name, rows in TABLES.items():
        table = "\n".join(rows()).strip()
        mark = re.escape(f"<!-- {name} -->")
        page, count = re.subn(
            rf"{mark}.*?<!-- end -->",
            lambda _, n=name, t=table: f"<!-- {n} -->\n\n{t}\n\n<!-- end -->",
            page,
            flags=re.DOTALL,
        )
        if count != 1:
            raise SystemExit(f"{PAGE} has {count} tables named {name!r}; it should have one")
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    page = PAGE.read_text(encoding="utf-8")
    wanted = filled(page)
    if parser.parse_args().check:
        return int(page != wanted)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
