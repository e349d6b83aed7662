"""Large answers: made in parts in a thread, the same as small ones, and no further than the client takes them."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from asgi import ask, browser
from scripted import ScriptedEngine, make_state

from quire.frontend.logprobs import PackedLogprobs, PromptLogprobs, positions
from quire.protocol.output import Logprobs
from quire.server import answer, generation
from quire.server.openai import logprobs as shapes
from quire.server.streaming_json import LargeAnswer, LongList, encoded_parts

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (TEXT, {"prompt": ["ab", "c"], "n": 2}),
    "logprobs": (TEXT, {"prompt": ["ab", "c"], "n": 2, "logprobs": 2}),
    "none ranked": (TEXT, {"prompt": "ab", "logprobs": 0}),
    "echo": (TEXT, {"prompt": ["ab", "c"], "echo": True, "logprobs": 1, "max_tokens": 3}),
    "prompt logprobs": (TEXT, {"prompt": ["ab", "c"], "n": 2, "prompt_logprobs": 2, "return_token_ids": True}),
    "nothing drawn": (TEXT, {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 0}),
    "chat": (CHAT, {"messages": MESSAGES, "n": 2, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1}),
    "responses": ("/v1/responses", {"input": "hi", "top_logprobs": 2}),
}  # fmt: skip


def told(answer: Any) -> dict[str, Any]:
    body = answer.json()
    ids = {"id", "created", "created_at"}
    text = json.dumps({key: value for key, value in body.items() if key not in ids})
    return json.loads(text.replace(str(body["id"]).partition("_")[2] or "?", "id"))


@pytest.mark.parametrize(("path", "body"), BODIES.values(), ids=BODIES.keys())
def test_a_large_answer_has_the_same_content(path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch):  # fmt: skip
    small = ask(ScriptedEngine(), "POST", path, body)
    monkeypatch.setattr(generation, "LARGE_ENTRIES", 0)
    large = ask(ScriptedEngine(), "POST", path, body)
    assert small.status_code == large.status_code == 200
    assert "content-length" in small.headers
    assert "content-length" not in large.headers
    assert told(small) == told(large)
    assert large.headers["content-type"] == "application/json"


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 200])
def test_lists_in_lists_are_json(count: int):
    inner = [{"a": LongList(lambda: range(count)), "b": [at, '"']} for at in range(count)]
    body = {"x": LongList(lambda: inner), "y": LongList(lambda: iter([])), "z": 1}
    whole = {"x": [{"a": list(range(count)), "b": [at, '"']} for at in range(count)], "y": [], "z": 1}  # fmt: skip
    assert json.loads(b"".join(encoded_parts(body))) == whole


def many(count: int, width: int = 21) -> Logprobs:
    ids = [[(at + rank) % 500 for rank in range(width)] for at in range(count)]
    values = [[-0.25 - rank for rank in range(width)] for _ in range(count)]
    return Logprobs(1, ids, values, [1] * count)


def test_packed_positions_are_the_positions():
    found = many(50)
    found.token_ids[3][5] = found.token_ids[3][0]  # the chosen token again, among the likeliest
    plain = list(positions(found, None))
    packed = PackedLogprobs(None)
    packed.add(found, range(20))
    packed.add(found, range(20, 50))
    assert list(packed) == plain
    assert packed[-1] == plain[-1]
    assert packed[10:13] == plain[10:13]
    assert packed.entries == 50 * 21


def test_packed_positions_are_small():
    found = many(2000)
    tracemalloc.start()
    try:
        packed = PackedLogprobs(None)
        packed.add(found, range(2000))
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert size < 2000 * 21 * 20


def test_a_prompt_s_positions_may_come_twice_and_in_any_order():
    plain = list(positions(many(9), None))
    parts = [Logprobs(1 + at, [one], [values], [1]) for at, (one, values) in enumerate(zip(many(9).token_ids, many(9).values, strict=True))]  # fmt: skip
    gathered = PromptLogprobs(10, None)
    for at in (4, 5, 0, 1, 2, 3, 4, 5, 6, 8, 7):
        gathered.add(parts[at])
    assert list(gathered.result(False)) == [None, *plain]
    assert list(gathered.result(False, packed=True)) == [None, *plain]


class Long(ScriptedEngine):
    """Its outputs have the log-probabilities of a long text."""

    max_model_len = 1 << 20

    def output(self, *args: Any) -> Any:
        found = super().output(*args)
        for one in found.outputs:
            one.logprobs = PackedLogprobs(None)
            one.logprobs.add(many(4000), range(4000))
            one.token_ids = [at % 500 for at in range(4000)]
        return found


ASKED = {"prompt": "a", "n": 4, "logprobs": 20, "max_tokens": 4000}


def test_large_answers_are_built_outside_the_event_loop():
    """CPU time of the loop's thread: 336,000 entries took it a second."""
    state = make_state(Long())

    async def go() -> tuple[float, int]:
        async with browser(state) as client:
            begun = time.thread_time()
            answer = await client.post(TEXT, json=ASKED)
            spent = time.thread_time() - begun
        assert {len(one["logprobs"]["tokens"]) for one in answer.json()["choices"]} == {4000}
        return spent, len(answer.content)

    spent, size = asyncio.run(go())
    assert size > 2 << 20
    assert spent < 0.3


def test_a_large_response_is_built_while_sending(monkeypatch: pytest.MonkeyPatch):
    """(All its log-probabilities were objects at once.)"""
    made: list[Any] = []
    made_before: list[int] = []
    rows, send = shapes.chat_rows, answer.json_answer

    def counted_rows(*given: Any) -> Iterator[Any]:
        for row in rows(*given):
            made.append(row)
            yield row

    def counted_send(*given: Any) -> Any:
        made_before.append(len(made))
        return send(*given)

    monkeypatch.setattr(shapes, "chat_rows", counted_rows)
    monkeypatch.setattr(answer, "json_answer", counted_send)
    body = {"input": "a", "top_logprobs": 20, "max_output_tokens": 4000}
    whole = ask(Long(), "POST", "/v1/responses", body)
    assert len(whole.json()["output"][0]["content"][0]["logprobs"]) == 4000
    assert made_before == [0]


def test_an_unread_response_is_not_built():
    """And nothing more is made for a client that hangs up."""
    made: list[threading.Thread] = []

    def rows() -> Iterator[str]:
        for _ in range(10_000):
            made.append(threading.current_thread())
            yield "x" * 10_000

    async def go() -> None:
        incoming: asyncio.Queue[Any] = asyncio.Queue()
        outgoing: asyncio.Queue[Any] = asyncio.Queue(maxsize=2)
        with ThreadPoolExecutor(1) as pool:
            answer = LargeAnswer({"x": LongList(rows)}, pool)
            task = asyncio.ensure_future(answer({"type": "http"}, incoming.get, outgoing.put))
            while not outgoing.full():
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert 0 < len(made) < 200
            incoming.put_nowait({"type": "http.disconnect"})
            await task
            assert len(made) < 200
        assert threading.main_thread() not in made

    asyncio.run(go())
