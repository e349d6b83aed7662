"""Tool calls and thoughts over HTTP: the shapes of answers and streams, histories, and refusals."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from call_writers import TOOLS

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from asgi import ask, frames
from scripted import ScriptedEngine

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
FORMATS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
CALL = '<tool_call>\n{"name": "f", "arguments": {"count": 1}}\n</tool_call>'
TWO = f"<think>\nhm\n</think>\n\nOk.\n{CALL}\n{CALL.replace('1', '2')}"


def chat(text: str, pieces: int = 1, config: dict[str, Any] | None = None, **body: Any) -> Any:
    """An answer's one choice; of a stream its deltas put together, with all that came as "chunks"."""
    size = max(1, -(-len(text) // pieces))
    engine = ScriptedEngine(*(text[at : at + size] for at in range(0, len(text), size)))
    found = ask(engine, "POST", CHAT, {**HI, **body}, **{**FORMATS, **(config or {})})
    assert found.status_code == 200, found.text
    if not body.get("stream"):
        (choice,) = found.json()["choices"]
        return {**choice, "usage": found.json()["usage"]}
    return together(frames(found.text))


def together(events: list[Any]) -> dict[str, Any]:
    """As the openai package puts a stream together."""
    assert events.pop() == "[DONE]"
    message: dict[str, Any] = {"content": None, "reasoning": None}
    calls: dict[int, dict[str, Any]] = {}
    made: dict[str, Any] = {"message": message, "chunks": []}
    for event in events:
        if "usage" in event:
            made["usage"] = event["usage"]
        for choice in event["choices"]:
            delta = choice["delta"]
            made["chunks"].append(delta)
            for key in ("content", "reasoning", "reasoning_content"):
                if delta.get(key):
                    message[key] = (message.get(key) or "") + delta[key]
            for call in delta.get("tool_calls", []):
                if call["index"] not in calls:
                    assert set(call) == {"index", "id", "type", "function"}
                    index = call.pop("index")
                    assert index == len(calls)
                    calls[index] = call
                else:
                    assert set(call) == {"index", "function"}
                    assert set(call["function"]) == {"arguments"}
                    function = calls[call["index"]]["function"]
                    function["arguments"] += call["function"]["arguments"]
            if choice["finish_reason"] is not None:
                assert "finish_reason" not in made
                made["finish_reason"] = choice["finish_reason"]
    if calls:
        message["tool_calls"] = list(calls.values())
    return made


def named(message: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def test_a_message_with_everything():
    choice = chat(TWO, tools=TOOLS)
    message = choice["message"]
    assert (message["reasoning"], message["content"]) == ("hm", "Ok.")
    assert named(message) == [("f", {"count": 1}), ("f", {"count": 2})]
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(len(one) == len("chatcmpl-tool-") + 32 for one in ids)
    assert {call["type"] for call in message["tool_calls"]} == {"function"}
    assert choice["finish_reason"] == "tool_calls"
    # In the scripted engine each character is a token.
    count = len("<think>\nhm\n</think>")
    assert choice["usage"]["completion_tokens_details"] == {"reasoning_tokens": count}


@pytest.mark.parametrize("pieces", [1, 2, 7, 40, 1000])
def test_a_stream_equals_the_whole_answer(pieces: int):
    whole = chat(TWO, tools=TOOLS)["message"]
    made = chat(TWO, pieces, tools=TOOLS, stream=True, stream_options={"include_usage": True})
    message = made["message"]
    assert (message["reasoning"], message["content"]) == (whole["reasoning"], whole["content"])
    assert named(message) == named(whole)
    assert made["finish_reason"] == "tool_calls"
    count = len("<think>\nhm\n</think>")
    assert made["usage"]["completion_tokens_details"] == {"reasoning_tokens": count}
    assert made["chunks"][0] == {"role": "assistant", "content": ""}
    kinds = [next(iter(delta)) for delta in made["chunks"][1:] if delta]
    assert kinds == sorted(kinds, key=["reasoning", "content", "tool_calls"].index)


def test_streams_parse_the_same_for_any_chunking():
    rng = random.Random(3)
    for _ in range(20):
        text = TWO[: rng.randrange(len(TWO))] + rng.choice(["", "}", "x", TWO])
        whole = chat(text, tools=TOOLS)
        made = chat(text, rng.randrange(1, 60), tools=TOOLS, stream=True)
        assert (made["message"]["content"] or "") == (whole["message"]["content"] or "")
        assert made["message"]["reasoning"] == whole["message"]["reasoning"]
        ours, theirs = ([c["function"] for c in m["message"].get("tool_calls", [])] for m in (made, whole))  # fmt: skip
        assert ours == theirs
        assert made["finish_reason"] == whole["finish_reason"]


def test_reasoning_is_parsed_without_tools():
    choice = chat("<think>hm</think>Yes.")
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("hm", "Yes.")
    assert choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]
    both = chat("<think>hm</think>Yes.", config={"enable_reasoning_content": True})["message"]
    assert both["reasoning"] == both["reasoning_content"] == "hm"
    made = chat("<think>hm</think>Yes.", 5, {"enable_reasoning_content": True}, stream=True)
    assert made["message"]["reasoning_content"] == "hm"
    assert chat("<think>hm")["message"]["content"] is None
    off = chat("<think>hm</think>Yes.", config={"reasoning_parser": "none"})
    assert off["message"]["content"] == "<think>hm</think>Yes."
    assert "completion_tokens_details" not in off["usage"]


def test_reasoning_is_optional():
    text = "<think>hm</think>Yes."
    for stream in (False, True):
        told = chat(text, 30, include_reasoning=False, stream=stream, logprobs=True, return_token_ids=True)  # fmt: skip
        assert told["message"]["reasoning"] is None
        assert told["message"]["content"] == "Yes."
    whole = chat(text, include_reasoning=False, logprobs=True, return_token_ids=True)
    assert "".join(map(chr, whole["token_ids"])) == "Yes."
    assert [one["token"] for one in whole["logprobs"]["content"]] == list("Yes.")
    assert whole["usage"]["completion_tokens_details"] == {
        "reasoning_tokens": len("<think>hm</think>")
    }


def test_effort_reaches_the_template():
    asked: list[Any] = []

    class Engine(ScriptedEngine):
        def render(self, messages: Any, options: Any) -> str:
            asked.append(options.template_kwargs)
            return "x"

    for effort, thinks in (("none", False), ("low", True)):
        ask(Engine("a"), "POST", CHAT, {**HI, "reasoning_effort": effort}, **FORMATS)
        assert asked[-1]["enable_thinking"] is thinks
        assert asked[-1]["reasoning_effort"] == effort


def test_the_prompt_decides_whether_reasoning_has_begun():
    class Engine(ScriptedEngine):
        def render(self, messages: Any, options: Any) -> str:
            return "a:<think>\n" + ("\n</think>\n" if not options.template_kwargs else "")

    found = ask(Engine("hm</think>Yes."), "POST", CHAT, {**HI, "reasoning_effort": "low"}, **FORMATS)  # fmt: skip
    assert found.json()["choices"][0]["message"]["reasoning"] == "hm"
    found = ask(Engine("Yes."), "POST", CHAT, HI, **FORMATS)
    assert found.json()["choices"][0]["message"]["content"] == "Yes."


def test_tool_choice_none_parses_no_call():
    for body in ({"tools": TOOLS, "tool_choice": "none"}, {}):
        choice = chat(CALL, **body)
        assert choice["message"]["content"] == CALL
        assert choice["finish_reason"] == "stop"


def test_one_call_at_a_time():
    for stream in (False, True):
        choice = chat(TWO, 9, tools=TOOLS, parallel_tool_calls=False, stream=stream)
        assert named(choice["message"]) == [("f", {"count": 1})]


def test_a_malformed_call_is_content():
    text = '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>'
    for stream in (False, True):
        choice = chat(text, 9, tools=TOOLS, stream=stream)
        assert choice["message"]["content"] == text
        assert choice["finish_reason"] == "stop"


def demand(**body: Any) -> Any:
    engine = ScriptedEngine(CALL)
    found = ask(engine, "POST", CHAT, {**HI, "tools": TOOLS, **body}, **FORMATS)
    assert found.status_code == 200, found.text
    return found.json()["choices"][0], engine.asked[0].params


def test_calls_that_must_come_are_constrained():
    choice, params = demand(tool_choice="required")
    assert choice["finish_reason"] == "tool_calls"
    form = params.structured_outputs.structural_tag["format"]
    (calls,) = (part for part in form["elements"] if part["type"] == "tags_with_separator")
    assert [tag["begin"].split('"')[3] for tag in calls["tags"]] == ["get_weather", "f", "ns.read-file"]  # fmt: skip
    assert not calls["stop_after_first"]
    _, params = demand(tool_choice="required", parallel_tool_calls=False)
    assert params.structured_outputs.structural_tag["format"]["elements"][-1]["stop_after_first"]
    choice, params = demand(tool_choice={"type": "function", "function": {"name": "f"}})
    assert choice["finish_reason"] == "stop"  # as OpenAI has it for a named tool
    assert named(choice["message"]) == [("f", {"count": 1})]
    (tag,) = params.structured_outputs.structural_tag["format"]["elements"][-1]["tags"]
    assert tag["content"]["json_schema"] == TOOLS[1]["function"]["parameters"]
    strict = [{"type": "function", "function": {**TOOLS[1]["function"], "strict": True}}]
    _, params = demand(tools=strict)
    assert params.structured_outputs.structural_tag["format"]["elements"][-1]["type"] == "triggered_tags"  # fmt: skip


def test_the_server_may_be_stricter_than_the_tools():
    def tags(level: str, **body: Any) -> list[Any]:
        engine = ScriptedEngine(CALL)
        config = {**FORMATS, "tool_strict_level": level}
        assert (
            ask(engine, "POST", CHAT, {**HI, **(body or {"tools": TOOLS})}, **config).status_code
            == 200
        )
        form = engine.asked[0].params.structured_outputs
        return [] if form is None else form.structural_tag["format"]["elements"][-1]["tags"]

    assert tags("strict") == []
    schemas = [tool["function"]["parameters"] for tool in TOOLS]  # type: ignore[index]
    assert [tag["content"]["json_schema"] for tag in tags("parameter")] == schemas
    for level in ("auto", "function"):
        assert [tag["content"]["json_schema"] for tag in tags(level)] == [{"type": "object"}] * 3
    strict = [{"type": "function", "function": {**TOOLS[1]["function"], "strict": True}}]
    for level in ("auto", "strict"):
        assert [tag["content"]["json_schema"] for tag in tags(level, tools=strict)] == [schemas[1]]
    assert tags("function", tools=TOOLS, tool_choice="none") == tags("parameter", n=1) == []


def test_tools_and_a_form_for_the_answer():
    _, params = demand(response_format={"type": "json_object"})
    answer, calls = params.structured_outputs.structural_tag["format"]["elements"][-1]["elements"]
    assert answer == {"type": "json_schema", "json_schema": {"type": "object"}}
    assert [tag["type"] for tag in calls["tags"]] == ["tag"] * 3


def test_required_tools_work_without_a_known_format():
    engine = ScriptedEngine('[{"name": "f", "parameters": {"count": 1}}]')
    body = {**HI, "tools": TOOLS, "tool_choice": "required"}
    (choice,) = ask(engine, "POST", CHAT, body).json()["choices"]
    assert named(choice["message"]) == [("f", {"count": 1})]
    found = ask(engine, "POST", CHAT, {**HI, "tools": TOOLS})
    assert found.status_code == 400
    assert "--tool-call-parser NAME" in found.json()["error"]["message"]
    assert found.json()["error"]["param"] == "tools"


def test_histories_reach_the_template_with_arguments_as_objects():
    seen: list[Any] = []

    class Engine(ScriptedEngine):
        def render(self, messages: Any, options: Any) -> str:
            seen.append((messages, options.tools))
            return "x"

    first = chat(CALL, tools=TOOLS)["message"]
    history = [*HI["messages"], first, {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "3"}]  # fmt: skip
    body = {"messages": history, "tools": TOOLS}
    assert ask(Engine("Three."), "POST", CHAT, body, **FORMATS).status_code == 200
    messages, tools = seen[-1]
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"count": 1}
    assert messages[2] == history[2]
    assert tools == TOOLS
    assert isinstance(history[1]["tool_calls"][0]["function"]["arguments"], str)


F = {"type": "function", "function": {"name": "f"}}
REFUSED = [
    ({"tools": []}, "tools", "empty"),
    ({"tools": [{"type": "web_search"}]}, "tools", "web_search"),
    ({"tools": [{"type": "function"}]}, "tools", "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "name"),
    ({"tools": [F, F]}, "tools", "two tools"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]},
        "tools",
        "schema",
    ),
    ({"tools": [F], "tool_choice": "always"}, "tool_choice", "must be"),
    (
        {"tools": [F], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        "the tools are f",
    ),
    (
        {"tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        "`tools` is missing",
    ),
    (
        {"tools": [F], "tool_choice": "required", "response_format": {"type": "json_object"}},
        "response_format",
        "one constraint",
    ),
]


@pytest.mark.parametrize(("body", "field", "says"), REFUSED, ids=range(len(REFUSED)))
def test_refusals_name_the_field(body: dict[str, Any], field: str, says: str):
    found = ask(ScriptedEngine("x"), "POST", CHAT, {**HI, **body}, **FORMATS)
    error = found.json()["error"]
    assert (found.status_code, error["param"]) == (400, field)
    assert says in error["message"]


@pytest.mark.parametrize(
    "calls", ["x", [3], [{"function": {}}], [{"function": {"name": "f", "arguments": "{"}}],
              [{"function": {"name": "f", "arguments": "[1]"}}]]
)  # fmt: skip
def test_calls_of_a_history_must_have_their_shape(calls: Any):
    messages = [*HI["messages"], {"role": "assistant", "tool_calls": calls}]
    found = ask(ScriptedEngine("x"), "POST", CHAT, {"messages": messages}, **FORMATS)
    assert found.status_code == 400
    assert "messages[1].tool_calls" in found.json()["error"]["message"]
