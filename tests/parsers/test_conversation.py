"""The embedded model through the whole server: calls, results, answers, thoughts. Greedy, so the same each time."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

import pytest
from asgi import browser, frames

from quire.config.structured import StructuredConfig
from quire.server.state import ServerState

CHAT = "/v1/chat/completions"
Ask = Callable[..., Awaitable[Any]]


def tool(name: str, says: str, **types: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    schema = {"type": "object", "properties": properties, "required": list(types)}
    return {
        "type": "function",
        "function": {"name": name, "description": says, "parameters": schema},
    }


WEATHER = tool("get_weather", "Get the weather of a city.", city="string")
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}


def talk(state: ServerState, work: Callable[[Ask], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with browser(state) as client:

            async def ask(*messages: dict[str, Any], **body: Any) -> Any:
                body = {"messages": messages, "temperature": 0, "max_tokens": 100, **body}
                found = await client.post(CHAT, json=body)
                assert found.status_code == 200, found.text
                if body.get("stream"):
                    return frames(found.text)
                (choice,) = found.json()["choices"]
                return choice

            return await asyncio.wait_for(work(ask), 60)

    return asyncio.run(main())


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in message.get("tool_calls") or []]
    return [(one["name"], json.loads(one["arguments"])) for one in functions]


def test_a_stream_is_the_same_call(state: ServerState):
    async def work(ask: Ask) -> None:
        whole = await ask(QUESTION, tools=[WEATHER])
        events = await ask(QUESTION, tools=[WEATHER], stream=True)
        deltas = [event["choices"][0]["delta"] for event in events[:-1]]
        parts = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert parts[0]["function"]["name"] == "get_weather"
        assert parts[0]["id"]
        text = "".join(part["function"]["arguments"] for part in parts)
        assert text == whole["message"]["tool_calls"][0]["function"]["arguments"]
        assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"

    talk(state, work)


def test_thoughts_come_before_the_answer(state: ServerState):
    sum_ = {"role": "user", "content": "What is 12 + 7?"}

    async def work(ask: Ask) -> None:
        whole = (await ask(sum_))["message"]
        assert whole["reasoning"]
        assert "<" not in whole["reasoning"] + whole["content"]
        events = await ask(sum_, stream=True)
        deltas = [event["choices"][0]["delta"] for event in events[:-1]]
        assert "".join(delta.get("reasoning", "") for delta in deltas) == whole["reasoning"]
        assert "".join(delta.get("content", "") for delta in deltas) == whole["content"]
        last = max(at for at, delta in enumerate(deltas) if "reasoning" in delta)
        assert all(not delta.get("content") for delta in deltas[:last])
        without = (await ask(sum_, reasoning_effort="none"))["message"]
        assert without["reasoning"] is None

    talk(state, work)


def test_a_response_format_applies_after_reasoning(
    state: ServerState, monkeypatch: pytest.MonkeyPatch
):
    """With a reasoning parser that the operator has chosen, as in vLLM."""
    server = replace(state.config.server, reasoning_parser="auto")
    monkeypatch.setattr(state, "config", replace(state.config, server=server))
    sum_ = {"role": "user", "content": "What is 12 + 7?"}

    async def work(ask: Ask) -> None:
        form = {"regex": r"12 \+ 7 = [0-9]{2}"}
        message = (await ask(sum_, structured_outputs=form))["message"]
        assert message["content"] == "12 + 7 = 19"
        assert message["reasoning"] == (await ask(sum_))["message"]["reasoning"]

    talk(state, work)


def test_no_thoughts_use_up_the_tokens_of_a_form(state: ServerState):
    """Without a chosen reasoning parser the answer begins at once, as in vLLM; the same for a call that must be made."""
    sum_ = {"role": "user", "content": "What is 12 + 7?"}

    async def work(ask: Ask) -> None:
        form = {"regex": r"12 \+ 7 = [0-9]{2}"}
        message = (await ask(sum_, structured_outputs=form, max_tokens=4))["message"]
        assert message["content"].startswith("12 +")
        assert message["reasoning"] is None
        assert (await ask(sum_, max_tokens=4))["message"]["reasoning"]  # it would think
        forced = await ask(QUESTION, tools=[WEATHER], tool_choice="required", max_tokens=60)
        assert calls_of(forced["message"])[0][0] == "get_weather"
        assert forced["message"]["reasoning"] is None

    talk(state, work)


def test_a_required_tool_call_follows_its_schema(state: ServerState):
    """Whatever the model would have liked to say."""
    book = tool("book", "Book a room.", nights="integer")
    book["function"]["parameters"] = {
        "type": "object",
        "properties": {"nights": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["nights"],
        "additionalProperties": False,
    }
    named = {"type": "function", "function": {"name": "book"}}
    tale = {"role": "user", "content": "Tell me a story."}

    async def work(ask: Ask) -> None:
        for choice, finish in (("required", "tool_calls"), (named, "stop")):
            found = await ask(tale, tools=[book], tool_choice=choice, reasoning_effort="none", parallel_tool_calls=False)  # fmt: skip
            assert found["finish_reason"] == finish
            ((name, arguments),) = calls_of(found["message"])
            assert name == "book"
            assert arguments["nights"] in range(1, 10)
            assert found["message"]["content"] == ("" if choice == named else None)
            assert found["message"]["reasoning"] is None

    talk(state, work)


def test_a_schema_that_cannot_be_enforced_fails_alone(state: ServerState):
    odd = tool("odd", "Odd.", a="integer")
    odd["function"]["parameters"]["properties"]["a"] = {"type": "array", "uniqueItems": True}

    async def main() -> None:
        async with browser(state) as client:
            body: Any = {"messages": [QUESTION], "temperature": 0, "tools": [odd], "max_tokens": 50}
            found, fine = await asyncio.gather(
                client.post(CHAT, json={**body, "tool_choice": "required"}),
                client.post(CHAT, json={**body, "tools": [WEATHER]}),
            )
            assert found.status_code == 400
            assert found.json()["error"]["param"] == "tools"
            assert "uniqueItems" in found.json()["error"]["message"]
            assert fine.json()["choices"][0]["finish_reason"] == "tool_calls"
            # What nothing has to enforce is no fault.
            assert (await client.post(CHAT, json=body)).status_code == 200

    asyncio.run(main())


def test_thoughts_that_may_cost_so_much(state: ServerState):
    """A budget ends them there, streamed or whole, and a form that follows begins there."""
    sum_ = {"role": "user", "content": "What is 12 + 7?"}
    form = {"regex": r"12 \+ 7 = [0-9]{2}"}

    async def work(ask: Ask) -> None:
        free = (await ask(sum_))["message"]["reasoning"]
        short = (await ask(sum_, thinking_token_budget=4))["message"]["reasoning"]
        assert 0 < len(short) < len(free)
        assert free.startswith(short)
        held = (await ask(sum_, thinking_token_budget=4, structured_outputs=form))["message"]
        assert held["reasoning"] == short
        assert re.fullmatch(form["regex"], held["content"])
        events = await ask(sum_, thinking_token_budget=4, stream=True)
        deltas = [event["choices"][0]["delta"] for event in events[:-1]]
        assert "".join(delta.get("reasoning") or "" for delta in deltas) == short
        assert (await ask(sum_, thinking_token_budget=-1))["message"]["reasoning"] == free

    talk(state, work)


def test_a_form_for_the_thoughts_too(state: ServerState, monkeypatch: pytest.MonkeyPatch):
    """enable_in_reasoning: the whole output keeps to it."""
    config = {"enable_in_reasoning": True}
    structured = StructuredConfig(structured_outputs_config=config)
    monkeypatch.setattr(state, "config", replace(state.config, structured=structured))

    async def work(ask: Ask) -> None:
        sum_ = {"role": "user", "content": "What is 12 + 7?"}
        message = (await ask(sum_, structured_outputs={"regex": "[0-9]{2}!"}))["message"]
        assert re.fullmatch("[0-9]{2}!", (message["reasoning"] or "") + (message["content"] or ""))

    talk(state, work)
