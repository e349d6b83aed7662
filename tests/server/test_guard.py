"""Keys, limits of bodies, and bounds on what a client can make the server log."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from asgi import ask, browser, calling
from fake_clock import FakeClockLoop
from scripted import ScriptedEngine, make_state
from starlette.requests import Request
from starlette.routing import Route

from quire.config.unsupported import REQUEST_FIELDS
from quire.server.app import DEV_ROUTES, ROUTES, UI_ROUTES, build_app
from quire.server.errors import ApiError
from quire.server.middleware import OPEN
from quire.server.request_body import read_body

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
KEY = {"Authorization": "Bearer k"}
JSON = {"Content-Type": "application/json"}


def test_every_route_but_the_open_ones_needs_the_key():
    state = make_state(ScriptedEngine(), api_key="k")
    state.dev_mode = True
    for kinds, path, _ in ROUTES + UI_ROUTES + DEV_ROUTES:
        for kind in kinds.split():
            without = ask(None, kind, path, state=state)
            assert (without.status_code == 401) == (path not in OPEN), path
            assert ask(None, kind, path, headers=KEY, state=state).status_code != 401


def test_open_paths_are_routes():
    routes = [Route(path, call) for _, path, call in ROUTES + UI_ROUTES]
    assert [p for p in OPEN if not any(route.path_regex.match(p) for route in routes)] == []


@pytest.mark.parametrize(
    "path",
    ["//health", "/health/", "/HEALTH", "/health/../v1/models", "/v1/models/../../health", "/health%2f..%2fv1%2fmodels",
     "/%68ealth/x", "/metrics/../v1/models", "/ping;x", "/health/live/..", "/v1//models"],
)  # fmt: skip
def test_no_spelling_of_a_path_gets_past_the_key(path: str):
    async def go() -> int:
        async with calling(
            make_state(ScriptedEngine(), api_key="k"), path, {}, method="GET"
        ) as call:
            return (await call.next())["status"]

    assert asyncio.run(go()) == 401


def test_a_root_path_is_stripped_before_the_key_check():
    state = make_state(ScriptedEngine(), api_key="k")

    async def go(path: str) -> int:
        transport = httpx.ASGITransport(build_app(state), root_path="/api")
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return (await client.get(path)).status_code

    assert asyncio.run(go("/api/health")) == 200
    assert asyncio.run(go("/api/v1/models")) == 401


@pytest.mark.parametrize("given", ["k", "Bearer", "Bearer ", "Bearer kk", "Bearer K", "Basic k", "Bearer k k"])  # fmt: skip
def test_wrong_keys_are_refused(given: str):
    answer = ask(ScriptedEngine(), "GET", "/version", headers={"Authorization": given}, api_key="k")
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"


def test_keys_that_are_not_ascii():
    state = make_state(ScriptedEngine(), api_key="clé")
    sent = {"Authorization": b"Bearer cl\xc3\xa9"}

    async def go() -> int:
        async with browser(state) as client:
            return (await client.get("/version", headers=sent)).status_code

    assert asyncio.run(go()) == 200


def test_a_chunked_body_is_limited():
    state = make_state(ScriptedEngine(), max_body_bytes=1000)

    async def parts():
        for _ in range(100):
            yield b" " * 100

    async def go() -> httpx.Response:
        async with browser(state) as client:
            return await client.post(
                CHAT, content=parts(), headers={"Content-Type": "application/json"}
            )

    answer = asyncio.run(go())
    assert answer.status_code == 413
    assert "1000 bytes" in answer.json()["error"]["message"]


def test_a_too_long_content_length_is_refused_at_once():
    state = make_state(ScriptedEngine(), max_body_bytes=10)

    async def go() -> int:
        async with calling(state, CHAT, HI, {"content-length": "1000000"}) as call:
            return (await call.next())["status"]

    assert asyncio.run(go()) == 413


def test_null_means_unset():
    fields = ("model", "n", "temperature", "stop", "seed", "logprobs", "stream", "stream_options", "guided_json",
              "tools", "response_format", "max_tokens")  # fmt: skip
    engine = ScriptedEngine()
    answer = ask(engine, "POST", CHAT, HI | dict.fromkeys(fields))
    assert answer.status_code == 200
    assert engine.asked[0].params.n == 1


def test_numbers_may_come_as_text():
    engine = ScriptedEngine()
    assert ask(engine, "POST", CHAT, HI | {"n": "2", "temperature": "0.5"}).status_code == 200
    assert (engine.asked[0].params.n, engine.asked[0].params.temperature) == (2, 0.5)


def test_the_best_of_several_answers_in_a_chat():
    engine = ScriptedEngine()
    assert ask(engine, "POST", CHAT, HI | {"n": 2, "best_of": 5}).status_code == 200
    assert (engine.asked[0].params.n, engine.asked[0].params.best_of) == (2, 5)
    for body in ({"n": 2, "best_of": 1}, {"best_of": 2, "stream": True}):
        answer = ask(engine, "POST", CHAT, HI | body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "best_of")


def test_an_unknown_field_is_ignored_and_logged():
    assert ask(ScriptedEngine(), "POST", CHAT, HI | {"temprature": 0.5}).status_code == 200


def test_local_paths_are_not_disclosed():
    engine = ScriptedEngine(ValueError("cannot read /home/me/model/config.json"))
    error = ask(engine, "POST", CHAT, HI).json()["error"]
    assert "/home/me" not in error["message"]
    assert re.search(r"under [0-9a-f]{8}$", error["message"]), (
        error
    )  # the log has the reason under this id


def test_an_echoed_value_is_cut():
    answer = ask(ScriptedEngine(), "POST", CHAT, HI | {"model": "x" * 100_000})
    assert answer.status_code == 404
    assert len(answer.text) < 3000


def test_settings_are_shown_without_keys():
    state = make_state(ScriptedEngine(), api_key="secret-key", hf_token="secret-token")
    state.dev_mode = True
    answer = ask(
        None, "GET", "/server_info?config_format=json",
        headers={"Authorization": "Bearer secret-key"}, state=state,
    )  # fmt: skip
    assert "secret" not in answer.text
    assert json.loads(answer.text)["vllm_config"]["server"]["api_key"] == "***"


def test_metrics_have_errors_and_the_engine():
    state = make_state(ScriptedEngine("a"))
    ask(None, "POST", CHAT, HI, state=state)
    ask(None, "GET", "/nothing", state=state)
    text = ask(None, "GET", "/metrics", state=state).text
    assert 'quire:request_errors_total{model_name="toy",status="404"} 1.0' in text
    assert 'vllm:request_generation_tokens_count{engine="0",model_name="toy"} 1.0' in text
    assert "vllm:num_requests_running" in text


def test_a_stalled_body_times_out():
    state = make_state(ScriptedEngine(), receive_timeout=0.05)

    async def go() -> int:
        async with calling(state, CHAT, HI) as call:
            call.incoming.get_nowait()
            call.incoming.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
            return (await call.next())["status"]

    assert asyncio.run(go()) == 408


@pytest.mark.parametrize(
    ("bytes_each", "seconds_each", "is_whole"),
    [(16 << 10, 0.9, True), (16 << 10, 1.1, False), (1, 0.1, False)],
    ids=["steady", "silent", "slow in all"],
)
def test_a_body_has_a_time_for_each_part_and_in_all(
    bytes_each: int, seconds_each: float, is_whole: bool
):
    parts = iter([b" " * bytes_each] * 20)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(seconds_each)
        return {
            "type": "http.request",
            "body": next(parts),
            "more_body": parts.__length_hint__() > 0,
        }

    read = read_body(Request({"type": "http", "headers": []}, receive), 1 << 20, patience=1.0)
    with asyncio.Runner(loop_factory=FakeClockLoop) as runner:
        if is_whole:
            assert len(runner.run(read)) == 20 * bytes_each
        else:
            with pytest.raises(ApiError) as refused:
                runner.run(read)
            assert refused.value.status == 408


def test_requests_are_logged_if_enabled(caplog: pytest.LogCaptureFixture):
    for wanted in (False, True):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            state = make_state(ScriptedEngine(), enable_log_requests=wanted, max_log_len=3)
            ask(None, "POST", "/v1/completions", {"prompt": "abcdef", "seed": 7}, state=state)
        told = [record.getMessage() for record in caplog.records if "Received" in record.msg]
        assert len(told) == wanted
    assert "'abc'" in told[0]
    assert "seed=7" in told[0]


def test_the_document_has_every_route_and_no_field_that_is_refused():
    state = make_state(ScriptedEngine(), api_key="k")
    document = ask(None, "GET", "/openapi.json", headers=KEY, state=state).json()
    assert set(document["paths"]) == {
        path.replace(":path", "") for _, path, _ in ROUTES + UI_ROUTES
    }
    assert "security" in document["paths"][CHAT]["post"]
    assert "security" not in document["paths"]["/health"]["get"]
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert "temperature" in fields
    assert not set(REQUEST_FIELDS) & set(fields)
    page = ask(None, "GET", "/docs", headers=KEY, state=state).text
    assert CHAT in page
    assert "http" not in page.replace("http-equiv", "")  # nothing from elsewhere
    assert ask(ScriptedEngine(), "GET", "/docs", disable_fastapi_docs=True).status_code == 404


def test_an_answer_has_the_name_that_its_client_chose():
    """In the body, in the header, or nowhere: then the header of the answer tells which it is."""
    for header, body, made in (
        ({}, {"request_id": "b"}, "cmpl-b"),
        ({"X-Request-Id": "h"}, {"request_id": "b"}, "cmpl-h"),
        ({}, {}, None),
    ):
        answer = ask(
            ScriptedEngine("x"), "POST", "/v1/completions", {"prompt": "a", **body}, header,
            enable_request_id_headers=True,
        )  # fmt: skip
        told = answer.headers["x-request-id"]
        assert answer.json()["id"] == (made or f"cmpl-{told}")
        assert told == header.get("X-Request-Id", told)


BAD_IDS = [
    "a b",
    "x\nReceived request admin: forged",
    "\x1b[31m",
    "é",
    "x" * 257,
    "\x00",
    "a\u2028b",
]


@pytest.mark.parametrize("name", BAD_IDS)
def test_names_unsafe_for_logs_are_refused(name: str, caplog: pytest.LogCaptureFixture):
    state = make_state(
        ScriptedEngine("x"), enable_log_requests=True, enable_request_id_headers=True
    )
    bodies: dict[str, dict[str, object]] = {CHAT: HI, "/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "a"}}  # fmt: skip
    with caplog.at_level(logging.INFO):
        for path, body in bodies.items():
            answer = ask(None, "POST", path, {**body, "request_id": name}, state=state)
            assert answer.status_code == 400
            assert "request_id" in answer.json()["error"]["message"]
    assert "Received" not in caplog.text

    async def raw(given: bytes) -> dict[str, object]:
        state = make_state(ScriptedEngine("x"), enable_request_id_headers=True)
        async with calling(state, CHAT, HI, {}) as call:
            call.scope["headers"].append((b"x-request-id", given))
            return await call.next()

    found = asyncio.run(raw(name.encode()))
    assert found["status"] == 400
    assert b"x-request-id" not in dict(found["headers"])  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("MAX_COMPLETION_PROMPTS", {"prompt": ["a"] * 3}),
        ("MAX_LIST_ENTRIES", {"prompt": "a", "stop_token_ids": [1, 2, 3]}),
        ("MAX_LOGIT_BIASES", {"prompt": "a", "logit_bias": {"1": 1, "2": 1, "3": 1}}),
        ("MAX_STOP_STRINGS", {"prompt": "a", "stop": ["x", "y", "z"]}),
        ("MAX_N_SEQUENCES", {"prompt": "a", "n": 3, "temperature": 1}),
    ],
)
def test_each_limit_is_a_setting(
    name: str, body: dict[str, object], monkeypatch: pytest.MonkeyPatch
):
    for limit, status in (("2", 400), ("3", 200)):
        monkeypatch.setenv(f"QUIRE_{name}", limit)
        answer = ask(ScriptedEngine("x"), "POST", "/v1/completions", body)
        assert answer.status_code == status, answer.text


def test_the_openapi_document_contains_the_root_path():
    for root, servers in (("/api", [{"url": "/api"}]), (None, None)):
        found = ask(ScriptedEngine(), "GET", "/openapi.json", root_path=root).json()
        assert found.get("servers") == servers


@pytest.mark.parametrize("body", [
    {"method": "apply_model", "args": [{"__by_name__": "os:getcwd"}]},
    {"method": "apply_model", "args": ["os:getcwd"]},
    {"method": "apply_model"},
    {"method": "call_function", "args": ["os:getcwd"]},
    {"method": "get_model"},
])  # fmt: skip
def test_no_request_names_a_function_for_the_model(body: dict):
    state = make_state(engine := ScriptedEngine())
    state.dev_mode = True
    answer = ask(None, "POST", "/collective_rpc", body, state=state)
    assert answer.status_code == 400
    assert "a Python object, which JSON cannot contain" in answer.json()["error"]["message"]
    assert not engine.called


def test_a_mark_among_the_arguments_stays_a_dictionary():
    """C3d: {"__by_name__": ...} from HTTP was imported in the worker's process."""
    from quire.executor.messages import CallWorker, decode_down, encode, revive_callables

    args = ["length", [{"__by_name__": "os:getcwd"}, ["x", {"a": {"__by_name__": "this:s"}}]], {}]
    arrived = decode_down(encode(CallWorker("collective_rpc", args)))
    assert isinstance(arrived, CallWorker)
    assert revive_callables(arrived.args) == args


def test_an_abort_with_a_chunked_body_names_its_requests():
    """L8: a body without a length was taken for none, and all requests were aborted."""
    state = make_state(ScriptedEngine())
    state.dev_mode = True
    state.active |= {"cmpl-1", "cmpl-2"}

    async def parts() -> AsyncIterator[bytes]:
        yield b'{"request_ids":'
        yield b'["cmpl-1"]}'

    async def go() -> Any:
        async with browser(state) as client:
            return (await client.post("/abort_requests", content=parts(), headers=JSON)).json()

    answer = asyncio.run(go())
    assert answer.get("request_ids") == ["cmpl-1"], answer
