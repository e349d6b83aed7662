"""What the grammar demands of calls is what the parser reads: the two agree, for every format."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from asymptotic import seconds
from call_writers import THOUGHTS, WRITERS, calls
from call_writers import TOOLS as WRITTEN
from parsed_text import together
from tiny_llama import make_checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "structured"))

from grammar_reader import Reader

from quire.features.structured.validate import check_constraint
from quire.frontend.parsers.format_table import compose
from quire.frontend.parsers.formats import ANY_CALLS, REASONING, TOOLS
from quire.frontend.parsers.literal_constraints import arguments
from quire.frontend.parsers.stream_parser import StreamParser
from quire.frontend.parsers.tool_constraints import (
    answer_or_calls,
    auto_calls,
    call_parts,
    calls_only,
    forced_format,
)
from quire.frontend.parsers.tool_schemas import ToolSchemas
from quire.protocol.structured_outputs import StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
GIVEN = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g.h")
]


def written(form: dict[str, Any], count: int) -> str:
    """One text that a format allows, with `count` calls where there may be several."""
    match form["type"]:
        case "const_string":
            return str(form["value"])
        case "sequence":
            return "".join(written(part, count) for part in form["elements"])
        case "optional":
            return written(form["content"], count)
        case "any_text":
            return "hm"
        case "regex":
            return "3"
        case "json_schema":
            return "3" if form["json_schema"].get("type") == "integer" else '{"count": 3}'
        case "tag":
            return form["begin"] + written(form["content"], count) + form["end"]
        case "tags_with_separator":
            wanted = 1 if form["stop_after_first"] else count
            tags = itertools.islice(itertools.cycle(form["tags"]), wanted)
            return str(form["separator"]).join(written(tag, count) for tag in tags)
    raise AssertionError(form)


@pytest.mark.parametrize("name", [*TOOLS, ""])
@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_are_read_back(name: str, parallel: bool) -> None:
    format = forced_format(TOOLS.get(name))
    tag = calls_only(format, GIVEN, parallel)
    check_constraint(StructuredOutputsParams(structural_tag=tag))
    text = written(tag["format"], 3)
    read = together(StreamParser(compose(format, None), ToolSchemas(GIVEN), make_id=str), [text])
    several = parallel and format.call is not None and not format.call.single
    wanted = [("f", {"count": 3}), ("g.h", {"count": 3}), ("f", {"count": 3})]
    assert read.calls == (wanted if several else wanted[:1])
    assert (read.content, read.reasons) == ("", [])


@pytest.mark.parametrize(
    "name", sorted(set(REASONING) - {"openai_gptoss", "inkling", "minimax_m2_append_think"})
)
@pytest.mark.parametrize("opened", [True, False, None])
def test_thoughts_may_come_before_required_calls(name: str, opened: bool | None) -> None:
    format, reasoning = TOOLS["hermes"], REASONING[name]
    tag = calls_only(format, GIVEN, False, reasoning, opened)
    check_constraint(StructuredOutputsParams(structural_tag=tag))
    text = written(tag["format"], 1)
    read = together(StreamParser(compose(format, reasoning, opened), ToolSchemas(GIVEN)), [text])
    assert read.calls == [("f", {"count": 3})]
    assert read.reasoning == ("" if opened is False else "hm")
    assert read.content == ""


FORMS = {
    "json": ({"json": SCHEMA}, '{"count": 3}'),
    "json text": ({"json": '{"type": "integer"}'}, "3"),
    "json_object": ({"json_object": True}, "{}"),
    "regex": ({"regex": "[ab]+"}, "ab"),
    "choice": ({"choice": ["<b>", 'a"']}, "<b>"),
    "grammar": ({"grammar": 'root ::= "a" | "b"'}, "a"),
    "structural_tag": (
        {"structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}},
        "x",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1", "openai_gptoss", "gemma4"])
def test_a_response_format_applies_after_reasoning(kind: str, name: str) -> None:
    form, answer = FORMS[kind]
    asked = StructuredOutputsParams(**form)
    made = answer_or_calls(asked, REASONING[name], None)
    assert made.structural_tag is not None
    check_constraint(made)
    elements = made.structural_tag["format"]["elements"]  # type: ignore[index]
    text = "".join(written(part, 1) for part in elements[:-1]) + answer
    tools = TOOLS["openai"] if name == "openai_gptoss" else None
    read = together(StreamParser(compose(tools, REASONING[name])), [text])
    assert (read.reasoning, read.content, read.reasons) == ("hm", answer, [])
    # Without reasoning, the parser finds the answer however the prompt has ended.
    for opened in (None, True, False):
        short = answer_or_calls(asked, REASONING[name], opened, reasons=False)
        text = answer
        if short.structural_tag is not asked.structural_tag:
            check_constraint(short)
            before = short.structural_tag["format"]["elements"][:-1]  # type: ignore[index]
            text = "".join(written(part, 1) for part in before) + answer
        read = together(StreamParser(compose(tools, REASONING[name], opened)), [text])
        assert (read.reasoning, read.content, read.reasons) == ("", answer, [])
    # After thoughts that the prompt has ended there is nothing but the answer.
    ended = answer_or_calls(asked, REASONING[name], False)
    assert (ended == asked) == (name != "openai_gptoss")


TOOL_SCHEMA: Any = WRITTEN[0]["function"]["parameters"]  # type: ignore[index]
RICH: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"}, "kind": {"enum": ["a", "b c"]}, "count": {"type": "integer"},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/word"}},
    },
    "required": ["text", "count"],
    "$defs": {"word": {"type": "string"}},
}  # fmt: skip
MARKED = [
    {"type": "function", "function": {"name": name, "parameters": RICH, "strict": True}}
    for name in ("zap", "g.h")
]
FREE = [{"type": "function", "function": {"name": "zap", "parameters": RICH}}, {"function": {"name": "g.h"}}]  # fmt: skip
ARGUMENTS = {"text": "it's <b>\nso", "kind": "b c", "count": 3, "tags": ["x"]}
# The same without a reference: Python's and Gemma's ways to write values know none.
WORDS = {
    **RICH,
    "properties": {**RICH["properties"], "tags": {"type": "array", "items": {"type": "string"}}},
}  # type: ignore[dict-item]
del WORDS["$defs"]
PLAIN = [{"type": "function", "function": {**t["function"], "parameters": WORDS}} for t in MARKED]  # type: ignore[dict-item]
# Formats in which the grammar cannot see where calls begin in running text.
UNSEEN = {"llama3_json", "xlam", "pythonic"}
GEMMA = {"gemma4", "functiongemma"}
DIALECTS = {
    name for name, format in TOOLS.items() if format.call is not None and format.call.dialect
}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return Reader(make_checkpoint(tmp_path_factory.mktemp("llama")))


@pytest.mark.parametrize("name", sorted(set(TOOLS) - {"minimax_m3"}))  # no grammar has it
def test_typical_model_output_is_admitted_if_it_matches_the_schema(
    name: str, reader: Reader
) -> None:
    """The writers know nothing of grammars."""
    format, tools = TOOLS[name], PLAIN if name in DIALECTS else MARKED
    assert forced_format(format, tools) is format
    wanted = [("zap", ARGUMENTS), ("g.h", {"text": "t", "count": 3})]
    if format.call is not None and format.call.single:
        del wanted[1]
    texts = [write(wanted).replace("<|call|>", "") for write in WRITERS[name]]
    only = StructuredOutputsParams(structural_tag=calls_only(format, tools, True))
    text = next(text for text in texts if reader.admits(only, text))
    wrongs = [text.replace("3", "x"), text.replace("b c", "B"), text.replace("count", "Count")]
    for wrong in (*wrongs, text.replace("zap", "zip"), text + "."):
        assert not reader.admits(only, wrong), wrong

    own = "openai_gptoss" if name == "openai" else name
    thoughts = REASONING[own if format.splits_reasoning else "qwen3"]
    tag = auto_calls(format, tools, True, "auto", thoughts, None)
    assert (tag is None) == (name in UNSEEN)
    if tag is None:
        return
    before, answer = "<think>hm</think>\n\n", "Yes."
    if format.splits_reasoning:
        before = "hm".join(THOUGHTS[own])
        answer = thoughts.answer_marker + "Yes."
    strict = StructuredOutputsParams(structural_tag=tag)
    loose = auto_calls(format, FREE, True, "function", thoughts, None)
    assert (loose is None) == (name in GEMMA)
    free = strict if loose is None else StructuredOutputsParams(structural_tag=loose)
    for form in (strict, free):
        for fine in (before + text, before + answer, answer, text):
            assert reader.admits(form, fine), fine
        assert not reader.admits(form, before + text.replace("zap", "zip"))
        assert not reader.admits(form, text[: len(text) // 2])
    assert not reader.admits(strict, before + text.replace("3", "x"))
    if not format.splits_reasoning:
        assert reader.admits(strict, f"{before}Ok. {text} Bye.")


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "mistral", "openai", "llama3_json"])
def test_an_answer_of_a_form_may_be_a_call_instead(name: str, reader: Reader) -> None:
    own = {"openai": "openai_gptoss", "inkling": "inkling"}
    format, thoughts = TOOLS[name], REASONING[own.get(name, "qwen3")]
    form = answer_or_calls(
        StructuredOutputsParams(json={"type": "integer"}), thoughts, None,
        call_parts(format, MARKED, True, "auto"),
    )  # fmt: skip
    call = ("zap", ARGUMENTS)
    assert any(
        reader.admits(form, write([call]).replace("<|call|>", "")) for write in WRITERS[name]
    )
    assert reader.admits(form, "<|channel|>final<|message|>12" if name == "openai" else "<think>x</think>12")  # fmt: skip
    assert not reader.admits(form, "twelve")


def test_an_inexpressible_schema_is_written_as_a_list() -> None:
    odd = {"type": "object", "properties": {"text": {"type": "string", "pattern": "^a"}}}
    strange = [{"type": "function", "function": {"name": "zap", "parameters": odd, "strict": True}}]
    for name, format in TOOLS.items():
        template = format.call
        listed = template is None or bool(template.dialect or template.parameter)
        assert (forced_format(format, strange) is ANY_CALLS) == listed, name
        assert (call_parts(format, strange, True, "auto") == []) == listed
        assert (auto_calls(format, strange, True, "auto") is None) == (listed or name in UNSEEN)
    assert all(forced_format(TOOLS[name], MARKED) is ANY_CALLS for name in DIALECTS)
    assert forced_format(None) is ANY_CALLS


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", sorted(DIALECTS - GEMMA))
def test_python_literals_of_models_are_admitted(name: str, reader: Reader) -> None:
    rng, order = random.Random(name), list(TOOL_SCHEMA["properties"])
    form = StructuredOutputsParams(structural_tag=calls_only(TOOLS[name], WRITTEN, True))
    for _ in range(20):
        wanted = [(n, dict(sorted(a.items(), key=lambda one: order.index(one[0])))) for n, a in calls(rng)]  # fmt: skip
        texts = [write(wanted) for write in WRITERS[name]]
        assert any(reader.admits(form, text) for text in texts), texts


def nested(depth: int, width: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        inner = {"type": "object", "properties": {f"p{at}": inner for at in range(width)}}
    return inner


@pytest.mark.parametrize("name", ["lfm2", "qwen3_coder", "gemma4"])
def test_schemas_that_would_grow_without_end_are_written_as_a_list(name: str) -> None:
    def tools(schema: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]  # fmt: skip

    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(300):
        deep = {"anyOf": [deep]}
    shared = {
        "type": "object", "$defs": nested(5, 9),
        "properties": {f"p{at}": {"$ref": "#/$defs/properties"} for at in range(400)},
    }  # fmt: skip
    assert forced_format(TOOLS[name], tools(nested(2, 2))) is TOOLS[name]
    wide = nested(1, 30_000)

    def ask() -> None:
        for schema in (nested(4, 7), wide, shared, {"type": "object", "properties": {"a": deep}}):
            fits = name == "qwen3_coder" and schema not in (
                shared,
                wide,
            )  # as JSON, between its marks
            assert (forced_format(TOOLS[name], tools(schema)) is ANY_CALLS) != fits
            assert (call_parts(TOOLS[name], tools(schema), True, "auto") == []) != fits

    assert (
        seconds(ask) < 20
    )  # of a tenth; what refers to all of ``shared`` is 24 million properties long


def test_schema_parts_that_python_syntax_expresses() -> None:
    def said(**schema: Any) -> bool:
        return arguments("python", {"properties": {"a": schema}}) is not None

    fine: list[dict[str, Any]] = [
        {"type": "integer", "title": "A", "default": 3}, {"enum": ["x", 1, None, True]}, {"const": "x"},
        {"type": ["string", "null"]}, {"anyOf": [{"type": "number"}, {"type": "array"}]}, {"type": "object"},
        {"type": "array", "items": {"type": "object", "properties": {"b": {"type": "boolean"}}}},
    ]  # fmt: skip
    assert [said(**one) for one in fine] == [True] * len(fine)
    odd: list[dict[str, Any]] = [
        {"type": "integer", "minimum": 1}, {"type": "string", "format": "date"}, {"$ref": "#/a"}, {}, {"type": "thing"},
        {"enum": []}, {"enum": [[1]]}, {"type": "array", "items": {"$ref": "#"}}, {"anyOf": []}, {"type": "array", "minItems": 1},
        {"type": "object", "properties": {"b c": {"type": "null"}}},
    ]  # fmt: skip
    assert [said(**one) for one in odd] == [False] * len(odd)
    assert arguments("python", {}) == arguments("python", {"type": "object"}) != []
    assert arguments("gemma", {}) is None


KEYS = ("type", "properties", "required", "enum", "const", "items", "anyOf", "oneOf", "$ref", "$defs", "p0", "title")  # fmt: skip


def junk(rng: random.Random, depth: int = 0) -> Any:
    match rng.randrange(8 if depth < 4 else 5):
        case 0:
            return rng.choice(["object", "string", "array", "number", "x", "#/$defs/a", ""])
        case 1:
            return rng.choice([None, True, 0, 1.5])
        case 2:
            return rng.choice([["string"], ["p0"], [], {}, [[]], [{}]])
        case 3 | 4:
            return {
                "type": rng.choice(["string", "integer", "array", "object", ["string", "null"]])
            }
        case 5:
            return [junk(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {rng.choice(KEYS): junk(rng, depth + 1) for _ in range(rng.randrange(5))}


def test_no_schema_raises_an_unexpected_exception() -> None:
    rng = random.Random(7)
    for _ in range(2500):
        schema = {"type": "object", "properties": {"p0": junk(rng), "p1": junk(rng)}, "required": ["p0"]}  # fmt: skip
        schema[rng.choice(KEYS)] = junk(rng)
        tools = [{"function": {"name": "f", "parameters": schema, "strict": rng.random() < 0.8}}]
        format = TOOLS[rng.choice(list(TOOLS))]
        assert calls_only(forced_format(format, tools), tools, True)
        call_parts(format, tools, True, "auto")
        auto_calls(format, tools, True, "auto", REASONING["qwen3"], None)
        given = ToolSchemas(tools)
        assert given.is_text("f", "p0") in (True, False)
        assert given.value("f", "p0", "x") == '"x"'
