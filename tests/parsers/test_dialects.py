"""Tool calls and reasoning in the Messages and Responses protocols, as the protocols' own clients read them."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from call_writers import TOOLS

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from asgi import ask
from scripted import ScriptedEngine, make_state

from quire.server.app import build_app

FORMATS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
CALL = '<tool_call>\n{"name": "f", "arguments": {"count": 1}}\n</tool_call>'
EVERYTHING = f"<think>\nhm\n</think>\n\nOk.\n{CALL}\n{CALL.replace('1', '2')}"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
BLOCKS = [
    {"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in TOOLS
]
FLAT = [{"type": "function", **t["function"]} for t in TOOLS]


def scripted(text: str, pieces: int) -> ScriptedEngine:
    size = max(1, -(-len(text) // pieces))
    return ScriptedEngine(*(text[at : at + size] for at in range(0, len(text), size)))


def client_of(engine: ScriptedEngine, library: Any = httpx) -> Any:
    app = build_app(make_state(engine, **FORMATS))
    return library.AsyncClient(transport=library.ASGITransport(app))


class Rendered(ScriptedEngine):
    """Keeps what it was asked to render."""

    def render(self, messages: Any, options: Any) -> str:
        self.messages, self.options = messages, options
        return "x"


@pytest.mark.parametrize("pieces", [1, 9, 1000])
def test_messages(pieces: int):
    anthropic, library = pytest.importorskip("anthropic"), pytest.importorskip("httpx2")
    body: Any = {
        "model": "toy", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}],
        "tools": BLOCKS, "thinking": {"type": "enabled", "budget_tokens": 1024},
    }  # fmt: skip

    async def main() -> list[Any]:
        async with anthropic.AsyncAnthropic(
            base_url="http://server",
            api_key="x",
            http_client=client_of(scripted(EVERYTHING, pieces), library),
        ) as client:
            whole = await client.messages.create(**body)
            async with client.messages.stream(**body) as stream:
                async for _ in stream:
                    pass
                return [whole, await stream.get_final_message()]

    for found in asyncio.run(main()):
        assert [block.type for block in found.content] == ["thinking", "text", "tool_use", "tool_use"]  # fmt: skip
        thought, text, first, second = found.content
        assert (thought.thinking, text.text) == ("hm", "Ok.")
        assert (first.name, first.input, second.input) == ("f", {"count": 1}, {"count": 2})
        assert first.id != second.id
        assert found.stop_reason == "tool_use"


@pytest.mark.parametrize("pieces", [1, 9, 1000])
def test_responses(pieces: int):
    openai = pytest.importorskip("openai")

    async def main() -> list[Any]:
        async with openai.AsyncOpenAI(
            base_url="http://server/v1",
            api_key="x",
            http_client=client_of(scripted(EVERYTHING, pieces)),
        ) as client:
            whole = await client.responses.create(model="toy", input="hi", tools=FLAT)
            async with client.responses.stream(model="toy", input="hi", tools=FLAT) as stream:
                async for _ in stream:
                    pass
                return [whole, await stream.get_final_response()]

    for found in asyncio.run(main()):
        kinds = [item.type for item in found.output]
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        thought, message, first, second = found.output
        assert thought.content[0].text == "hm"
        assert found.output_text == message.content[0].text == "Ok."
        assert (first.name, json.loads(first.arguments)) == ("f", {"count": 1})
        assert json.loads(second.arguments) == {"count": 2}
        assert len({item.id for item in found.output}) == 4
        count = len("<think>\nhm\n</think>")
        assert found.usage.output_tokens_details.reasoning_tokens == count


ORDER = {
    RESPONSES: (
        {"input": "hi", "tools": FLAT},
        "created in_progress"
        " output_item.added content_part.added reasoning_text.delta reasoning_text.done content_part.done output_item.done"
        " output_item.added content_part.added output_text.delta output_text.done content_part.done output_item.done"
        " output_item.added function_call_arguments.delta function_call_arguments.done output_item.done"
        " output_item.added function_call_arguments.delta function_call_arguments.done output_item.done completed",
    ),
    MESSAGES: (
        {"messages": [{"role": "user", "content": "hi"}], "tools": BLOCKS, "max_tokens": 50, "thinking": {"type": "adaptive"}},
        "message_start" + " content_block_start content_block_delta content_block_stop" * 4
        + " message_delta message_stop",
    ),
}  # fmt: skip


@pytest.mark.parametrize("path", ORDER)
@pytest.mark.parametrize("pieces", [1, 9, 1000])
def test_events_come_in_their_order(path: str, pieces: int):
    """Each item is closed before the next is opened; deltas may be many."""
    body, wanted = ORDER[path]
    found = ask(scripted(EVERYTHING, pieces), "POST", path, {**body, "stream": True}, **FORMATS)
    events = [json.loads(one.split("data: ", 1)[1]) for one in found.text.split("\n\n") if one]
    kinds = [event["type"].removeprefix("response.") for event in events]
    once = [kind for at, kind in enumerate(kinds) if not kind.endswith("delta") or kinds[at - 1] != kind or kind == "message_delta"]  # fmt: skip
    assert once == wanted.split()
    if path == RESPONSES:
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        places = [event["output_index"] for event in events if "output_index" in event]
        assert places == sorted(places)
        parts = [event["part"]["type"] for event in events if "part" in event]
        assert parts == ["reasoning_text"] * 2 + ["output_text"] * 2


def test_unrequested_reasoning_is_still_counted():
    count = len("<think>\nhm\n</think>")
    engine = scripted(EVERYTHING, 9)
    whole = ask(engine, "POST", RESPONSES, {"input": "hi", "include_reasoning": False}, **FORMATS).json()  # fmt: skip
    assert [item["type"] for item in whole["output"]] == ["message"]
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": count}
    body = {"input": "hi", "include_reasoning": False, "stream": True}
    events = ask(scripted(EVERYTHING, 9), "POST", RESPONSES, body, **FORMATS).text
    assert "reasoning_text" not in events
    assert f'"reasoning_tokens":{count}' in events


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "reasoning_effort": "much"}, "reasoning_effort"),
        (RESPONSES, {"input": "hi", "reasoning": {"effort": "much"}}, "reasoning.effort"),
        (MESSAGES, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "output_config": {"effort": 7}}, "output_config.effort"),
    ],
)  # fmt: skip
def test_unknown_reasoning_efforts_are_refused(path: str, body: dict[str, Any], field: str):
    found = ask(ScriptedEngine("x"), "POST", path, body, **FORMATS)
    assert found.status_code == 400
    assert f"`{field}` must be one of none, minimal, low" in found.json()["error"]["message"]


def test_effort_reaches_the_template_from_each_protocol():
    for path, body in (
        (RESPONSES, {"input": "hi", "reasoning": {"effort": "none"}}),
        (MESSAGES, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "output_config": {"effort": "none"}}),
    ):  # fmt: skip
        engine = Rendered("x")
        assert ask(engine, "POST", path, body, **FORMATS).status_code == 200
        assert engine.options.template_kwargs == {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}  # fmt: skip


def test_a_history_of_messages():
    engine = Rendered("Three.")
    history = [
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "I count."},
            {"type": "tool_use", "id": "c1", "name": "f", "input": {"count": 1}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "3"}]},
            {"type": "text", "text": "Well?"},
        ]},
    ]  # fmt: skip
    body = {"max_tokens": 9, "messages": history, "tools": BLOCKS}
    found = ask(engine, "POST", MESSAGES, body, **FORMATS)
    assert found.json()["content"] == [{"type": "text", "text": "Three."}]
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"count": 1}}}
    assert engine.messages == [
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "I count.", "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "user", "content": "Well?"},
    ]
    assert [tool["function"]["name"] for tool in engine.options.tools] == ["get_weather", "f", "ns.read-file"]  # fmt: skip


def test_a_history_of_items():
    engine = Rendered("Three.")
    items = [
        {"role": "user", "content": "How many?"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I count."}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"count": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
    ]  # fmt: skip
    found = ask(engine, "POST", RESPONSES, {"input": items, "tools": FLAT}, **FORMATS)
    assert found.json()["output"][0]["content"][0]["text"] == "Three."
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"count": 1}}}
    assert engine.messages == [
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "I count.", "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]


def test_reasoning_is_returned_on_request():
    body = {"max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}
    for thinking, wanted in (
        (None, {}), ({"type": "disabled"}, {"enable_thinking": False}),
        ({"type": "adaptive"}, {"enable_thinking": True}),
    ):  # fmt: skip
        engine = Rendered("<think>hm</think>Yes.")
        asked = body if thinking is None else {**body, "thinking": thinking}
        found = ask(engine, "POST", MESSAGES, asked, **FORMATS).json()
        kinds = [block["type"] for block in found["content"]]
        assert kinds == (["thinking", "text"] if wanted.get("enable_thinking") else ["text"])
        assert found["content"][-1]["text"] == "Yes."
        assert engine.options.template_kwargs == wanted


@pytest.mark.parametrize(
    ("asked", "kind", "several"),
    [({"type": "any"}, "tags_with_separator", True), ({"type": "any", "disable_parallel_tool_use": True}, "tags_with_separator", False),
     ({"type": "tool", "name": "f"}, "tags_with_separator", False), ({"type": "auto"}, "triggered_tags", True)],
)  # fmt: skip
def test_the_choice_of_messages(asked: dict[str, Any], kind: str, several: bool):
    engine = ScriptedEngine(CALL)
    body = {"max_tokens": 50, "messages": [{"role": "user", "content": "hi"}], "tools": BLOCKS, "tool_choice": asked}  # fmt: skip
    found = ask(engine, "POST", MESSAGES, body, **FORMATS).json()
    assert found["stop_reason"] == "tool_use"
    form = engine.asked[0].params.structured_outputs.structural_tag["format"]["elements"][-1]
    assert form["type"] == kind
    assert form["stop_after_first"] is not several


REFUSED = [
    (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search"),
    (MESSAGES, {"tools": BLOCKS, "tool_choice": {"type": "tool", "name": "g"}}, "unknown tool"),
    (MESSAGES, {"tools": BLOCKS, "tool_choice": {"type": "must"}}, "tool_choice.type"),
    (MESSAGES, {"thinking": {"type": "much"}}, "thinking.type"),
    (
        MESSAGES,
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]},
        "must have a `name`",
    ),
    (
        MESSAGES,
        {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]},
        "blocks of type",
    ),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "web_search"),
    (RESPONSES, {"input": [{"type": "function_call", "name": "f"}]}, "`arguments` as a string"),
    (RESPONSES, {"input": [{"type": "computer_call"}]}, "only messages"),
    (
        RESPONSES,
        {"tools": FLAT, "tool_choice": {"type": "function", "name": "g"}},
        "unknown tool",
    ),
]


@pytest.mark.parametrize(("path", "body", "says"), REFUSED, ids=range(len(REFUSED)))
def test_refusals(path: str, body: dict[str, Any], says: str):
    base: dict[str, Any] = {"input": "hi"}
    if path == MESSAGES:
        base = {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    found = ask(ScriptedEngine("x"), "POST", path, {**base, **body}, **FORMATS)
    assert found.status_code == 400
    assert says in found.json()["error"]["message"]
