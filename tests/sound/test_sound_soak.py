"""Two minutes of good, hostile and abandoned requests with sound and with text: nothing stays behind, and answers stay the same."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import whisper_checkpoint as whisper
from sound_server import TRANSCRIPTIONS, TRANSLATIONS, SoundServer, wav
from test_sound_files import encoded, mutated

SECONDS = 120.0
AT_ONCE = 12
GREEDY = {"temperature_increment_on_fallback": "0", "language": "en"}
FILES = {
    "one": wav(whisper.sound(1.3, 11)), "long": wav(whisper.sound(5.3, 7)),
    "flac": encoded("FLAC", whisper.sound(1.0, 3)), "opus": encoded("OPUS", whisper.sound(1.0, 4, 48_000), 48_000),
}  # fmt: skip


@pytest.fixture(scope="module")
def server(whisper_path: str) -> Iterator[SoundServer]:
    made = SoundServer(whisper_path)
    yield made
    made.close()


def memory() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.attack
def test_soak(server: SoundServer) -> None:
    draw, counts = random.Random(0), Counter[str]()
    known: dict[str, str] = {}

    async def post(http: httpx.AsyncClient, path: str, data: bytes, fields: Any) -> httpx.Response:
        return await http.post(path, files={"file": ("a.wav", data)}, data=fields)

    async def good(http: httpx.AsyncClient) -> None:
        name, path = draw.choice(list(FILES)), draw.choice([TRANSCRIPTIONS, TRANSLATIONS])
        shape = draw.choice(["json", "text", "srt", "vtt", "verbose_json"])
        found = await post(http, path, FILES[name], {**GREEDY, "response_format": shape})
        assert found.status_code == 200, found.text
        assert known.setdefault(f"{name} {path} {shape}", found.text) == found.text

    async def stream(http: httpx.AsyncClient) -> None:
        found = await post(http, TRANSCRIPTIONS, FILES["long"], {**GREEDY, "stream": "true"})
        *_, done, last = found.text.strip().split(
            "\n\n"
        )  # how text is cut into deltas depends on time
        assert last == "data: [DONE]"
        assert known.setdefault("stream", done) == done

    async def hostile(http: httpx.AsyncClient) -> None:
        data = mutated(FILES[draw.choice(list(FILES))], draw)
        found = await post(http, TRANSCRIPTIONS, data, {**GREEDY, "max_completion_tokens": "4"})
        assert found.status_code in (200, 400), found.text

    async def wrong(http: httpx.AsyncClient) -> None:
        body = os.urandom(draw.randrange(3000))
        kind = draw.choice(["multipart/form-data; boundary=x", "application/json", "x"])
        found = await http.post(TRANSCRIPTIONS, content=body, headers={"content-type": kind})
        assert found.status_code == 400, found.text

    async def abandoned(http: httpx.AsyncClient) -> None:
        asked = post(http, TRANSCRIPTIONS, FILES["long"], {**GREEDY, "timestamp_granularities[]": "word", "response_format": "verbose_json"})  # fmt: skip
        task = asyncio.create_task(asked)
        await asyncio.sleep(draw.random())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def text(http: httpx.AsyncClient) -> None:
        found = await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 4})
        assert found.status_code == 400
        assert (await http.get("/health")).status_code == 200

    kinds = [good, good, good, stream, hostile, hostile, wrong, abandoned, text]

    async def one(http: httpx.AsyncClient, until: float) -> None:
        while time.monotonic() < until:
            kind = draw.choice(kinds)
            await kind(http)
            counts[kind.__name__] += 1

    async def work(http: httpx.AsyncClient) -> None:
        await asyncio.gather(*(one(http, time.monotonic() + 5) for _ in range(AT_ONCE)))
        before = memory()
        await asyncio.gather(*(one(http, time.monotonic() + SECONDS) for _ in range(AT_ONCE)))
        until = time.monotonic() + 60
        while server.state.active or server.engine.front.live:
            assert time.monotonic() < until
            await asyncio.sleep(0.05)
        assert memory() - before < 200 << 20

    server.run(work)
    assert all(counts[kind.__name__] for kind in kinds), counts
    assert server.state.media_room.taken == 0
    scheduler = server.client.core.scheduler  # type: ignore[attr-defined]
    scheduler.check()
    assert not scheduler.running
    assert len(scheduler.kv.pool.free) == scheduler.kv.pool.num_blocks - 1
    gates = [gate for gate in scheduler.gates if gate.name == "transcription"]
    assert not gates[0].records
