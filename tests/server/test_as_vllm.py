"""What a program that was written for vLLM's server expects, beyond the recorded answers."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from asgi import ask
from scripted import ScriptedEngine, make_state

from quire.server.app import build_app

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def test_responses_take_penalties_and_biases():
    engine = ScriptedEngine()
    body = {"frequency_penalty": 2.0, "presence_penalty": 0.5, "logit_bias": {"7": -100}}
    assert ask(engine, "POST", RESPONSES, {"input": "hi", **body}).status_code == 200
    params = engine.asked[0].params
    assert (params.frequency_penalty, params.presence_penalty) == (2.0, 0.5)
    assert params.logit_bias == {7: -100}


def test_responses_log_what_has_no_effect(caplog: pytest.LogCaptureFixture):
    body = {"input": "hi", "service_tier": "priority", "prompt_cache_key": "k", "max_tool_calls": 3}
    with caplog.at_level("WARNING", logger="quire"):
        found = ask(ScriptedEngine(), "POST", RESPONSES, body)
        ask(ScriptedEngine(), "POST", RESPONSES, {"input": "hi", "service_tier": "auto"})
    assert found.status_code == 200
    assert {name: found.json()[name] for name in body if name != "input"} == {
        "service_tier": "priority", "prompt_cache_key": "k", "max_tool_calls": 3,
    }  # fmt: skip
    for name in ("service_tier", "prompt_cache_key", "max_tool_calls"):
        assert sum(f"`{name}`" in record.getMessage() for record in caplog.records) == 1


def test_a_preflight_of_another_site_names_the_flag():
    asks = {"Origin": "http://app.example", "Access-Control-Request-Method": "POST"}
    found = ask(ScriptedEngine(), "OPTIONS", CHAT, headers=asks)
    assert (found.status_code, found.headers["allow"]) == (405, "POST")
    assert "--allowed-origins" in found.json()["error"]["message"]
    assert "--allowed-origins" not in ask(ScriptedEngine(), "GET", CHAT).text
    assert "--allowed-origins" not in ask(ScriptedEngine(), "OPTIONS", "/nothing").text


@pytest.mark.parametrize("root", ["/llm", "/llm/", "/v1", "/health"])
def test_a_path_is_served_with_and_without_the_root_path(root: str):
    """As uvicorn passes it: with the root path in front, whether the proxy has removed it or not."""
    state = make_state(ScriptedEngine(), root_path=root, api_key=["k"])
    key = {"Authorization": "Bearer k"}

    async def go() -> None:
        app = httpx.ASGITransport(build_app(state), root_path=root)
        async with httpx.AsyncClient(transport=app, base_url="http://server") as client:
            for path in ("/v1/models", "/v1/models/toy", "/health/live"):
                for before in ("", root.rstrip("/")):
                    found = await client.get(f"{root}{before}{path}", headers=key)
                    assert found.status_code == 200, (before, path)
            for path in ("/v1/models", "/v1/models/toy"):
                for before in ("", root.rstrip("/")):
                    assert (await client.get(f"{root}{before}{path}")).status_code == 401
            assert (await client.get(f"{root}/other/v1/models", headers=key)).status_code == 404

    asyncio.run(go())
