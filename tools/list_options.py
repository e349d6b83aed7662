"""Writes the tables of docs/options.md and docs/vllm_flags.md from the dataclasses and the tables of flags and variables.

    python -m tools.list_options            rewrite the pages' tables
    python -m tools.list_options --check    exit with 1 if one of them is not what this would write

Knows what `quire serve --help=all` knows. Loads no model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator

from quire import env
from quire.config.help import FIRST, sections
from quire.config.options import Option, options, section_help
from quire.config.vllm_flags import OLD, SHORT, TABLE
from tools.generated_tables import DOCS, Tables, main

KINDS = {"flag": "", "int": "N", "float": "X", "text": "TEXT", "json": "JSON", "list": "TEXT ...", "maybe": "[TEXT]"}  # fmt: skip


def first_flags() -> Iterator[str]:
    """The flags of the first screen of --help."""
    yield "| flag | |"
    yield "|---|---|"
    for group in FIRST.values():
        for flag, words in group.items():
            name, _, value = flag.partition(" ")
            yield f"| `--{name.replace('_', '-')}` {value} | {_cell(words)} |"


def flags() -> Iterator[str]:
    """A table for each section."""
    for section in sections():
        title, words = section_help(section)
        yield f"### {title}"
        yield ""
        yield f"`quire serve --help={section}`"
        yield ""
        yield "| flag | default | |"
        yield "|---|---|---|"
        for option in options().values():
            if option.section == section:
                yield f"| {_spelt(option)} | {_default(option)} | {_cell(words[option.name])} |"
        yield ""


def _spelt(option: Option) -> str:
    dashed = option.name.replace("_", "-")
    names = [f"--{dashed}", *([SHORT[option.name]] if option.name in SHORT else [])]
    value = "\\|".join(option.choices) if option.choices else KINDS[option.kind]
    return ", ".join(f"`{name}`" for name in names) + (f" {value}" if value else "")


def _default(option: Option) -> str:
    if option.default is None or option.default in ([], {}):
        return ""
    text = option.default if isinstance(option.default, str) else json.dumps(option.default)
    return f"`{text}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def rows(treatment: str) -> Callable[[], Iterator[str]]:
    """The table of vLLM's flags with this treatment: a row for each reason."""

    def table() -> Iterator[str]:
        reasons: dict[str, list[str]] = {}
        for name, row in sorted(OLD.items()):
            if row.treatment == treatment and row.say:
                names = [f"--{name.replace('_', '-')}", *([SHORT[name]] if name in SHORT else [])]
                reasons.setdefault(row.say, []).append(", ".join(f"`{one}`" for one in names))
        yield (
            "| feature: what to do instead | flags |" if treatment == "E" else "| reason | flags |"
        )
        yield "|---|---|"
        for reason, names in reasons.items():
            yield f"| {_cell(reason)} | {' '.join(names)} |"

    return table


def llama_cpp() -> Iterator[str]:
    yield "| llama.cpp | here |"
    yield "|---|---|"
    for remedy, names in TABLE["llama_cpp"].items():
        spelt = (("-" if len(n) < 4 else "--") + n if "_" not in n else n for n in names.split())
        yield f"| {' '.join(f'`{one}`' for one in spelt)} | {_cell(remedy)} |"


def variables() -> Iterator[str]:
    yield "| variable | default | |"
    yield "|---|---|---|"
    for row in env.VARIABLES.values():
        default = "" if row.default in (None, "") else f"`{row.default}`"
        fills = f" Fills `{row.field}`." if row.field else ""
        without = f" No effect: {row.no_effect}." if row.no_effect else ""
        yield f"| `QUIRE_{row.name}` | {default} | {_cell(row.help)}{fills}{without} |"


TABLES: dict[str, Tables] = {
    "options.md": {"first flags": first_flags, "flags": flags, "variables": variables},
    "vllm_flags.md": {
        "refused": rows("E"),
        "warned": rows("W"),
        "accepted": rows("A"),
        "llama.cpp": llama_cpp,
    },
}
"""Page -> its tables."""


if __name__ == "__main__":
    sys.exit(main(__doc__, {DOCS / name: tables for name, tables in TABLES.items()}))
