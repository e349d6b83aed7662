"""Thousands of random and mutated requests: no answer is a 5xx, none hangs, nothing stays behind.

The routes use the real frontend; the engine has a fixed text. Good requests run between the odd ones
and get their answers as if they were alone.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections import Counter
from pathlib import Path

import httpx
import malformed_requests
import pytest
from asgi import browser
from scripted import make_state
from scripted_core import make_tokenizer, told_engine

from quire.server.state import ServerState

SAID = "Hé 🙂!"
PATIENCE_S = 200  # a request that takes longer hangs


class Fuzz:
    def __init__(self, state: ServerState, http: httpx.AsyncClient, seed: int):
        self.state, self.http, self.draw = state, http, random.Random(seed)
        self.statuses: Counter[int] = Counter()

    async def run(self, count: int) -> None:
        for _ in range(0, count, 10):
            odds = [malformed_requests.request(self.draw) for _ in range(9)]
            ending = any("/abort_requests" in path for _, path, _, _ in odds)
            await asyncio.gather(self.good(ending), *map(self.odd, odds))

    async def odd(self, one: malformed_requests.Odd) -> None:
        method, path, headers, raw = one
        short = (method, path, headers, raw[:2000])
        sent = self.http.request(method, path, content=raw, headers=[(k.encode(), v.encode("latin-1")) for k, v in headers.items()])  # fmt: skip
        try:
            found = await asyncio.wait_for(sent, PATIENCE_S)
        except TimeoutError:
            raise AssertionError(f"no answer: {short}") from None
        self.statuses[found.status_code] += 1
        assert found.status_code < 500, (short, found.text)
        if found.status_code >= 400 and method != "HEAD":
            error = found.json()["error"]
            said = error if isinstance(error, str) else error["message"]  # Ollama's is a text
            assert said, short
        assert '"code":500' not in found.text, (short, found.text)
        assert "Traceback" not in found.text, short

    async def good(self, ending: bool = False) -> None:
        """One whole answer or one stream, as a client that does nothing wrong asks for it.

        `ending`: an odd one may have all requests ended, this one too.
        """
        stream = self.draw.random() < 0.5
        asked = {"prompt": "hi", "max_tokens": 4, "stream": stream}
        found = await asyncio.wait_for(self.http.post("/v1/completions", json=asked), PATIENCE_S)
        assert found.status_code == 200
        frames = [found.text]
        if stream:
            frames = [line[6:] for line in found.text.splitlines() if line.startswith("data: ")]
            assert frames.pop() == "[DONE]"
        choices = [json.loads(frame)["choices"][0] for frame in frames]
        text = "".join(choice["text"] for choice in choices)
        if ending and choices[-1]["finish_reason"] == "abort":
            assert SAID.startswith(text)
        else:
            assert text == SAID


def fuzz(folder: Path, seed: int, count: int) -> Counter[int]:
    make_tokenizer(folder)

    async def go() -> Counter[int]:
        engine, client = told_engine(folder, SAID)
        state = make_state(None)
        state.attach(engine)
        state.dev_mode = True
        async with browser(state) as http:
            run = Fuzz(state, http, seed)
            await run.good()
            before = len(asyncio.all_tasks())
            await run.run(count)
            async with asyncio.timeout(PATIENCE_S):
                while len(asyncio.all_tasks()) > before:
                    await asyncio.sleep(0.01)  # what works in threads ends a little later
        assert not state.active
        assert not state.http_requests
        assert not engine.front.live
        client.close()
        return run.statuses

    statuses = asyncio.run(go())
    gc.collect()  # a task that was never awaited warns here, and a warning is an error
    assert statuses[200] > count / 10  # neither all refused ...
    assert statuses[400] > count / 5  # ... nor all taken
    return statuses


def test_no_request_breaks_the_server(tmp_path: Path):
    fuzz(tmp_path, 1, 700)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 10))
def test_no_request_breaks_the_server_ever(seed: int, tmp_path: Path):
    fuzz(tmp_path, seed, 4000)


def test_generated_requests_are_reproducible():
    one, two = random.Random(5), random.Random(5)
    assert [malformed_requests.request(one) for _ in range(200)] == [
        malformed_requests.request(two) for _ in range(200)
    ]
