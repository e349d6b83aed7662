"""Request features of vLLM's server: asked log-probabilities, counts of the prefix cache, tools in namespaces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from asgi import ask, browser, frames
from scripted import ScriptedEngine, make_state

from quire.api.async_engine import AsyncEngine
from quire.config.engine import EngineConfig
from quire.engine.build import make_client
from quire.server.state import ServerState

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SAY = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def state() -> Iterator[ServerState]:
    config = EngineConfig.from_keywords(
        model="quire-tiny", max_num_seqs=2, kv_cache_memory_bytes=16 << 20, max_model_len=256
    )
    made = make_state(None, enable_prompt_tokens_details=True)
    made.attach(engine := AsyncEngine(make_client(config), config))
    yield made
    engine.shutdown()


def post(state: ServerState, path: str, body: dict[str, Any]) -> Any:
    async def main() -> Any:
        async with browser(state) as client:
            return await asyncio.wait_for(client.post(path, json=body), 60)

    return asyncio.run(main())


# -- logprob_token_ids ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "more", [{}, {"top_logprobs": 0}, {"top_logprobs": 1}, {"top_logprobs": 5}]
)
@pytest.mark.parametrize("stream", [True, False])
def test_asked_token_ids_are_returned_whatever_top_logprobs_says(
    state: ServerState, stream: bool, more: dict[str, Any]
):
    asked = [50, 60, 70, 80]
    body = {
        **SAY, **more, "logprobs": True, "logprob_token_ids": asked, "allowed_token_ids": [42], "max_tokens": 1,
        "return_tokens_as_token_ids": True, "temperature": 0, "stream": stream,
    }  # fmt: skip
    found = post(state, CHAT, body)
    assert found.status_code == 200, found.text
    answers = [f for f in frames(found.text) if f != "[DONE]"] if stream else [found.json()]
    tokens = [one for f in answers for c in f["choices"] for one in (c.get("logprobs") or {}).get("content", [])]  # fmt: skip
    (token,) = tokens
    assert token["token"] == "token_id:42"
    best = {one["token"] for one in token["top_logprobs"]}
    assert (
        {f"token_id:{one}" for one in asked} <= best <= {f"token_id:{one}" for one in [*asked, 42]}
    )


# -- counts of the prefix cache -------------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
def test_messages_count_what_is_written_to_the_cache_and_read_from_it(
    state: ServerState, stream: bool
):
    text = f"stream {stream}: " + "a b c d e f g h " * 12
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, "stream": stream}
    usages = []
    for _ in range(2):
        found = post(state, MESSAGES, body)
        if stream:
            events = [json.loads(line[6:]) for line in found.text.splitlines() if line.startswith("data: ")]  # fmt: skip
            usages.append(next(one for one in events if one["type"] == "message_delta")["usage"])
            start = next(one for one in events if one["type"] == "message_start")["message"]
            assert start["usage"] == usages[-1] | {"output_tokens": 0}
        else:
            usages.append(found.json()["usage"])
    engine = state.engine
    assert engine is not None
    block = engine.client.ready.block_size
    total = post(state, MESSAGES + "/count_tokens", {"messages": body["messages"]}).json()[
        "input_tokens"
    ]
    first, second = usages
    assert first["cache_read_input_tokens"] < block  # another request's template at most
    whole = total // block * block
    assert whole > 0
    assert first["cache_creation_input_tokens"] == whole - first["cache_read_input_tokens"]
    assert first["input_tokens"] == total - whole
    last = (total - 1) // block * block  # at least one token is computed
    assert second["cache_read_input_tokens"] == last
    assert second["cache_creation_input_tokens"] == whole - last
    assert second["input_tokens"] == total - whole


# -- tools in namespaces --------------------------------------------------------------------------
def namespace(name: str, *functions: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"app": {"type": "string"}}}
    inner = [{"type": "function", "name": one, "parameters": schema} for one in functions]
    return {"type": "namespace", "name": name, "description": "d", "tools": inner}


CALL = '<tool_call>\n{"name": "mcp__desk__look", "arguments": {"app": "x"}}\n</tool_call>'


def respond(body: dict[str, Any], script: str = CALL) -> tuple[ScriptedEngine, Any]:
    engine = ScriptedEngine(script)
    engine.max_model_len = 4096
    engine.inputs.max_model_len = 4096
    state = make_state(engine, tool_call_parser="hermes", enable_auto_tool_choice=True)
    return engine, ask(engine, "POST", RESPONSES, {"input": "hi", **body}, state=state)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_a_namespace_has_its_own_name_and_the_namespace(stream: bool):
    _, found = respond({"tools": [namespace("mcp__desk", "look")], "stream": stream})
    assert found.status_code == 200, found.text
    if stream:
        events = [json.loads(line[6:]) for line in found.text.splitlines() if line.startswith("data: ")]  # fmt: skip
        items = [one["item"] for one in events if one["type"].startswith("response.output_item")]
        assert len(items) == 2
        items += events[-1]["response"]["output"]
    else:
        items = found.json()["output"]
    for item in items:
        assert (item["type"], item["name"], item["namespace"]) == ("function_call", "look", "mcp__desk")  # fmt: skip
    assert json.loads(items[-1]["arguments"]) == {"app": "x"}


def test_a_plain_function_has_no_namespace():
    call = CALL.replace("mcp__desk__look", "look")
    plain = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    _, found = respond({"tools": [namespace("mcp__desk", "look"), plain]}, call)
    (item,) = found.json()["output"]
    assert item["name"] == "look"
    assert "namespace" not in item


@pytest.mark.parametrize("name", ["look", "mcp__desk__look"])
def test_a_choice_may_leave_the_namespace_out(name: str):
    tools = [namespace("mcp__desk", "look"), namespace("other", "see")]
    choice = {"type": "function", "name": name}
    engine, found = respond({"tools": tools, "tool_choice": choice})
    assert found.status_code == 200, found.text
    constraint = json.dumps(engine.asked[0].params.structured_outputs.structural_tag)
    assert "mcp__desk__look" in constraint
    assert "other__see" not in constraint


def test_earlier_calls_of_a_namespace_reach_the_model_by_their_full_name(
    monkeypatch: pytest.MonkeyPatch,
):
    seen: list[Any] = []
    whole = ScriptedEngine.render

    def render(self: ScriptedEngine, messages: list[dict[str, Any]], options: Any) -> str:
        seen.extend(messages)
        return whole(self, messages, options)

    monkeypatch.setattr(ScriptedEngine, "render", render)
    call = {"type": "function_call", "call_id": "1", "name": "look", "namespace": "mcp__desk", "arguments": "{}"}  # fmt: skip
    done = {"type": "function_call_output", "call_id": "1", "output": "ok"}
    _, found = respond({"input": [{"role": "user", "content": "a"}, call, done]}, "ok")
    assert found.status_code == 200, found.text
    assert [c["function"]["name"] for m in seen for c in m.get("tool_calls", ())] == ["mcp__desk__look"]  # fmt: skip


@pytest.mark.parametrize(
    ("tools", "choice", "said"),
    [
        ([{"type": "namespace"}], None, "tools[0]"),
        ([{"type": "namespace", "name": "a", "tools": {}}], None, "tools[0]"),
        ([{"type": "namespace", "name": "a", "tools": [7]}], None, "tools[0].tools[0].type"),
        ([{"type": "namespace", "name": "a", "tools": [{"type": "function"}]}], None, "tools[0].tools[0].name"),
        ([{"type": "namespace", "name": "a", "tools": [namespace("b", "c")]}], None, "tools[0].tools[0].type"),
        ([{"type": "namespace", "name": "a b", "tools": namespace("b", "c")["tools"]}], None, "name"),
        ([namespace("a", *(f"f{i}" for i in range(2000)))], None, "limit"),
        ([namespace("a", "f"), namespace("b", "f")], "f", "a__f, b__f"),
        ([namespace("a", "f")], "g", "unknown tool"),
    ],
)  # fmt: skip
def test_wrong_namespaces_are_refused_by_name(tools: Any, choice: str | None, said: str):
    body = {"tools": tools} | (
        {"tool_choice": {"type": "function", "name": choice}} if choice else {}
    )
    _, found = respond(body)
    assert found.status_code == 400
    assert said in found.json()["error"]["message"]
