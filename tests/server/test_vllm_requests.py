"""What a program that was written for vLLM's server expects, beyond the recorded answers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from asgi import ask
from scripted import ScriptedEngine, make_state

from quire.frontend.chat import read_message
from quire.server import request_body
from quire.server.app import build_app
from quire.server.errors import clean
from quire.server.openai import responses

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def test_responses_take_penalties_and_biases():
    engine = ScriptedEngine()
    body = {"frequency_penalty": 2.0, "presence_penalty": 0.5, "logit_bias": {"7": -100}}
    assert ask(engine, "POST", RESPONSES, {"input": "hi", **body}).status_code == 200
    params = engine.asked[0].params
    assert (params.frequency_penalty, params.presence_penalty) == (2.0, 0.5)
    assert params.logit_bias == {7: -100}


def test_responses_log_ineffective_fields(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(responses.log, "_last", {})  # as if no other test had sent them
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


@pytest.mark.parametrize("path", ["/generative_scoring", "/v1/files", "/v1/files/file-1/content", "/v1/batches", "/v1/batches/b/cancel"])  # fmt: skip
@pytest.mark.parametrize("method", ["POST", "GET"])
def test_a_missing_feature_answers_by_name_and_is_not_tried_again(path: str, method: str):
    found = ask(ScriptedEngine(), method, path, {"input": "x"} if method == "POST" else None)
    error = found.json()["error"]
    assert (found.status_code, error["type"]) == (404, "NotFoundError")
    assert "not supported yet" in error["message"]


def test_the_tokenizers_configuration():
    engine = ScriptedEngine()
    engine.need_tokenizer = lambda: SimpleNamespace(  # type: ignore[method-assign]
        config={"model_max_length": 9, "eos_token": {"content": "<e>"}},
        special_tokens_map={"eos_token": "<e>"},
        chat_template="{{ x }}",
    )
    found = ask(engine, "GET", "/tokenizer_info", enable_tokenizer_info_endpoint=True)
    assert found.json() == {
        "model_max_length": 9, "eos_token": "<e>", "chat_template": "{{ x }}",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }  # fmt: skip
    without = ask(ScriptedEngine(), "GET", "/tokenizer_info")
    assert without.status_code == 404
    assert "--enable-tokenizer-info-endpoint" in without.text


def test_a_message_of_null_is_empty():
    engine = ScriptedEngine()
    for message in ({"role": "user", "content": None}, {"role": "system", "content": None}):
        assert ask(engine, "POST", CHAT, {"messages": [message]}).status_code == 200
    assert read_message({"role": "user", "content": None}, 0, "string", False)["content"] == ""
    assert read_message({"role": "assistant", "content": None}, 0, "string", False)["content"] is None  # fmt: skip
    assert ask(engine, "POST", CHAT, {"messages": [{"role": "user"}]}).status_code == 400


def test_unknown_fields_are_logged_once_each(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(request_body, "_logged", set())
    with caplog.at_level("INFO", logger="quire"):
        for number in range(3):
            ask(ScriptedEngine(), "POST", CHAT, {**HI, "foo_bar": number, "store": True})
            ask(ScriptedEngine(), "POST", "/invocations", {**HI, "max_tokens": 3})
        for number in range(request_body.MOST_LOGGED + 50):  # a client that invents names
            request_body.warn_of({f"field_{number}_x"}, {"messages"})
    lines = [r.getMessage() for r in caplog.records if "ignored field" in r.getMessage()]
    assert sum("'foo_bar'" in line for line in lines) == sum("'store'" in line for line in lines) == 1  # fmt: skip
    assert not any("max_tokens" in line for line in lines), (
        "known to the route that /invocations selects"
    )
    assert len(lines) == request_body.MOST_LOGGED


@pytest.mark.parametrize(
    ("path", "param"),
    [("/sleep?level=9", "query.level"), ("/sleep?mode=x", "query.mode"), ("/pause?mode=x", "query.mode"), ("/wake_up?tags=x", "query.tags")],
)  # fmt: skip
def test_a_parameter_of_the_query_is_named_as_one(path: str, param: str):
    state = make_state(ScriptedEngine())
    state.dev_mode = True
    found = ask(None, "POST", path, state=state)
    assert (found.status_code, found.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("method", "path", "body", "remedy"),
    [
        ("POST", "/sleep", None, "/sleep is off: start the server with QUIRE_SERVER_DEV_MODE=1"),
        ("GET", "/tokenizer_info", None, "/tokenizer_info is off: start the server with --enable-tokenizer-info-endpoint"),
        ("POST", "/v1/batches", {}, "the API of files and batches is not supported yet: use quire run-batch"),
        ("GET", "/v1/models/no", None, "this server has `toy`"),
        ("POST", CHAT, {**HI, "response_format": {"type": "json_schema"}}, "`response_format.json_schema.schema` must be"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_to_do(method: str, path: str, body: Any, remedy: str):
    assert remedy in ask(ScriptedEngine(), method, path, body).json()["error"]["message"]


def test_paths_in_errors_are_hidden_and_sentences_keep_their_end():
    assert (
        clean("loaded from /srv/models/a.b. To replace it") == "loaded from [path]. To replace it"
    )
