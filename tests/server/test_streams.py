"""What depends on time: disconnects, silence, slow starts, timeouts, pauses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest
from asgi import browser, calling, frames
from scripted import ScriptedEngine, make_state

from quire.errors import QueueFull
from quire.server import sse

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return run


def waiting(*script: Any) -> ScriptedEngine:
    """An engine that stops after its first output, until its gate opens."""
    engine = ScriptedEngine(*script)
    engine.gate = asyncio.Event()
    return engine


async def until(condition: Callable[[], Any]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("it never happened")


@in_loop
async def test_a_hang_up_in_a_stream_aborts_in_the_engine():
    engine = waiting("a", "b")
    state = make_state(engine)
    async with calling(state, CHAT, HI | {"stream": True}, {"x-request-id": "r"}) as call:
        assert "assistant" in await call.frame()
        assert '"a"' in await call.frame()
        assert state.active == {"chatcmpl-r"}
        call.hang_up()
        await call.ended()
    assert engine.aborted == engine.closed == ["chatcmpl-r"]
    assert not state.active


@in_loop
async def test_a_hang_up_before_the_first_token_aborts_in_the_engine():
    engine = waiting("a", "b")
    state = make_state(engine)
    engine.held = asyncio.Event()  # nothing comes at all
    async with calling(state, CHAT, HI | {"stream": True}) as call:
        await until(lambda: engine.asked)
        call.hang_up()
        await call.ended()
    assert engine.aborted == engine.closed == [engine.asked[0].id]
    assert not state.active


@in_loop
@pytest.mark.parametrize(("path", "body"), [(CHAT, HI), (TEXT, {"prompt": ["a", "b"]})])
async def test_a_hang_up_without_a_stream_aborts_every_prompt(path: str, body: dict[str, Any]):
    engine = waiting("a", "b")
    state = make_state(engine)
    async with calling(state, path, body) as call:
        await until(lambda: len(state.active) == len(body.get("prompt", "x")))
        running = set(state.active)
        call.hang_up()
        await call.ended()
    assert set(engine.aborted) == running
    assert set(engine.closed) == running
    assert not state.active


@in_loop
async def test_a_finished_request_is_not_aborted():
    engine = ScriptedEngine("a")
    async with browser(make_state(engine)) as client:
        await client.post(CHAT, json=HI)
        await client.post(CHAT, json=HI | {"stream": True})
    assert len(engine.closed) == 2
    assert not engine.aborted


@in_loop
async def test_an_error_of_one_prompt_ends_the_others():
    engine = ScriptedEngine("a", QueueFull("full"))
    state = make_state(engine)
    async with browser(state) as client:
        answer = await client.post(TEXT, json={"prompt": ["a", "b", "c"]})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert len(engine.asked) == len(engine.closed)
    assert not state.active
    assert b"vllm:admission_rejections_total" in state.metrics.render()


@in_loop
async def test_silence_is_filled_with_comments():
    engine = waiting("a", "b")
    state = make_state(engine, sse_keep_alive_interval=0.02)
    async with calling(state, CHAT, HI | {"stream": True}) as call:
        begun = [await call.frame()]
        while '"a"' not in begun[-1]:  # a loop that stands still for a moment is silent, too
            begun.append(await call.frame())
        assert any("assistant" in frame for frame in begun)
        assert await call.frame() == ": keep-alive\n\n"
        assert await call.frame() == ": keep-alive\n\n"
        assert engine.gate is not None
        engine.gate.set()
        rest = ""
        while "[DONE]" not in rest:
            rest += await call.frame()
    assert '"content":"b"' in rest


@in_loop
async def test_headers_are_sent_before_the_first_token(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sse, "HEADERS_AFTER_S", 0.05)
    engine = ScriptedEngine("a")
    state = make_state(engine)
    engine.held = asyncio.Event()
    async with calling(state, CHAT, HI | {"stream": True}) as call:
        start = await call.next()
        assert (start["type"], start["status"]) == ("http.response.start", 200)
        engine.held.set()
        assert "assistant" in await call.frame()


@in_loop
async def test_an_error_after_the_headers_is_an_event_and_the_stream_ends(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(sse, "HEADERS_AFTER_S", 0.01)
    engine = ScriptedEngine(QueueFull("full"))
    state = make_state(engine)
    engine.held = asyncio.Event()
    async with calling(state, CHAT, HI | {"stream": True}) as call:
        assert (await call.next())["status"] == 200
        engine.held.set()
        (event,) = frames(await call.frame())
        assert event["error"]["code"] == 503
        assert await call.frame() == "data: [DONE]\n\n"


@in_loop
@pytest.mark.parametrize("stream", [False, True])
async def test_a_timeout_aborts_with_an_error(stream: bool):
    engine = waiting("a", "b")
    state = make_state(engine)
    async with browser(state) as client:
        for seconds in (0.05, 0.5, 5):  # until its first token comes sooner than that
            asked = HI | {"timeout": seconds, "stream": stream}
            answer = await client.post(CHAT, json=asked)
            if answer.status_code == 200 or not stream:
                break
    assert answer.status_code == (200 if stream else 408)
    error = frames(answer.text)[-2]["error"] if stream else answer.json()["error"]
    assert error["code"] == 408
    assert error["param"] == "timeout"
    assert f"{seconds:g} s" in error["message"]
    assert engine.aborted == engine.closed
    assert not state.active


@in_loop
async def test_two_requests_of_one_id_do_not_meet():
    engine = waiting("a", "b")
    state = make_state(engine)
    async with calling(state, TEXT, {"prompt": "a", "request_id": "x"}) as one:
        await until(lambda: len(state.active) == 1)
        async with calling(state, TEXT, {"prompt": "a", "request_id": "x"}) as two:
            await until(lambda: len(state.active) == 2)
            assert len({asked.id for asked in engine.asked}) == 2
            assert engine.gate is not None
            engine.gate.set()
            for call in (one, two):
                assert (await call.next())["status"] == 200


@in_loop
async def test_a_pause_delays_new_requests():
    engine = ScriptedEngine("a")
    state = make_state(engine)
    state.dev_mode = True
    async with browser(state) as client:
        await client.post("/pause")
        assert (await client.get("/is_paused")).json() == {"is_paused": True}
        (_, mode, _, holder), *after = engine.called
        assert mode == "abort"
        assert after[:3] == [("drained", holder), ("pause", holder), ("reset_prefix_cache",)]
        late = asyncio.ensure_future(client.post(CHAT, json=HI))
        await asyncio.sleep(0.05)
        assert not late.done()
        await client.post("/resume")
        assert (await late).status_code == 200


@in_loop
async def test_abort_requests_ends_the_named_requests():
    engine = waiting("a", "b")
    state = make_state(engine)
    state.dev_mode = True
    async with calling(state, TEXT, {"prompt": "a", "request_id": "x"}):
        await until(lambda: state.active)
        async with browser(state) as client:
            other = await client.post("/abort_requests", json={"request_ids": ["y"]})
            assert other.json()["request_ids"] == []
            mine = await client.post("/abort_requests", json={"request_ids": ["cmpl-x"]})
            assert mine.json()["request_ids"] == ["cmpl-x"]
        assert engine.aborted == ["cmpl-x"]
