"""Numbers of tool calls that no double holds: most JSON readers refuse them, so the next turn would be an error."""

from __future__ import annotations

import json
import random
import sys

import msgspec
import pytest
from parsed_text import cuts, parser, together

from quire.frontend.parsers.tool_schemas import ToolSchemas
from quire.frontend.parsers.value_reader import complete_value

LARGEST = sys.float_info.max
HERMES = '<tool_call>\n{"name": "f", "arguments": {"count": %s}}\n</tool_call>'


@pytest.mark.parametrize(('text', 'value'), [
    ("1e400", LARGEST), ("-1E+309", -LARGEST), ("[2.5e999]", [LARGEST]), ("1e308", 1e308), ("1e-400", 0.0),
    ("1" + "0" * 40, 10**40), ("9" * 31 + ".5e290", LARGEST),
])  # fmt: skip
def test_a_number_is_one_that_a_double_holds(text, value):
    for dialect in ("json", "python"):
        assert msgspec.json.decode(complete_value(text, dialect)) == value


def test_a_call_keeps_its_other_numbers():
    rng = random.Random(1)
    for number, value in (("1e400", LARGEST), ("-7e310", -LARGEST), ("12", 12), ("1.50", 1.5)):
        text = HERMES % number
        read = together(parser("hermes"), cuts(rng, text))
        assert read.calls == [("f", {"count": value})]
        assert msgspec.json.decode(read.arguments[0]) == {"count": value}
        assert read == together(parser("hermes"), [text])


@pytest.mark.parametrize("kind", ["number", None])
def test_parameters_without_quotes(kind):
    parameter = {} if kind is None else {"type": kind}
    tool = {"function": {"name": "f", "parameters": {"properties": {"x": parameter}}}}
    read = ToolSchemas([tool]).value("f", "x", "1e400")
    assert json.loads(read) == LARGEST
    assert json.loads(ToolSchemas([tool]).value("f", "x", '[1, {"a": 1e400}]')) in (
        [1, {"a": LARGEST}],
        '[1, {"a": 1e400}]',  # a list is no number
    )
