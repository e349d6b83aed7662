"""Formats whose calls are checked against the tool's schema (minicpm5): a call is written whole, or it stays text."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from parsed_text import Read, cuts, together

from quire.frontend.parsers.format_table import Alias, ToolFormat, compose
from quire.frontend.parsers.formats import TOOLS
from quire.frontend.parsers.stream_parser import StreamParser
from quire.frontend.parsers.tool_schemas import ToolSchemas

ROUTE = {
    "name": "find_route",
    "parameters": {
        "type": "object",
        "properties": {"to": {"type": "string"}, "stops": {"type": "integer"}},
        "required": ["to"],
    },
}
ROAMING = {
    "name": "toggle_roaming",
    "parameters": {
        "type": "object",
        "properties": {"line_id": {"type": "string"}, "enabled": {"type": "boolean"}},
        "required": ["line_id", "enabled"],
    },
}
LINE = {
    "name": "get_details_by_id",
    "parameters": {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]},
}
MINICPM: ToolFormat = TOOLS["minicpm5"]


def written(name: str, *parameters: tuple[str, str]) -> str:
    inner = "".join(f'<param name="{key}">{text}</param>' for key, text in parameters)
    return f'<function name="{name}">{inner}</function>'


def read(text: str, *tools: dict[str, Any], format: ToolFormat = MINICPM) -> Read:
    """What the text comes to, whole and in pieces."""

    def one(pieces: list[str]) -> Read:
        schemas = ToolSchemas(tools or (ROUTE,))
        return together(StreamParser(compose(format, None), schemas, make_id=str), pieces)

    whole = one([text])
    for pieces in (list(text), *(cuts(random.Random(text), text) for _ in range(3))):
        assert one(pieces) == whole
    return whole


def test_parameters_that_the_tool_lacks_are_dropped() -> None:
    text = written("find_route", ("to", "Oslo"), ("via", "Bergen"), ("stops", "2"))
    assert read(text).calls == [("find_route", {"to": "Oslo", "stops": 2})]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (written("find_route", ("stops", "2")), "lacks 'to'"),
        (written("find_route", ("To", "Oslo")), "lacks 'to'"),
        (written("find_route"), "lacks 'to'"),
        (written("find_route", ("to", "Oslo"), ("to", "Bergen")), "occurs twice"),
        (written("find_route", ("properties", '{"x": 1}')), "lacks 'to'"),
        (written("find_route", ("arguments", '{"stops": 1}')), "lacks 'to'"),
        (written("find_route", ("to", "Oslo"))[:-3], "ended within a tool call"),
    ],
)
def test_a_call_that_does_not_follow_the_schema_is_text(text: str, reason: str) -> None:
    found = read(f"So: {text}")
    assert (found.content, found.calls) == (f"So: {text}", [])
    assert reason in found.reasons[0]


def test_a_call_after_such_a_call_is_read() -> None:
    wrong, right = written("find_route", ("stops", "2")), written("find_route", ("to", "Oslo"))
    found = read(f"{wrong}\n{right}\nDone.")
    assert (found.content, found.calls) == (f"{wrong}\nDone.", [("find_route", {"to": "Oslo"})])


def test_arguments_in_one_parameter() -> None:
    text = written("find_route", ("arguments", "{'to': 'Oslo', 'stops': 1}"))
    assert read(text).calls == [("find_route", {"to": "Oslo", "stops": 1})]


def test_names_of_tools_that_do_not_exist() -> None:
    """Renamed only where the request has the tool that is meant."""
    text = written("enable_roaming", ("line_id", "L7"))
    assert read(text, ROAMING).calls == [("toggle_roaming", {"line_id": "L7", "enabled": True})]
    assert read(text, ROUTE).content == text
    text = written("get_line_details", ("customer_id", "C1"), ("line_id", "L7"))
    assert read(text, LINE).calls == [("get_details_by_id", {"id": "L7"})]
    own = {**ROAMING, "name": "enable_roaming"}
    kept = written("enable_roaming", ("line_id", "L7"), ("enabled", "false"))
    assert read(kept, ROAMING, own).calls == [("enable_roaming", {"line_id": "L7", "enabled": False})]  # fmt: skip


def test_an_argument_that_an_alias_implies_may_be_written() -> None:
    text = written("enable_roaming", ("line_id", "L7"), ("enabled", "false"))
    assert read(text, ROAMING).calls == [("toggle_roaming", {"line_id": "L7", "enabled": False})]


def test_the_mark_of_a_space() -> None:
    text = written("find_route", ("to", "Oslo"), ("stops", "2")).replace(" name", "Ġname")
    assert read(text).calls == [("find_route", {"to": "Oslo", "stops": 2})]


def test_any_text_in_a_value() -> None:
    text = written("find_route", ("to", "<![CDATA[  a <b>\n]]>"))
    assert json.loads(read(text).arguments[0]) == {"to": "  a <b>\n"}


def test_aliases_are_data() -> None:
    assert MINICPM.aliases["enable_roaming"] == Alias("toggle_roaming", {}, {"enabled": True})
