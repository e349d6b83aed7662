"""Text as it streams: no stop string shows, no character is cut, however the tokens come."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from asgi import ask, browser, frames
from scripted import ScriptedEngine, make_state
from scripted_core import make_tokenizer, told_engine

from quire.errors import EngineDeadError, EngineDelayed, StartupError
from quire.observe.prometheus import ServerMetrics
from quire.server.state import ServerPhase, ServerState

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
TALE = "Ünd 🙂🙃 é 日本語 \u200d👩‍👩‍👧 <END> ENDE <EN <END"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(found)
    return found


def say(folder: Path, text: str, step: int, path: str, body: dict[str, Any]) -> tuple[str, list[str]]:  # fmt: skip
    """The raw stream, and the ids that were aborted in the engine."""

    async def go() -> tuple[str, list[str]]:
        engine, client = told_engine(folder, text, step)
        state = make_state(None)
        state.engine, state.phase = engine, ServerPhase.READY
        async with browser(state) as http:
            answer = await http.post(path, json={**body, "stream": True, "max_tokens": 4000})
        client.close()
        return answer.text, client.aborted

    return asyncio.run(go())


def texts(raw: str) -> list[str]:
    events = frames(raw)
    assert events[-1] == "[DONE]"
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    return [one["text"] if "text" in one else one["delta"].get("content", "") for one in choices]


@pytest.mark.parametrize("step", [1, 2, 3, 5, 7, 1000])
def test_no_character_is_cut(folder: Path, step: int):
    raw, _ = say(folder, TALE, step, TEXT, {"prompt": "x"})
    parts = texts(raw)
    assert "".join(parts) == TALE
    assert "\ufffd" not in raw
    # Each event is whole UTF-8 by itself, so one may be cut out of the stream.
    for event in raw.encode().split(b"\n\n"):
        event.decode("utf-8")
    if step == 1:
        assert len(parts) > len(TALE) * 0.8


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_stop_string_never_shows(folder: Path, step: int, path: str):
    body: dict[str, Any] = {"prompt": "x"}
    if path == CHAT:
        body = {"messages": [{"role": "user", "content": "x"}], "chat_template": None}
    raw, aborted = say(folder, TALE, step, path, body | {"stop": ["<END>", "never"]})
    parts = texts(raw)
    assert "".join(parts) == TALE[: TALE.index("<END>")]
    assert not any("<" in part for part in parts)
    last = frames(raw)[-2]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "<END>")
    if step == 1:
        assert len(aborted) == 1  # the engine would have gone on


def test_a_partial_stop_string_is_shown_at_the_end(folder: Path):
    raw, aborted = say(folder, "a <EN", 1, TEXT, {"prompt": "x", "stop": "<END>"})
    assert "".join(texts(raw)) == "a <EN"
    assert not aborted


def test_random_stop_strings_in_random_texts(folder: Path):
    draw = random.Random(0)
    for _ in range(60):
        text = "".join(draw.choices("abé🙂", k=40))
        stops = ["".join(draw.choices("abé🙂", k=draw.randint(1, 4))) for _ in range(draw.randint(1, 3))]  # fmt: skip
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        expected = text
        if ends:
            # The one that is complete first counts; of several at one place, the longest.
            end = min(ends)
            expected = text[: end - max(len(stop) for stop in stops if text[:end].endswith(stop))]
        raw, _ = say(folder, text, draw.randint(1, 6), TEXT, {"prompt": "x", "stop": stops})
        parts = texts(raw)
        assert "".join(parts) == expected, (text, stops)
        assert "\ufffd" not in "".join(parts)


def test_include_stop_str_in_output_keeps_the_stop_string(folder: Path):
    body = {"prompt": "x", "stop": ["<END>"], "include_stop_str_in_output": True}
    raw, _ = say(folder, TALE, 2, TEXT, body)
    assert "".join(texts(raw)) == TALE[: TALE.index("<END>") + 5]


def test_a_dead_engine_ends_every_stream(folder: Path):
    async def go() -> list[str]:
        engine, client = told_engine(folder, "abc")
        client.tokens = client.tokens[:0]  # it says nothing
        state = ServerState(make_state(None).config, ServerMetrics("toy", process=False), engine)
        state.phase = ServerPhase.READY
        async with browser(state) as http:
            bodies = [{"prompt": "x", "stream": True}, {"prompt": "x"}]
            asked = [asyncio.ensure_future(http.post(TEXT, json=body)) for body in bodies]
            while len(client.begun) < 2:
                await asyncio.sleep(0.01)
            client.close()
            return [(await one).text for one in asked]

    stream, whole = asyncio.run(go())
    assert "the engine has stopped" in json.loads(whole)["error"]["message"]
    assert "the engine has stopped" in stream


class Delayed(ScriptedEngine):
    """One that failed too often."""

    def check(self) -> None:
        raise EngineDelayed("0badcafe")

    def is_ready(self) -> bool:
        return False

    async def open(self, *args: Any, **more: Any) -> Any:
        raise EngineDelayed("0badcafe")


def test_without_an_engine_requests_get_retry_after():
    """(The server ended; before that /health said 200 where there was no engine.)"""
    state = make_state(Delayed())
    for path in ("/health", "/ping", "/health/ready"):
        found = ask(None, "GET", path, state=state)
        assert found.status_code == 503
        assert found.json() == {"status": "the engine is being restarted"}
    assert ask(None, "GET", "/health/live", state=state).status_code == 200
    for body in ({"prompt": "x"}, {"prompt": "x", "stream": True}):
        found = ask(None, "POST", TEXT, body, state=state)
        assert (found.status_code, found.headers["retry-after"]) == (503, "30")
        assert "0badcafe" in found.json()["error"]["message"]
    assert state.phase is ServerPhase.READY


@pytest.mark.parametrize(
    "error",
    [
        EngineDeadError("row 3 is taken by 'cmpl-another'; it broke"),
        StartupError("row 3 is taken by 'cmpl-another'; it broke"),
        ValueError("row 3 is taken by 'cmpl-another'; it broke"),
        RuntimeError("row 3 is taken by 'cmpl-another'; it broke"),
    ],
)
def test_exception_texts_are_only_logged(error: Exception):
    found = ask(ScriptedEngine(error), "POST", TEXT, {"prompt": "x"})
    assert found.status_code >= 400
    assert "log" in found.json()["error"]["message"]
    assert "cmpl-another" not in found.text
    assert "it broke" not in found.text
