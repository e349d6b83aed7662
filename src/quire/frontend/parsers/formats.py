"""Formats of tool calls and reasoning, read from `formats.toml`; and a function that makes the commonest kind.

Knows what models write. `format_table` defines the notation.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from quire.frontend.parsers.format_table import (
    CallTemplate,
    ParserState,
    ReasoningFormat,
    ToolFormat,
)


def _entries(table: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The fields of each format, with the fields of the format that it is like."""
    entries: dict[str, dict[str, Any]] = {}
    for name, entry in table.items():
        base = entries.get(entry.get("like", ""), {})
        states = {state: {"kind": state, **one} for state, one in entry.get("states", {}).items()}
        entries[name] = {**base, **entry, "states": {**base.get("states", {}), **states}}
    return entries


def _names(table: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    return {other: name for name, entry in table.items() for other in entry.get("names", ())}


def _order(table: Mapping[str, dict[str, Any]]) -> tuple[str, ...]:
    return tuple(name for name, entry in table.items() if "detect" in entry)


TABLE = tomllib.loads(Path(__file__).with_name("formats.toml").read_text(encoding="utf-8"))
_TOOLS, _REASONING = _entries(TABLE["tools"]), TABLE["reasoning"]
TOOLS = {name: msgspec.convert(entry, ToolFormat) for name, entry in _TOOLS.items()}
REASONING = {name: msgspec.convert(entry, ReasoningFormat) for name, entry in _REASONING.items()}
ANY_CALLS = TOOLS.pop("any")
"""Constrained outputs use this format when a grammar cannot express the model's own."""
TOOL_NAMES, REASONING_NAMES = _names(TABLE["tools"]), _names(_REASONING)
"""Other name -> format."""
TOOL_ORDER, REASONING_ORDER = _order(TABLE["tools"]), _order(_REASONING)
"""The order in which the texts of formats are looked for in a chat template."""


def json_calls(begin: str, end: str) -> ToolFormat:
    """`begin {"name": ..., "arguments": {...}} end`, repeated."""
    states = {
        "content": ParserState("content", {begin: "open", end: "drop content"}),
        "open": ParserState("skip", {end: "drop content"}, fallback="call"),
        "call": ParserState("call", next_state="close"),
        "close": ParserState("close", {end: "content"}, fallback="content"),
    }
    call = CallTemplate(f'{begin}\n{{"name": "NAME", "arguments": ', f"}}\n{end}", "\n")
    return ToolFormat(states, call=call)
