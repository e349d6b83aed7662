"""Every schema is enforced exactly, or refused by name; docs/structured.md says which.

After a change that is meant: `PYTHONPATH=src:tests:tests/structured python tests/structured/test_schemas.py`, and read
the diff of the page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from grammar_reader import Reader
from schema_cases import CASES, INT, STR, obj

from quire.features.structured.validate import fault_of
from quire.protocol.structured_outputs import StructuredOutputsParams

PAGE = Path(__file__).parents[2] / "docs" / "structured.md"
BEGIN, END = "<!-- made by tests/structured/test_schemas.py -->\n", "<!-- end -->\n"
ODD_REGEX = re.compile(r"\\p\{|\\d\{3\}-")  # Python's re has not Unicode's classes


def written(value: Any) -> list[str]:
    """As a program may write it: with spaces, without, and with line breaks."""
    return [
        json.dumps(value, ensure_ascii=False),
        json.dumps(value, ensure_ascii=False, separators=(",", ":")),
        json.dumps(value, ensure_ascii=False, indent=0),
    ]


def _tag(**options: Any) -> StructuredOutputsParams:
    """As a call of a tool is asked for."""
    content = {"type": "json_schema", "json_schema": obj({"a": INT})}
    tag = {"type": "structural_tag", "format": content}
    return StructuredOutputsParams(structural_tag=json.dumps(tag), **options)


WAYS = {
    "json": partial(StructuredOutputsParams, json=obj({"a": INT})),
    "json_object": partial(StructuredOutputsParams, json_object=True),
    "structural_tag": _tag,
}


def refusal(schema: Any) -> str | None:
    return fault_of(StructuredOutputsParams(json=schema).plain())


def names_it(keyword: str, schema: Any, why: str) -> bool:
    """The message has the keyword; or the name of the part of it that is at fault; or says that nothing can fit."""
    about = {
        "format": "format",
        "pattern": "regex",
        "not": "not",
        "$ref": "Resource",
        "$dynamicRef": "$dynamic",
    }
    if "Unsatisfiable" in why or "cannot fit" in why:
        return True
    if keyword == "$ref" and "Pointer" in why:
        return True
    if keyword == "minProperties" and "min/maxProperties" in why:
        return True
    return keyword in why or about.get(keyword, "\0") in why or (schema is False and "not" in why)


def test_the_suite_has_enough_cases():
    assert len(CASES) >= 150
    assert sum(len(good) + len(bad) for _, _, good, bad in CASES) >= 450


@pytest.mark.parametrize("number", range(len(CASES)))
def test_the_labels_are_right(number: int):
    keyword, schema, admits, refuses = CASES[number]
    if (
        keyword == "format"
        or ODD_REGEX.search(json.dumps(schema))
        or "\\\\p{" in json.dumps(schema)
    ):
        return  # the library checks formats only with further packages
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    assert all(kind(schema).is_valid(value) for value in admits)
    assert not any(kind(schema).is_valid(value) for value in refuses)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_schema_is_enforced_exactly_or_refused_by_name(reader: Reader, number: int):
    keyword, schema, admits, refuses = CASES[number]
    if (why := refusal(schema)) is not None:
        assert names_it(keyword, schema, why), why
        return
    constraint = StructuredOutputsParams(json=schema)
    for value in admits:
        for text in written(value):
            assert reader.admits(constraint, text), text
    for value in refuses:
        for text in written(value):
            assert not reader.admits(constraint, text), text


LOOSE = obj({"a": INT})
TEXTS: list[tuple[Any, str, bool]] = [
    (LOOSE, '{"a":1,"a":"x"}', False),
    (LOOSE, '{"b":1,"a":"x"}', False),
    (LOOSE, '{"\\u0061":"x"}', False),
    (LOOSE, '{"a":1,}', False),
    (LOOSE, "{'a':1}", False),
    (LOOSE, '{"a":1}x', False),
    (LOOSE, ' {"a" : 1 }', False),  # nothing before the first brace
    (LOOSE, '{"a":1', False),
    (INT, "01", False),
    (INT, "+1", False),
    (INT, "-0", True),
    ({"type": "number"}, "NaN", False),
    ({"type": "number"}, "1e400", True),
    ({"type": "number"}, ".5", False),
    (STR, '"\n"', False),
    (STR, '"\\x41"', False),
    (STR, '"\\n\\t\\"\\\\"', True),
    ({"type": "array"}, "[1,]", False),
    # patterns, where dialects differ
    *(
        (({"type": "string", "pattern": pattern}), text, fits)
        for pattern, text, fits in [
            ('^[^"]*$', '"a\\"b"', False), ('^[^"]*$', '"a\\\\b"', True), ("^[^\\\\]*$", '"a\\\\b"', False),
            ('^[^"\\\\]+$', '"ab"', True), ('^[^"\\\\]+$', '"a\\"b"', False), ('^x[^"]*y$', '"x\\"y"', False),
            ("^[\\x00-!#-z]*$", '"\\""', False), ("^[\\x00-!#-z]*$", '"\\n#"', True), ("^[\\s\\S]*$", '"\\"\\n"', True),
            ("^.$", '"\\r"', False), ("^.$", '"é"', True), ("^.*$", '"a\\"b"', True), ("^\\S$", '"\u00a0"', False),
            ("^[[]$", '"["', True), ("^[a&&b]$", '"&"', True), ("^[^a&&b]$", '"b"', False), ("^[a~~b]$", '"~"', True),
            ("^a|b$", '"ax"', True), ("^a|b$", '"xb"', True), ("^a|b$", '"xa"', False), ("^\\d+$", '"٣"', False),
            ("^[\\w]+$", '"é"', False), ("^\\<$", '"<"', True), ("^\\/$", '"/"', True), ("^[^\\]]$", '"]"', False),
            ("^\\.$", '"a"', False), ("^[.]$", '"a"', False), ("^\\[.\\]$", '"[a]"', True),
        ]
    ),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "text", "fits"), TEXTS)
def test_texts_that_only_look_right(reader: Reader, schema: Any, text: str, fits: bool):
    assert reader.admits(StructuredOutputsParams(json=schema), text) is fits


def test_options_of_the_constraint(reader: Reader):
    tight = StructuredOutputsParams(json=LOOSE, disable_any_whitespace=True)
    assert reader.admits(tight, '{"a":1}')
    assert not reader.admits(tight, '{"a": 1}')
    closed = StructuredOutputsParams(
        json=obj({"a": obj({"properties": INT})}), disable_additional_properties=True
    )
    assert reader.admits(closed, '{"a":{"properties":1}}')
    assert not reader.admits(closed, '{"a":{"z":1}}')
    assert not reader.admits(closed, '{"z":1}')
    spaced = StructuredOutputsParams(json=LOOSE, whitespace_pattern="[ ]?")
    assert reader.admits(spaced, '{ "a": 1 }')
    assert not reader.admits(spaced, '{  "a":1}')


@pytest.mark.parametrize("ask", WAYS.values(), ids=WAYS)
def test_at_most_two_spaces_in_a_row(reader: Reader, ask: Callable[..., StructuredOutputsParams]):
    """However JSON is asked for: small models write spaces and line breaks without end."""
    for text in ('{"a":1}', '{"a": 1}', '{\n "a" :\t\n1\r\n}'):
        assert reader.admits(ask(), text)
    for text in ('{   "a":1}', '{"a":\n\n\n1}', '{"a":1 \t }', ' {"a":1}', '{"a":1} '):
        assert not reader.admits(ask(), text)
    assert reader.admits(ask(disable_any_whitespace=True), '{"a":1}')
    assert not reader.admits(ask(disable_any_whitespace=True), '{"a": 1}')
    assert reader.admits(ask(whitespace_pattern="[ ]{1,4}"), '{    "a":1}')


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"x-guidance": {"lenient": True}, "not": {}}, "not"),  # no way round by the engine's options
        ('{"type":', "not JSON"),
        ("[]", "must be a JSON object"),
        ({"type": "strin"}, "strin"),
        ({"type": "string", "pattern": "["}, "class is not closed"),
        ({"type": "string", "pattern": "[a--b]"}, "hyphens"),
        ({"properties": {"a": 5}}, "must be an object"),
    ],
)  # fmt: skip
def test_invalid_schemas_are_refused(schema: Any, says: str):
    assert says in (refusal(schema) or "")


def test_limits():
    deep: Any = {"type": "integer"}
    for _ in range(80):
        deep = {"type": "array", "items": deep}
    assert "nested" in (refusal(deep) or "")
    assert "the limit" in (refusal(json.dumps({"enum": ["x" * (1 << 20)]})) or "")
    assert "4005 in all" in (
        refusal(obj({str(n): obj({str(m): INT for m in range(800)}) for n in range(5)})) or ""
    )
    assert "the limits are 1000" in (refusal(obj({str(n): INT for n in range(1001)})) or "")
    wide = {"enum": [f"value number {n}" for n in range(5000)]}
    assert refusal(wide) is None


def table() -> str:
    lines = ["| keyword | schemas tried | enforced | refused, because |", "|---|---|---|---|"]
    for keyword in dict.fromkeys(case[0] for case in CASES):
        found = [refusal(schema) for name, schema, _, _ in CASES if name == keyword]
        whys = dict.fromkeys(" ".join(why.split()) for why in found if why is not None)
        enforced = sum(why is None for why in found)
        text = "; ".join(why.replace("|", "\\|") for why in whys)
        lines.append(f"| `{keyword}` | {len(found)} | {enforced} | {text} |")
    return "\n".join(lines) + "\n"


def test_the_page_has_the_table():
    text = PAGE.read_text(encoding="utf-8")
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)] == table()


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    start, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    PAGE.write_text(page[:start] + table() + page[end:], encoding="utf-8")
