"""The corpus of `format_cases`: whole, character by character, at random, cut short, and with everything around it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from call_writers import TOOLS
from format_cases import CASES, Case
from parsed_text import Read, cuts, parser, together

from quire.frontend.parsers.format_table import (
    CallTemplate,
    ParserState,
    ReasoningFormat,
    ToolFormat,
)
from quire.frontend.parsers.formats import TABLE
from quire.frontend.parsers.model_formats import ModelFormats

ALL = [pytest.param(*key, case, id=f"{'/'.join(key)}: {case.title}") for key, cases in CASES.items() for case in cases]  # fmt: skip


def calls(read: Read) -> tuple[tuple[str, Any], ...]:
    """As in a case: arguments that are cut short are text."""
    found = []
    for name, text in zip(read.names, read.arguments, strict=True):
        try:
            found.append((name, json.loads(text)))
        except ValueError:
            found.append((name, text))
    return tuple(found)


@pytest.mark.parametrize(("tools", "reasoning", "case"), ALL)
def test_a_case(tools: str, reasoning: str, case: Case) -> None:
    rng = random.Random(case.text)
    whole = together(parser(tools, reasoning), [case.text])
    assert (" ".join(whole.content.split()), whole.reasoning, calls(whole)) == (
        " ".join(case.content.split()), case.reasoning, case.calls,
    )  # fmt: skip
    for pieces in (list(case.text), *(cuts(rng, case.text) for _ in range(3))):
        assert together(parser(tools, reasoning), pieces) == whole


@pytest.mark.parametrize(("tools", "reasoning", "case"), ALL)
def test_a_case_split_at_any_character(tools: str, reasoning: str, case: Case) -> None:
    """What a stream has sent by then is the beginning of what the rest of the text makes of it."""
    whole = together(parser(tools, reasoning), [case.text])
    for length in random.Random(case.text).sample(range(len(case.text)), min(12, len(case.text))):
        made = parser(tools, reasoning)
        sent = made.feed(case.text[:length])
        rest = made.feed(case.text[length:])
        rest.add(made.finish())
        sent.add(rest)
        assert (sent.content, sent.reasoning) == (whole.content, whole.reasoning)
        assert [one.arguments for one in sent.calls] == whole.arguments
        short = together(parser(tools, reasoning), [case.text[:length]])
        assert together(parser(tools, reasoning), list(case.text[:length])) == short


def test_a_whole_number_is_written_as_an_integer() -> None:
    text = "<tool_call><function=f><parameter=count>5.0</parameter><parameter=ratio>2.50</parameter></function></tool_call>"
    assert together(parser("qwen3_coder"), [text]).arguments == ['{"count": 5, "ratio": 2.50}']


def test_no_field_of_the_table_is_unknown() -> None:
    """`msgspec.convert` ignores those that a dataclass does not have."""
    known = {kind: set(kind.__dataclass_fields__) for kind in (ToolFormat, ReasoningFormat, ParserState, CallTemplate)}  # fmt: skip
    for entry in TABLE["tools"].values():
        assert set(entry) <= known[ToolFormat] | {"like", "names"}
        assert set(entry.get("call", {})) <= known[CallTemplate]
        for state in entry.get("states", {}).values():
            assert set(state) <= known[ParserState]
    for entry in TABLE["reasoning"].values():
        assert set(entry) <= known[ReasoningFormat] | {"names"}


@pytest.mark.parametrize("name", ["nemotron_v3", "granite_thinking_parser"])
def test_reasoning_is_moved_to_an_answer_that_may_not_be_empty(name: str) -> None:
    """`force_nonempty_content` of Nemotron's template: moved, not repeated, however the text is cut."""
    formats = ModelFormats("qwen3_coder", name, "")
    call = "<tool_call><function=f></function></tool_call>"
    for kwargs in ({"force_nonempty_content": True}, {"enable_thinking": False}):
        made = formats.output_format(TOOLS, reasoning_open=True, template_kwargs=kwargs)
        assert made is not None
        for text, reasoning, content, count in (
            ("<think>hm</think>", "", "hm", 0),
            ("<think>hm", "", "hm", 0),
            ("hm", "", "hm", 0),
            ("<think>hm</think>Yes.", "hm", "Yes.", 0),
            ("hm</think>\n\n", "hm", "", 0),
            (f"<think>hm\n</think>{call}", "hm", "", 1),
            (f"hm{call}", "hm", "", 1),
        ):
            for pieces in ([text], list(text)):
                read = together(made.parser(), pieces)
                found = (read.reasoning, read.content.strip(), len(read.calls))
                assert found == (reasoning, content, count), text
    made = formats.output_format(TOOLS, template_kwargs={})
    assert made is not None
    read = together(made.parser(), ["<think>hm</think>"])
    assert (read.reasoning, read.content) == ("hm", "")


@pytest.mark.parametrize("name", ["ling3", "plamo3"])
def test_markers_are_text_if_thinking_is_off(name: str) -> None:
    formats = ModelFormats("none", name, "")
    text = (
        f"{formats.reasoning.starts[0]}hm{formats.reasoning.ends[0]}Yes."
        if formats.reasoning
        else ""
    )
    for on, wanted in ((True, ("hm", "Yes.")), (False, ("", text))):
        made = formats.output_format([], template_kwargs={"enable_thinking": on})
        parser = made.parser() if made is not None else None
        read = together(parser, list(text)) if parser is not None else Read(content=text)
        assert (read.reasoning, read.content) == wanted
