"""The corpus of `format_cases`: whole, character by character, at random, cut short, and with everything around it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
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


def test_an_answer_is_not_empty_if_the_request_says_so() -> None:
    """`force_nonempty_content` of Nemotron's template."""
    formats = ModelFormats("none", "nemotron_v3", "")
    for kwargs, content in (({}, ""), ({"force_nonempty_content": True}, "hm"), ({"enable_thinking": False}, "hm")):  # fmt: skip
        made = formats.output_format([], template_kwargs=kwargs)
        assert made is not None
        assert together(made.parser(), ["<think>", "hm"]).content == content
        assert together(made.parser(), ["<think>hm</think>", "Yes."]).content == "Yes."
