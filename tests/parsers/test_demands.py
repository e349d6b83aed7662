"""What the grammar demands of calls is what the parser reads: the two agree, for every format."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from parsed_text import together

from quire.features.structured.check import checked
from quire.frontend.parsers.constrain import after_thoughts, calls_only, forced, strict_calls
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
STRICT = [{"type": "function", "function": {**GIVEN[0]["function"], "strict": True}}, GIVEN[1]]  # type: ignore[dict-item]


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
            return '{"count": 3}'
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
    made = after_thoughts(asked, REASONING[name], None)
    assert made.structural_tag is not None
    checked(made)
    elements = made.structural_tag["format"]["elements"]  # type: ignore[index]
    text = "".join(written(part, 1) for part in elements[:-1]) + answer
    tools = TOOLS["openai"] if name == "openai_gptoss" else None
    read = together(Parser(compose(tools, REASONING[name])), [text])
    assert (read.reasoning, read.content, read.reasons) == ("hm", answer, [])
    # After thoughts that the prompt has ended there is nothing but the answer.
    ended = after_thoughts(asked, REASONING[name], False)
    assert (ended == asked) == (name != "openai_gptoss")


def test_strict_tools_constrain_calls_and_nothing_else() -> None:
    constrained = set()
    for name, format in TOOLS.items():
        assert strict_calls(format, GIVEN) is None
        if (tag := strict_calls(format, STRICT)) is None:
            continue
        constrained.add(name)
        checked(StructuredOutputsParams(structural_tag=tag))
        (trigger,) = tag["format"]["triggers"]
        first, second = tag["format"]["tags"]
        assert first["begin"].startswith(trigger)
        assert first["content"]["json_schema"] == SCHEMA
        assert second["content"]["json_schema"] == {"type": "object"}
    assert {"hermes", "mistral", "openai"} <= constrained


def test_without_a_format_of_its_own_any_model_can_be_made_to_call() -> None:
    for name in ("pythonic", "glm45", "qwen3_coder", "gemma4"):
        assert forced(TOOLS[name]) is ANY_CALLS
    assert forced(None) is ANY_CALLS
