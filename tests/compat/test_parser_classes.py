"""vLLM's classes of parsers: built-in formats by name, and a program's own classes."""

from __future__ import annotations

import json

import pytest

from quire.compat.vllm_chat import get_tokenizer
from quire.frontend.parsers.parser_classes import (
    ReasoningParser,
    ReasoningParserManager,
    ToolParser,
    ToolParserManager,
)

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": [1, "a"]}}\n</tool_call>'
REASONED = "<think>\nhm\n</think>\n\nYes."


@pytest.fixture
def unregistered(monkeypatch):
    for manager in (ToolParserManager, ReasoningParserManager):
        monkeypatch.setattr(manager, "own", {})
        monkeypatch.setattr(manager, "lazy", {})


def streamed(parse, text: str) -> list:
    """The deltas of a text that comes in pieces of 3 characters."""
    deltas, before = [], ""
    for at in range(0, len(text), 3):
        piece = text[at : at + 3]
        deltas.append(parse(before, before + piece, piece, [], [], []))
        before += piece
    return [delta for delta in deltas if delta is not None]


def test_a_built_in_tool_parser():
    made = ToolParserManager.get_tool_parser("hermes")(get_tokenizer("quire-tiny"))
    found = made.extract_tool_calls(f"Let me see. {CALL}", None)
    assert found.tools_called
    assert found.content == "Let me see."
    (call,) = found.tool_calls
    assert (call.type, call.function.name) == ("function", "f")
    assert json.loads(call.function.arguments) == {"x": [1, "a"]}
    assert not made.extract_tool_calls("No call.", None).tools_called
    deltas = streamed(lambda *six: made.extract_tool_calls_streaming(*six, None), f"So. {CALL}")
    assert "".join(delta.content or "" for delta in deltas) == "So."
    calls = [call for delta in deltas for call in delta.tool_calls]
    assert [call.function.name for call in calls if call.id] == ["f"]
    arguments = "".join(call.function.arguments or "" for call in calls)
    assert arguments == call_arguments(found)


def call_arguments(found) -> str:
    return found.tool_calls[0].function.arguments


def test_a_built_in_reasoning_parser():
    tokenizer = get_tokenizer("quire-tiny")
    made = ReasoningParserManager.get_reasoning_parser("qwen3")(tokenizer)
    assert made.extract_reasoning(REASONED, None) == ("hm", "Yes.")
    assert made.is_reasoning_end(tokenizer.encode(REASONED))
    assert not made.is_reasoning_end(tokenizer.encode(REASONED + "<think>"))
    deltas = streamed(made.extract_reasoning_streaming, REASONED)
    assert "".join(delta.reasoning or "" for delta in deltas) == "hm"
    assert "".join(delta.content or "" for delta in deltas) == "Yes."


@pytest.mark.usefixtures("unregistered")
def test_a_programs_own_classes():
    @ToolParserManager.register_module("mine")
    class Mine(ToolParser):
        def extract_tool_calls(self, model_output, request):
            return "mine"

    @ReasoningParserManager.register_module(["one", "two"])
    class Own(ReasoningParser):
        pass

    assert ToolParserManager.get_tool_parser("mine") is Mine
    assert ReasoningParserManager.get_reasoning_parser("two") is Own
    assert "mine" in ToolParserManager.list_registered()
    assert "mine" not in ReasoningParserManager.list_registered()
    with pytest.raises(KeyError, match="registered already"):
        ToolParserManager.register_module("hermes", force=False, module=Mine)
    with pytest.raises(TypeError, match="ToolParser"):
        ToolParserManager.register_module("other", module=Own)
    with pytest.raises(KeyError, match="'nonsense' is no parser"):
        ToolParserManager.get_tool_parser("nonsense")
    ToolParserManager.register_lazy_module("late", __name__, "Late")
    assert ToolParserManager.get_tool_parser("late") is Late


class Late(ToolParser):
    pass
