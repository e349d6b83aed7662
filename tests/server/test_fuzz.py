"""Thousands of random and mutated bodies: no answer is a 5xx, none hangs, nothing stays behind.

The real front room stands behind the routes; the engine says a fixed text.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from asgi import browser
from scripted import make_state
from told import make_tokenizer, told_engine

from quire.server.docs import BODIES
from quire.server.state import Phase

ROUNDS = 1500
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3.5, -0.0, 1e308, -1e308, 1 << 31, 1 << 63, 1 << 64, -(1 << 63), "", "a",
    "\x00", "é🙂\ud7ff", "x" * 300, "1", "-1", "1e9", "nan", "true", [], [[]], [None], [0], [1, 2, 3], [-1], ["a"],
    [["a"]], [[1], [2]], [1 << 40], {}, {"a": 1}, {"": None}, {"type": "text"}, {"role": "user"}, [{"role": "user"}],
    [{"role": "user", "content": "x"}], [{"role": "assistant", "content": "x"}], [{"type": "text", "text": "x"}],
    {"include_usage": True}, {"type": "json_object"}, {"5": 1.0}, {"x": 1.0}, {"5": 1000.0}, ["a"] * 40, [5] * 200,
]  # fmt: skip
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/completions": {"prompt": "hi", "max_tokens": 4},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5, 6]},
    "/invocations": {"prompt": "hi", "max_tokens": 4},
}


def names(path: str) -> list[str]:
    kind = BODIES.get(path, BODIES["/v1/completions"])
    return [field.encode_name for field in msgspec.structs.fields(kind)]


def changed(draw: random.Random, value: Any) -> Any:
    """The value, or something inside it, replaced by something odd."""
    if isinstance(value, dict) and value and draw.random() < 0.6:
        key = draw.choice(list(value))
        return value | {key: changed(draw, value[key])}
    if isinstance(value, list) and value and draw.random() < 0.6:
        at = draw.randrange(len(value))
        return [*value[:at], changed(draw, value[at]), *value[at + 1 :]]
    return copy.deepcopy(draw.choice(ODD))


def body(draw: random.Random, path: str) -> bytes:
    found: Any = copy.deepcopy(GOOD[path])
    for _ in range(draw.choice((0, 1, 1, 1, 2, 2, 3, 5))):
        if draw.random() < 0.75:
            found[draw.choice(names(path))] = copy.deepcopy(draw.choice(ODD))
        else:
            changed_whole = changed(draw, found)
            found = changed_whole if isinstance(changed_whole, dict) else found
    raw = json.dumps(found).encode()
    if draw.random() < 0.05:
        at = draw.randrange(len(raw))
        raw = raw[:at] + bytes([draw.randrange(256)]) + raw[at + draw.randrange(3) :]
    return raw


@pytest.mark.parametrize("seed", [1])
def test_no_body_breaks_the_server(seed: int, tmp_path: Path):
    make_tokenizer(tmp_path)
    draw = random.Random(seed)
    statuses: dict[int, int] = {}

    async def go() -> None:
        engine, client = told_engine(tmp_path, "Hé 🙂!")
        state = make_state(None)
        state.engine, state.phase = engine, Phase.READY
        async with browser(state) as http:

            async def one() -> None:
                path = draw.choice(list(GOOD))
                raw = body(draw, path)
                found = await asyncio.wait_for(send(http, path, raw), 20)
                statuses[found.status_code] = statuses.get(found.status_code, 0) + 1
                assert found.status_code < 500, (path, raw, found.text)
                if found.status_code >= 400:
                    assert found.json()["error"]["message"], (path, raw)
                assert '"code":500' not in found.text, (path, raw, found.text)
                assert "Traceback" not in found.text

            for _ in range(0, ROUNDS, 10):
                await asyncio.gather(*(one() for _ in range(10)))
            good = await send(http, "/v1/completions", json.dumps(GOOD["/v1/completions"]).encode())
            assert good.json()["choices"][0]["text"] == "Hé 🙂!"
        assert not state.active
        assert not engine.front.live
        client.close()

    asyncio.run(go())
    assert statuses[200] > ROUNDS / 20  # neither all refused ...
    assert statuses[400] > ROUNDS / 4  # ... nor all taken


async def send(http: httpx.AsyncClient, path: str, raw: bytes) -> httpx.Response:
    return await http.post(path, content=raw, headers={"Content-Type": "application/json"})
