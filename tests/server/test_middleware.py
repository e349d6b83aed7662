"""`--middleware`: the operator's own ASGI layers around every request."""

from __future__ import annotations

import asyncio

import pytest
from asgi import ask, calling, frames
from scripted import ScriptedEngine, make_state

from quire.config.flags import parse
from quire.errors import ConfigError
from quire.server.app import build_app

BOTH = ["user_middleware.Marked", "user_middleware:also_marked"]
HI = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


def test_both_kinds_see_every_answer_the_first_outermost():
    for method, path, body in (("GET", "/health", None), ("POST", CHAT, HI), ("GET", "/no", None)):
        answer = ask(ScriptedEngine(), method, path, body, middleware=BOTH)
        assert answer.headers.get_list("x-order") == ["function", "class"], path


def test_middleware_runs_before_the_key_check():
    answer = ask(ScriptedEngine(), "GET", "/v1/models", middleware=BOTH, api_key="k")
    assert answer.status_code == 401
    assert answer.headers.get_list("x-order") == ["function", "class"]


def test_a_stream_passes_through_unchanged():
    body = HI | {"stream": True}
    plain = frames(ask(ScriptedEngine(), "POST", CHAT, body).text)
    layered = frames(ask(ScriptedEngine(), "POST", CHAT, body, middleware=BOTH).text)
    texts = [
        [part["choices"][0]["delta"].get("content") for part in parts[:-1]]
        for parts in (plain, layered)
    ]
    assert texts[0] == texts[1]
    assert any(texts[0])
    assert layered[-1] == "[DONE]"


@pytest.mark.parametrize("layers", [BOTH[:1], BOTH])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_still_ends_its_request(layers: list[str], stream: bool):
    async def go() -> None:
        engine = ScriptedEngine("a", "b")
        engine.gate = asyncio.Event()
        state = make_state(engine, middleware=layers)
        async with calling(state, CHAT, HI | {"stream": stream}) as call:
            while not engine.asked:
                await asyncio.sleep(0.01)
            call.hang_up()
            await call.ended()
        assert engine.aborted == engine.closed == [engine.asked[0].id]

    asyncio.run(go())


def test_a_middleware_error_is_answered_without_its_text():
    answer = ask(ScriptedEngine(), "GET", "/health", headers={"x-fail": "1"}, middleware=BOTH)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == 500
    assert "secret" not in answer.text


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("Marked", "is not of the form module.Class"),
        ("no_such_module.Marked", "No module named"),
        ("user_middleware.Missing", "has no attribute 'Missing'"),
        ("user_middleware.NOT_A_LAYER", "neither a class"),
    ],
)
def test_invalid_middleware_is_refused_at_start(path, why):
    with pytest.raises(ConfigError, match=why) as caught:
        build_app(make_state(ScriptedEngine(), middleware=[path]))
    assert repr(path) in str(caught.value)


def test_the_flag_may_be_repeated():
    config = parse(["m", "--middleware", "a.B", "--middleware", "c.d", "e.f"])
    assert config.server.middleware == ["a.B", "c.d", "e.f"]
