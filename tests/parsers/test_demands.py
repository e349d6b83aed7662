"""What the grammar demands of calls is what the parser reads: the two agree, for every format."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
from call_writers import WRITERS
from parsed_text import together
from tiny_llama import make_checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "structured"))

from grammar_reader import Reader

from quire.features.structured.check import checked
from quire.frontend.parsers.constrain import (
    answer_or_calls,
    auto_calls,
    calls_of,
    calls_only,
    forced,
)
from quire.frontend.parsers.engine import Parser
from quire.frontend.parsers.formats import ANY_CALLS, TOOLS
from quire.frontend.parsers.reasoning import REASONING
from quire.frontend.parsers.schema import Tools
from quire.frontend.parsers.table import compose
from quire.protocol.constraint import StructuredOutputsParams

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
    format = forced(TOOLS.get(name))
    tag = calls_only(format, GIVEN, parallel)
    checked(StructuredOutputsParams(structural_tag=tag))
    text = written(tag["format"], 3)
    read = together(Parser(compose(format, None), Tools(GIVEN), make_id=str), [text])
    several = parallel and format.wrap is not None and not format.wrap.one
    wanted = [("f", {"count": 3}), ("g.h", {"count": 3}), ("f", {"count": 3})]
    assert read.calls == (wanted if several else wanted[:1])
    assert (read.content, read.reasons) == ("", [])


@pytest.mark.parametrize("name", sorted(set(REASONING) - {"openai_gptoss"}))
@pytest.mark.parametrize("opened", [True, False, None])
def test_thoughts_may_come_before_required_calls(name: str, opened: bool | None) -> None:
    format, reasoning = TOOLS["hermes"], REASONING[name]
    tag = calls_only(format, GIVEN, False, reasoning, opened)
    checked(StructuredOutputsParams(structural_tag=tag))
    text = written(tag["format"], 1)
    read = together(Parser(compose(format, reasoning, opened), Tools(GIVEN)), [text])
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
def test_an_answer_keeps_its_form_after_thoughts(kind: str, name: str) -> None:
    form, answer = FORMS[kind]
    asked = StructuredOutputsParams(**form)
    made = answer_or_calls(asked, REASONING[name], None)
    assert made.structural_tag is not None
    checked(made)
    elements = made.structural_tag["format"]["elements"]  # type: ignore[index]
    text = "".join(written(part, 1) for part in elements[:-1]) + answer
    tools = TOOLS["openai"] if name == "openai_gptoss" else None
    read = together(Parser(compose(tools, REASONING[name])), [text])
    assert (read.reasoning, read.content, read.reasons) == ("hm", answer, [])
    # After thoughts that the prompt has ended there is nothing but the answer.
    ended = answer_or_calls(asked, REASONING[name], False)
    assert (ended == asked) == (name != "openai_gptoss")


RICH = {
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
# Formats that no grammar of ours writes; and those whose calls it cannot see begin in running text.
UNSAID = {"pythonic", "llama4_pythonic", "olmo3", "lfm2", "gemma4", "functiongemma"}
UNSEEN = {"llama3_json", "xlam"}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return Reader(make_checkpoint(tmp_path_factory.mktemp("llama")))


@pytest.mark.parametrize("name", sorted(set(TOOLS) - UNSAID))
def test_what_models_write_is_admitted_if_it_keeps_to_the_schema(name: str, reader: Reader) -> None:
    """The writers know nothing of grammars."""
    format = TOOLS[name]
    assert forced(format, MARKED) is format
    wanted = [("zap", ARGUMENTS), ("g.h", {"text": "t", "count": 3})]
    if format.wrap is not None and format.wrap.one:
        del wanted[1]
    texts = [write(wanted).replace("<|call|>", "") for write in WRITERS[name]]
    only = StructuredOutputsParams(structural_tag=calls_only(format, MARKED, True))
    text = next(text for text in texts if reader.admits(only, text))
    wrongs = [text.replace("3", "x"), text.replace("b c", "B"), text.replace("count", "Count")]
    for wrong in (*wrongs, text.replace("zap", "zip"), text + "."):
        assert not reader.admits(only, wrong), wrong

    thoughts = REASONING["openai_gptoss" if format.whole else "qwen3"]
    tag = auto_calls(format, MARKED, True, "auto", thoughts, None)
    assert (tag is None) == (name in UNSEEN)
    if tag is None:
        return
    before, answer = "<think>hm</think>\n\n", "Yes."
    if format.whole:
        before = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
        answer = "<|channel|>final<|message|>Yes."
    strict = StructuredOutputsParams(structural_tag=tag)
    loose = auto_calls(format, FREE, True, "function", thoughts, None)
    for form in (strict, StructuredOutputsParams(structural_tag=loose)):
        for fine in (before + text, before + answer, answer, text):
            assert reader.admits(form, fine), fine
        assert not reader.admits(form, before + text.replace("zap", "zip"))
        assert not reader.admits(form, text[: len(text) // 2])
    assert not reader.admits(strict, before + text.replace("3", "x"))
    if not format.whole:
        assert reader.admits(strict, f"{before}Ok. {text} Bye.")


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "mistral", "openai", "llama3_json"])
def test_an_answer_of_a_form_may_be_a_call_instead(name: str, reader: Reader) -> None:
    format, thoughts = TOOLS[name], REASONING["openai_gptoss" if name == "openai" else "qwen3"]
    form = answer_or_calls(
        StructuredOutputsParams(json={"type": "integer"}), thoughts, None,
        calls_of(format, MARKED, True, "auto"),
    )  # fmt: skip
    call = ("zap", ARGUMENTS)
    assert any(
        reader.admits(form, write([call]).replace("<|call|>", "")) for write in WRITERS[name]
    )
    assert reader.admits(form, "<|channel|>final<|message|>12" if name == "openai" else "<think>x</think>12")  # fmt: skip
    assert not reader.admits(form, "twelve")


def test_formats_that_cannot_be_said_are_known() -> None:
    assert {name for name, format in TOOLS.items() if forced(format, MARKED) is ANY_CALLS} == UNSAID
    assert forced(None) is ANY_CALLS
    for name in UNSAID:
        assert auto_calls(TOOLS[name], MARKED, True, "auto") is None
        assert calls_of(TOOLS[name], MARKED, True, "auto") == []
